"""`rose bench mtp` asks a server that drafts nothing."""

from pathlib import Path

import pytest
from e2e_setup import EXAMPLE, Served

from vllm_rose_plugin.cli import main


@pytest.mark.slow
def test_a_server_without_a_draft(served: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    url = f"http://127.0.0.1:{served.server.port}"
    assert main(["bench", "mtp", "--url", url, "--questions", str(EXAMPLE / "prompts.txt")]) == 2
    assert "drafts nothing: its /metrics has no vllm:spec_decode_* counters" in capsys.readouterr().err
