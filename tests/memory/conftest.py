"""For all tests of memory."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def nothing_of_earlier_files():
    """Errors that another file's tests have kept hold stores, and these sockets, which must not go while one counts."""
    gc.collect()
