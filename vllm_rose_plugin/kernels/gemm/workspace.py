"""What the blocks of a stream-K launch share: room for sums that they hand over, and flags that say they are there.

Flags are zero before a launch and zero after it. Launches that follow each other in a stream use the same ones, also
with programmatic dependent launch (see sm90_stream_k.py); launches that may run at the same time must not. So every
stream has its own, and other ones for what is captured on it: a replay runs in whichever stream it is started in. What
remains is that graphs captured on the same stream must not be replayed at the same time, which torch already asks of
graphs that share a memory pool, as vLLM's do.
"""

import itertools

import torch

_ROWS = 256
"""Of flags on a device: more than twice as many as torch has streams of its own."""
_LINE = 32
"""int32 of a cache line: rows start at one."""


class Flags:
    """A device's flags, each row for one stream."""

    def __init__(self, device: torch.device, *, blocks: int):
        # Complete when this returns, whichever stream reads it.
        self.rows = torch.zeros((_ROWS, -(-blocks // _LINE) * _LINE), dtype=torch.int32).to(device)
        self.numbers: dict[tuple[int, bool], int] = {}
        self.next = itertools.count()

    def row(self, stream: int, *, captured: bool) -> torch.Tensor | None:
        """The row of a stream, the next free one where it has none yet; None where all are taken."""
        number = self.numbers.get((stream, captured))
        if number is None:
            number = self.numbers.setdefault((stream, captured), next(self.next))
        return self.rows[number] if number < _ROWS else None


_flags: dict[torch.device, Flags] = {}


def prepare_flags(device: torch.device, *, blocks: int) -> None:
    """Make the flags of a device, once. Not during a capture: memory of a graph's pool is not ours to keep."""
    if device not in _flags:
        _flags[device] = Flags(device, blocks=blocks)


def stream_k_workspace(device: torch.device, *, blocks: int, handed_over: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(partials, flags) of a launch on the current stream.

    Args:
        device: of the launch.
        blocks: of its grid, no more than the device has SMs.
        handed_over: float32 that a block hands over.
    """
    partials = torch.empty((blocks, handed_over), dtype=torch.float32, device=device)
    capturing = torch.cuda.is_current_stream_capturing()
    if not capturing:
        prepare_flags(device, blocks=blocks)
    made = _flags.get(device)
    stream = torch.cuda.current_stream(device).cuda_stream
    row = None if made is None else made.row(stream, captured=capturing)
    if (
        row is None or len(row) < blocks
    ):  # then of this launch alone, zeroed before it, in a graph before it in every replay
        row = torch.zeros(blocks, dtype=torch.int32, device=device)
    return partials, row[:blocks]
