"""Fixtures of the kernel tests."""

import pytest
import torch


@pytest.fixture
def poisoned_memory():
    """Uninitialized memory holds NaN (and the largest integers), as memory that was used before might."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    assert torch.empty(4).isnan().all()
    yield
    torch.use_deterministic_algorithms(before[0])
    torch.utils.deterministic.fill_uninitialized_memory = before[1]


@pytest.fixture
def flush_denormal():
    """Switches this thread to flushing subnormals; call it once the expected values are there."""

    def switch_on() -> None:
        assert torch.set_flush_denormal(True)
        tiny = torch.tensor([1], dtype=torch.int32).view(torch.float32)
        assert (tiny * 2.0**100).item() == 0.0

    yield switch_on
    torch.set_flush_denormal(False)
