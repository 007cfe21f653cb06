"""Marks the tests of thorough.py; no test leaves torch's default dtype changed for those after it."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from thorough import THOROUGH

ROOT = Path(__file__).parent


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks them."""
    patterns = [re.compile(pattern) for pattern in THOROUGH]
    for item in items:
        name = item.nodeid.removeprefix(f"{ROOT.name}/")
        if any(pattern.fullmatch(name) for pattern in patterns):
            item.add_marker(pytest.mark.thorough)


@pytest.fixture(autouse=True)
def _default_dtype() -> Iterator[None]:
    """It fails the test that leaves another one, instead of all that follow."""
    yield
    torch = sys.modules.get("torch")
    if torch is not None and (left := torch.get_default_dtype()) != torch.float32:
        torch.set_default_dtype(torch.float32)
        pytest.fail(f"this test leaves torch's default dtype at {left}")
