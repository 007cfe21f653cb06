"""What combine's launches are compiled for, and how that follows from a call. Imports neither torch nor cutlass.

Teams are those of dispatch: a block for each row where there are few, a warp where there are many.
"""

from dataclasses import dataclass

from vllm_rose_plugin.kernels.dp_dispatch.config import choose_teams, fused_blocks, sizes_to_warm
from vllm_rose_plugin.kernels.dp_exchange.layout import ExchangeShape
from vllm_rose_plugin.kernels.dp_exchange.table import Tuning

ELEMENTS = 8
"""Of a thread's vector: 128 bits of bf16."""

_LOADS = 16
"""Of 128 bits, under way in a thread that adds rows: 64 registers."""


@dataclass(frozen=True)
class SendConfig:
    """The kernel that sends rows back."""

    shape: ExchangeShape
    threads: int
    team: int
    """Threads that move one row: a warp, or all of a block."""
    unroll: int
    """Vectors that a thread has under way."""


@dataclass(frozen=True)
class ReceiveConfig:
    """The kernel that adds them."""

    shape: ExchangeShape
    threads: int
    team: int
    unroll: int
    """Vectors of the result, each of as many loads as the token may have destinations."""


@dataclass(frozen=True)
class FusedConfig:
    """One kernel that sends, then adds; both halves have the same threads, a block for each row."""

    send: SendConfig
    receive: ReceiveConfig


def choose_send(
    *, total_rows: int, shape: ExchangeShape, sm_count: int, tuning: Tuning | None = None
) -> tuple[SendConfig, int]:
    """(kernel, blocks) of a call.

    Args:
        total_rows: R, the rows that may have come.
        shape: of the exchange.
        sm_count: of the device.
        tuning: of the step's table.
    """
    teams = choose_teams(
        rows=total_rows, row_vectors=shape.hidden_size // ELEMENTS, sm_count=sm_count, waits=False, tuning=tuning
    )
    return SendConfig(shape=shape, threads=teams.threads, team=teams.team, unroll=teams.unroll), teams.blocks


def send_sizes(shape: ExchangeShape, sm_count: int) -> tuple[int, ...]:
    """Numbers of rows of `choose_send` that together have every kernel."""
    return sizes_to_warm(most=shape.max_rows, row_vectors=shape.hidden_size // ELEMENTS, sm_count=sm_count, waits=False)


def receive_sizes(shape: ExchangeShape, sm_count: int) -> tuple[int, ...]:
    """Numbers of tokens of `choose_receive` that together have every kernel."""
    return sizes_to_warm(
        most=shape.max_tokens, row_vectors=shape.hidden_size // ELEMENTS, sm_count=sm_count, waits=True
    )


def choose_receive(
    *, num_tokens: int, shape: ExchangeShape, sm_count: int, tuning: Tuning | None = None
) -> tuple[ReceiveConfig, int]:
    """(kernel, blocks) of a call with at least one token.

    Args:
        num_tokens: T.
        shape: of the exchange.
        sm_count: of the device.
        tuning: of the step's table.
    """
    teams = choose_teams(
        rows=num_tokens, row_vectors=shape.hidden_size // ELEMENTS, sm_count=sm_count, waits=True, tuning=tuning
    )
    unroll = max(1, min(teams.unroll, _LOADS // shape.slots))
    return ReceiveConfig(shape=shape, threads=teams.threads, team=teams.team, unroll=unroll), teams.blocks


def choose_fused(
    *, num_tokens: int, total_rows: int, shape: ExchangeShape, sm_count: int, tuning: Tuning | None = None
) -> tuple[FusedConfig, int] | None:
    """(kernel, blocks) of a step in one launch; None where the step is too large. All steps have the same kernel.

    Args:
        num_tokens: T, at least 1.
        total_rows: R, the rows that may have come.
        shape: of the exchange.
        sm_count: of the device.
        tuning: of the step's table.
    """
    vectors = shape.hidden_size // ELEMENTS
    blocks = fused_blocks(sent=total_rows, received=num_tokens, row_vectors=vectors, sm_count=sm_count, tuning=tuning)
    if blocks is None:
        return None
    send, _ = choose_send(total_rows=1, shape=shape, sm_count=sm_count)
    receive, _ = choose_receive(num_tokens=1, shape=shape, sm_count=sm_count)
    return FusedConfig(send, receive), blocks
