"""What dispatch's two launches are compiled for, and how that follows from a call. Imports neither torch nor cutlass.

A team of threads moves one token: a whole block where there are few, since then all of a token is under way at once,
and a warp where there are many, since then a warp's wait for its stores is hidden by the others.
"""

from dataclasses import dataclass

from vllm_rose_plugin.kernels.dp_exchange.layout import MAX_BLOCKS, ExchangeShape

WARP = 32
ELEMENTS = 16
"""Of a thread's vector: 128 bits of codes, two of a token's scale blocks' lanes."""
INPUTS = ("bfloat16", "mxfp8")
THREADS = 256
"""Of a block of warp teams."""

_MOST_THREADS = 512
_UNROLL = 4
"""Vectors of a warp's lane under way: 32 registers of bf16."""
_BLOCKS_PER_SM = 4


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
class Teams:
    """How many threads move a row, and in how many blocks."""

    threads: int
    team: int
    unroll: int
    blocks: int


def choose_teams(*, rows: int, row_vectors: int, most_blocks: int) -> Teams:
    """The heuristic, not measured: a block for each row as long as there are blocks enough, else a warp.

    Args:
        rows: to be moved, as far as the host knows.
        row_vectors: vectors of a row.
        most_blocks: of the launch.
    """
    if rows <= most_blocks:
        threads = max(THREADS, min(_MOST_THREADS, -(-row_vectors // WARP) * WARP))
        return Teams(threads, threads, min(_UNROLL, -(-row_vectors // threads)), max(rows, 1))
    blocks = min(most_blocks, -(-rows * WARP // THREADS))
    return Teams(THREADS, WARP, min(_UNROLL, -(-row_vectors // WARP)), blocks)


def choose_send(*, num_tokens: int, shape: ExchangeShape, input: str) -> tuple[SendConfig, int]:
    """(kernel, blocks that send tokens) of a call; a call with none has only the blocks that send plans.

    Args:
        num_tokens: T.
        shape: of the exchange.
        input: "bfloat16" or "mxfp8".
    """
    if input not in INPUTS:
        raise ValueError(f"tokens are {input}; they must be one of {', '.join(INPUTS)}")
    teams = choose_teams(
        rows=num_tokens, row_vectors=shape.hidden_size // ELEMENTS, most_blocks=MAX_BLOCKS - shape.group_size
    )
    config = SendConfig(shape=shape, input=input, threads=teams.threads, team=teams.team, unroll=teams.unroll)
    return config, teams.blocks if num_tokens else 0


def choose_receive(*, total_rows: int, shape: ExchangeShape, sm_count: int) -> tuple[ReceiveConfig, int]:
    """(kernel, blocks) of a call.

    Args:
        total_rows: R, the rows that may come.
        shape: of the exchange.
        sm_count: of the device.
    """
    teams = choose_teams(
        rows=total_rows,
        row_vectors=shape.hidden_size // ELEMENTS,
        most_blocks=min(MAX_BLOCKS, _BLOCKS_PER_SM * sm_count),
    )
    config = ReceiveConfig(shape=shape, threads=teams.threads, team=teams.team, unroll=teams.unroll)
    return config, teams.blocks
