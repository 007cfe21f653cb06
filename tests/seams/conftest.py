import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import model_configs
import pytest
from vllm_probe import VERSIONS, run_probe

from vllm_rose_plugin.layers import log


@pytest.fixture(scope="module", params=VERSIONS)
def version(request):
    """Of vLLM."""
    return request.param


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A directory with the configuration of a small MoE model."""
    return str(model_configs.write(tmp_path_factory.mktemp("models") / "moe", model_configs.MOE))


@pytest.fixture
def lines(monkeypatch):
    """What was said once, as warnings."""
    said: list[str] = []
    monkeypatch.setattr(log, "logger", SimpleNamespace(warning_once=lambda text, *args: said.append(text % args)))
    return said


@pytest.fixture(scope="session")
def probe() -> Callable[..., dict[str, Any]]:
    """:func:`run_probe`, run once per distinct call."""
    results: dict[str, dict[str, Any]] = {}

    def run(version: str, name: str, *args: str, **keywords: Any) -> dict[str, Any]:
        key = json.dumps([version, name, args, keywords], sort_keys=True, default=str)
        if key not in results:
            results[key] = run_probe(version, name, *args, **keywords)
        return results[key]

    return run
