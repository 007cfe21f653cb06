"""What launches on a device share: arguments that a kernel takes and doesn't touch, and the runs of a single group."""

import functools
from typing import NamedTuple

import torch

from vllm_rose_plugin.kernels.gemm.workspace import prepare_flags
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts

_FIRST_TABLE = 2**14


class Dummies(NamedTuple):
    """Arguments that a kernel takes and doesn't touch."""

    bias: torch.Tensor
    scales: torch.Tensor
    bytes: torch.Tensor


@functools.cache
def dummies_of(device: torch.device) -> Dummies:
    """One set for every launch on a device."""
    # Kept for good, though perhaps made while a graph is captured: nobody reads or writes what is there.
    return Dummies(
        torch.empty(4, dtype=torch.float32, device=device),
        torch.empty((1, 4), dtype=torch.float32, device=device),
        torch.empty(16, dtype=torch.uint8, device=device),
    )


_tables: dict[torch.device, torch.Tensor] = {}
"""Row m is (0, m), the offsets of one run of m tokens; int32."""


def one_run(device: torch.device, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(expert_offsets, expert_counts) on the device for one group of num_rows tokens.

    They lie in a table that is filled before graphs are captured: a number can't be sent from the host inside of one.
    """
    table = _tables.get(device)
    if table is None or num_rows >= len(table):
        if torch.cuda.is_current_stream_capturing():
            # Memory of a graph's pool is not ours to keep: filled anew in every replay.
            offsets = torch.zeros(2, dtype=torch.int32, device=device)
            offsets[1:].fill_(num_rows)
            return offsets, offsets[1:]
        rows = torch.zeros((max(_FIRST_TABLE, 2 ** num_rows.bit_length()), 2), dtype=torch.int32, device="cpu")
        rows[:, 1] = torch.arange(len(rows), device="cpu")
        table = _tables[device] = rows.to(device)  # complete when this returns, whichever stream reads it
    return _row_of_table(table, num_rows)


@functools.lru_cache(maxsize=65536)
def _row_of_table(table: torch.Tensor, num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    return table[num_rows], table[num_rows, 1:]


def prepare_device(device: torch.device, *, max_rows: int) -> None:
    """Make what calls of up to max_rows tokens share on a device, so that none of them does it during a capture."""
    dummies_of(device)
    one_run(device, max_rows)
    facts = device_facts(device.index)
    if facts.target.startswith("sm_90"):
        prepare_flags(device, blocks=facts.sm_count)
