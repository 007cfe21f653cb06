"""`vllm serve` ends with a non-zero code and one clear message when it can't serve what it was asked to."""

from pathlib import Path

import pytest
from test_formats import DAMAGES, damaged
from vllm_server import ROSE_FLAGS, free_port, run_to_end, serve_command, serve_environment

pytestmark = pytest.mark.slow


def serve_to_end(model: Path, arguments: tuple[str, ...], cache: Path, directory: Path) -> str:
    """The output of a server that must end by itself with a non-zero code."""
    command = serve_command(model, (*ROSE_FLAGS, "--enforce-eager", *arguments), port=free_port())
    environment = serve_environment(cache)
    code, output = run_to_end(command, environment=environment, log=directory / "log", timeout=180)
    assert code != 0, output[-4000:]
    return output


def test_missing_scale(checkpoint: Path, cache: Path, tmp_path: Path) -> None:
    output = serve_to_end(damaged(checkpoint, tmp_path / "model", "missing"), (), cache, tmp_path)
    faults = [line for line in output.splitlines() if DAMAGES["missing"][0] in line]
    assert any("missing" in line for line in faults), output[-4000:]


def test_unknown_value_of_a_setting(checkpoint: Path, cache: Path, tmp_path: Path) -> None:
    output = serve_to_end(checkpoint, ("--additional-config", '{"rose": {"activation": "int8"}}'), cache, tmp_path)
    faults = [line for line in output.splitlines() if "'int8' is not allowed" in line]
    assert faults, output[-4000:]
    assert "activation" in faults[0] and "'mxfp8'" in faults[0] and "'bf16'" in faults[0], faults
