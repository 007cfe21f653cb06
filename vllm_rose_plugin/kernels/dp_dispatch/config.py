"""What dispatch's launches are compiled for, and how that follows from a call. Imports neither torch nor cutlass.

A team of threads moves one token: a whole block where there are few, since then all of a token is under way at once,
and a warp where there are many, since then a warp's wait for its stores is hidden by the others.
"""

from dataclasses import dataclass

from vllm_rose_plugin.kernels.dp_exchange.layout import MAX_BLOCKS, ExchangeShape
from vllm_rose_plugin.kernels.dp_exchange.table import Tuning, Way

WARP = 32
ELEMENTS = 16
"""Of a thread's vector: 128 bits of codes, two of a token's scale blocks' lanes."""
INPUTS = ("bfloat16", "mxfp8")
_THREADS = 256
_FEW_THREADS = 128
"""Of a block of warp teams; the second where there would be fewer blocks than SMs."""
_MOST_THREADS = 512
_UNROLL = 4
"""Vectors of a warp's lane under way: 32 registers of bf16."""
_WAITING_THREADS_PER_SM = 1024
"""Of a launch that waits for peers: half of what an SM holds, so that little else has to wait with it. Its registers
may fill an SM all the same; `interface.py` says on what order of launches the peers may count."""

_KEPT_FREE = 32
"""Of so many SMs a step in one launch leaves one to others; a kernel that starts early behind it may take it."""


@dataclass(frozen=True)
class SendConfig:
    """One kernel; the first `group_size` blocks send plans, the others tokens."""

    shape: ExchangeShape
    input: str
    """One of INPUTS; "mxfp8" only where codes travel."""
    threads: int
    team: int
    """Threads that move one token: WARP, or all of a block."""
    unroll: int
    """Vectors that a thread has under way."""


@dataclass(frozen=True)
class ReceiveConfig:
    """One kernel."""

    shape: ExchangeShape
    threads: int
    team: int
    unroll: int


@dataclass(frozen=True)
class FusedConfig:
    """One kernel that sends, then receives; both halves have the same threads, a block for each row."""

    send: SendConfig
    receive: ReceiveConfig


@dataclass(frozen=True)
class Teams:
    """How many threads move a row, and in how many blocks."""

    threads: int
    team: int
    unroll: int
    blocks: int


def choose_teams(
    *, rows: int, row_vectors: int, sm_count: int, waits: bool, reserved: int = 0, tuning: Tuning | None = None
) -> Teams:
    """What was measured; without, a heuristic: a block for each row as long as there are blocks enough, else a warp.

    A launch that waits has fewer blocks, so there a block may take two rows.

    Args:
        rows: to be moved, as far as the host knows; at least 1.
        row_vectors: vectors of a row.
        sm_count: of the device.
        waits: whether the launch waits for peers.
        reserved: blocks of the launch that move no rows.
        tuning: of the step's table.
    """
    share = tuning.share if tuning else 1
    threads = _block_threads(row_vectors)
    most = _most_blocks(threads, sm_count, waits) - reserved
    if rows <= (2 * most if waits else most) if tuning is None else tuning.way is not Way.WARPS:
        blocks = min(rows, max(1, most // share))
        return Teams(threads, threads, min(_UNROLL, -(-row_vectors // threads)), blocks)
    unroll = min(_UNROLL, -(-row_vectors // WARP))
    threads = _FEW_THREADS if rows * WARP < sm_count * _THREADS else _THREADS
    most = max(1, (_most_blocks(threads, sm_count, waits) - reserved) // share)
    return Teams(threads, WARP, unroll, min(most, -(-rows * WARP // threads)))


def fused_blocks(
    *,
    sent: int,
    received: int,
    row_vectors: int,
    sm_count: int,
    reserved: int = 0,
    tuning: Tuning | None = None,
) -> int | None:
    """Blocks of one launch that sends and receives; None where two are faster, or unknown to be slower.

    Without a table a step has one launch as long as a block has two rows at most.

    Args:
        sent: rows that are sent, as far as the host knows.
        received: likewise.
        row_vectors: vectors of a row.
        sm_count: of the device.
        reserved: blocks of the launch that send no rows.
        tuning: of the step's table.
    """
    # Blocks wait for the sends of all ranks' blocks, so all must be on the device at once, beside a collective too that
    # another stream has begun; and one that hasn't must be able to begin.
    most = min(MAX_BLOCKS, sm_count - max(1, sm_count // _KEPT_FREE))
    if most <= reserved:
        return None
    if tuning is not None:
        if tuning.way is not Way.ONE_LAUNCH:
            return None
        return min(max(reserved + 1, most // tuning.share), max(sent + reserved, received))
    if received > 2 * most or sent > 2 * (most - reserved):
        return None
    return min(most, max(sent + reserved, received))


def sizes_to_warm(*, most: int, row_vectors: int, sm_count: int, waits: bool, reserved: int = 0) -> tuple[int, ...]:
    """Numbers of rows whose kernels are all that calls of 1 to `most` rows need; arguments as of `choose_teams`.

    Without a table kernels change with the number of rows twice at most: from blocks to warps, and to warps in larger
    blocks, which `most` has where any number below it has. A table may name each at any number: see `tunings_to_warm`.
    """
    threads = _block_threads(row_vectors)
    blocks = _most_blocks(threads, sm_count, waits) - reserved
    return tuple(sorted({1, min(most, (2 * blocks if waits else blocks) + 1), most}))


def tunings_to_warm(tuned: bool) -> tuple[Tuning | None, ...]:
    """What `choose_teams` is asked with for every number of `sizes_to_warm`, so that a table finds its kernels.

    Args:
        tuned: the exchange has a table, or is to have one.
    """
    return (None, Tuning(Way.BLOCKS), Tuning(Way.WARPS)) if tuned else (None,)


def _block_threads(row_vectors: int) -> int:
    """Threads of a block that moves one row."""
    return max(_THREADS, min(_MOST_THREADS, -(-row_vectors // WARP) * WARP))


def _most_blocks(threads: int, sm_count: int, waits: bool) -> int:
    return min(MAX_BLOCKS, sm_count * _WAITING_THREADS_PER_SM // threads) if waits else MAX_BLOCKS


def choose_send(
    *, num_tokens: int, shape: ExchangeShape, input: str, sm_count: int, tuning: Tuning | None = None
) -> tuple[SendConfig, int]:
    """(kernel, blocks that send tokens) of a call.

    Args:
        num_tokens: T, at least 1.
        shape: of the exchange.
        input: "bfloat16" or "mxfp8".
        sm_count: of the device.
        tuning: of the step's table.
    """
    if input not in INPUTS:
        raise ValueError(f"tokens are {input}; they must be one of {', '.join(INPUTS)}")
    teams = choose_teams(
        rows=num_tokens,
        row_vectors=shape.hidden_size // ELEMENTS,
        sm_count=sm_count,
        waits=False,
        reserved=shape.group_size,
        tuning=tuning,
    )
    config = SendConfig(shape=shape, input=input, threads=teams.threads, team=teams.team, unroll=teams.unroll)
    return config, teams.blocks


def choose_fused(
    *,
    num_tokens: int,
    total_rows: int,
    shape: ExchangeShape,
    input: str,
    sm_count: int,
    tuning: Tuning | None = None,
) -> tuple[FusedConfig, int] | None:
    """(kernel, blocks) of a step in one launch; None where the step is too large. All steps have the same kernel.

    Args:
        num_tokens: T, at least 1.
        total_rows: R, the rows that may come.
        shape: of the exchange.
        input: "bfloat16" or "mxfp8".
        sm_count: of the device.
    """
    vectors = shape.hidden_size // ELEMENTS
    blocks = fused_blocks(
        sent=num_tokens,
        received=total_rows,
        row_vectors=vectors,
        sm_count=sm_count,
        reserved=shape.group_size,
        tuning=tuning,
    )
    if blocks is None:
        return None
    send, _ = choose_send(num_tokens=1, shape=shape, input=input, sm_count=sm_count)
    receive, _ = choose_receive(total_rows=1, shape=shape, sm_count=sm_count)
    return FusedConfig(send, receive), blocks


def send_sizes(shape: ExchangeShape, sm_count: int) -> tuple[int, ...]:
    """Numbers of tokens of `choose_send` that together have every kernel."""
    vectors = shape.hidden_size // ELEMENTS
    return sizes_to_warm(
        most=shape.max_tokens, row_vectors=vectors, sm_count=sm_count, waits=False, reserved=shape.group_size
    )


def receive_sizes(shape: ExchangeShape, sm_count: int) -> tuple[int, ...]:
    """Numbers of rows of `choose_receive` that together have every kernel."""
    return sizes_to_warm(most=shape.max_rows, row_vectors=shape.hidden_size // ELEMENTS, sm_count=sm_count, waits=True)


def choose_receive(
    *, total_rows: int, shape: ExchangeShape, sm_count: int, tuning: Tuning | None = None
) -> tuple[ReceiveConfig, int]:
    """(kernel, blocks) of a call.

    Args:
        total_rows: R, the rows that may come.
        shape: of the exchange.
        sm_count: of the device.
    """
    teams = choose_teams(
        rows=total_rows, row_vectors=shape.hidden_size // ELEMENTS, sm_count=sm_count, waits=True, tuning=tuning
    )
    config = ReceiveConfig(shape=shape, threads=teams.threads, team=teams.team, unroll=teams.unroll)
    return config, teams.blocks
