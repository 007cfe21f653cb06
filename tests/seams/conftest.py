import json
from collections.abc import Callable
from typing import Any

import pytest
from vllm_probe import run_probe


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
