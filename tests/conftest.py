"""Marks the tests of thorough.py."""

import re
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
