"""What the blocks of a launch share. Of stream-K: room for sums that they hand over, and flags that say they are there.

Flags are zero before a launch and zero after it. Launches that follow each other in a stream use the same ones, also
with programmatic dependent launch (see sm90_stream_k.py); launches that may run at the same time must not. So every
stream has its own, and other ones for what is captured on it: a replay runs in whichever stream it is started in. What
remains is that graphs captured on the same stream must not be replayed at the same time, which torch already asks of
graphs that share a memory pool, as vLLM's do.

Of a launch on a weight in parts: counters of tickets (domain_queue.py), zero before and after it too, and also one's
own for every stream and for what is captured on it. A launch looks at them before the one in front of it has ended, so
every stream has two sets, which its launches take by turns.
"""

import itertools

import torch

from vllm_rose_plugin.kernels.gemm.config import MAX_DOMAINS
from vllm_rose_plugin.kernels.gemm.domain_queue import counter_words

_ROWS = 256
"""Of flags on a device: more than twice as many as torch has streams of its own."""
_LINE = 32
"""int32 of a cache line: rows start at one."""


class Flags:
    """A device's flags, each row for one stream."""

    def __init__(self, device: torch.device, *, blocks: int):
        # Complete when this returns, whichever stream reads it.
        self.rows = torch.zeros((_ROWS, -(-blocks // _LINE) * _LINE), dtype=torch.int32, device="cpu").to(device)
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


class Counters:
    """A device's counters of tickets, two sets for each stream."""

    def __init__(self, device: torch.device):
        # Complete when this returns, whichever stream reads it.
        self.rows = torch.zeros((_ROWS, 2, counter_words(MAX_DOMAINS)), dtype=torch.int32, device="cpu").to(device)
        self.turns: dict[tuple[int, bool], list[int]] = {}
        """Stream, and whether captured: its row, and the set that is next."""
        self.next = itertools.count()

    def take(self, stream: int, *, captured: bool) -> torch.Tensor:
        """The set of the next launch on a stream.

        Raises:
            RuntimeError: too many streams have had some.
        """
        if (stream, captured) not in self.turns:
            self.turns.setdefault((stream, captured), [next(self.next), 0])
        row, turn = self.turns[stream, captured]
        if row >= _ROWS:
            raise RuntimeError(
                f"GEMMs on weights in parts ran on {_ROWS} streams, captured ones counted apart; "
                "there are counters for no more: use the same streams again"
            )
        self.turns[stream, captured][1] = 1 - turn
        return self.rows[row, turn]

    def give_back(self, stream: int, *, captured: bool) -> None:
        """What was taken last wasn't launched: the next launch has it, since the one in front has the other set."""
        self.turns[stream, captured][1] ^= 1


_counters: dict[torch.device, Counters] = {}


def prepare_counters(device: torch.device) -> None:
    """Make the counters of a device, once. Not during a capture: memory of a graph's pool is not ours to keep."""
    if device not in _counters:
        _counters[device] = Counters(device)


def domain_counters(device: torch.device, *, domains: int) -> torch.Tensor:
    """The counters of a launch on the current stream: int32 ``[counter_words(domains)]``.

    Raises:
        RuntimeError: a graph is being captured and the device has none yet, or too many streams have had some.
    """
    capturing = torch.cuda.is_current_stream_capturing()
    if not capturing:
        prepare_counters(device)
    elif device not in _counters:
        raise RuntimeError(
            f"{device} has no counters for GEMMs on weights in parts, and a graph is being captured: "
            "call domains.prepare_domains() or run such a GEMM before the capture"
        )
    stream = torch.cuda.current_stream(device).cuda_stream
    return _counters[device].take(stream, captured=capturing)[: counter_words(domains)]


def give_back_counters(device: torch.device) -> None:
    """The launch that :func:`domain_counters` was asked for did not happen."""
    capturing = torch.cuda.is_current_stream_capturing()
    _counters[device].give_back(torch.cuda.current_stream(device).cuda_stream, captured=capturing)
