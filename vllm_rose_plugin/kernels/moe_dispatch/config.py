"""What the dispatch is compiled for, and how that follows from a call's shapes. Imports neither torch nor cutlass."""

import math
from dataclasses import dataclass, replace
from typing import Any

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Activation, Rounding, TokenFormat
from vllm_rose_plugin.kernels.moe_dispatch import threshold
from vllm_rose_plugin.kernels.moe_route.config import RouteConfig, check
from vllm_rose_plugin.kernels.mxfp8_quantize.config import PERMUTED_VECTOR, widest_load
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import TILE_BLOCKS, TILE_ROWS, padded_blocks, permuted_size

ITEM_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4, "mxfp8": 1}
"""What arrives; "mxfp8": codes and row-major scales."""
MAX_TOP_K = 16

_THREADS = 256
_VECTOR = 16
"""Elements of a thread, whose codes are one store of 128 bits."""
_BLOCKS_PER_SM, _WEIGHTED_BLOCKS_PER_SM = 4, 2
"""Of the one-launch form, which all have to be on the device at once: 256 threads of 64 registers, 128 where tokens
are weighted."""
ROUTED_BY_ONE_BLOCK = 4096
"""(token, k) pairs. One block takes about 60 ns for every 256 of them; a launch more costs a few microseconds."""
_MAX_VECTORS = 2**31 - 2**16
"""Vectors are counted in 32 bits."""


@dataclass(frozen=True)
class DispatchConfig:
    """Constants of one kernel: a thread takes `vector` neighbouring elements of a token and writes them top_k times."""

    dtype: str
    """Of x; a key of ITEM_BYTES."""
    hidden_size: int
    top_k: int
    num_experts: int
    """E, of this rank."""
    alignment: int
    """Rows to which runs are padded."""
    token_format: TokenFormat
    activation: Activation
    """BF16: BF16_PERMUTED without quantization."""
    rounding: Rounding
    weighted: bool
    """Tokens are multiplied by their router weights."""
    load_bytes: int
    """Width of a load of x."""
    vector: int
    threads: int
    route: RouteConfig | None
    """The first block routes, and the others wait for it. None: another launch has routed."""

    @property
    def vectors(self) -> int:
        """Of a token."""
        return self.hidden_size // self.vector

    @property
    def row_vectors(self) -> int:
        """Of a row, with what fills up the last tile of scales or the last permuted elements."""
        return row_vectors(hidden_size=self.hidden_size, token_format=self.token_format)

    @property
    def lanes_per_block(self) -> int:
        """Lanes that share one scale."""
        return MXFP8_BLOCK // self.vector

    @property
    def row_bytes(self) -> int:
        """Of the result, without scales."""
        if self.token_format is TokenFormat.BF16_PERMUTED:
            return 2 * permuted_size(self.hidden_size)
        return self.hidden_size

    @property
    def tiled(self) -> bool:
        return self.token_format is TokenFormat.MXFP8_TCGEN05

    @property
    def scale_rows(self) -> bool:
        """Rows of scales are not those of tokens."""
        return needs_scale_rows(token_format=self.token_format, alignment=self.alignment)

    @property
    def k_tiles(self) -> int:
        """Tiles of scales beside each other."""
        return padded_blocks(self.hidden_size // MXFP8_BLOCK) // TILE_BLOCKS

    @property
    def pads(self) -> bool:
        """Whether there can be rows or scales that no token fills."""
        return self.alignment > 1 or self.tiled

    @property
    def slot_words(self) -> int:
        """Slots of a token that one load brings."""
        return math.gcd(self.top_k, 4)

    @property
    def blocks_per_sm(self) -> int:
        """That fit for sure."""
        return _WEIGHTED_BLOCKS_PER_SM if self.weighted else _BLOCKS_PER_SM

    def copy_blocks(self, num_tokens: int) -> int:
        """Blocks that copy tokens."""
        return -(-num_tokens * self.row_vectors // self.threads)

    def pad_blocks(self, num_tokens: int) -> int:
        """Blocks that fill up runs and tiles: one for each expert that can have tokens."""
        return min(self.num_experts, num_tokens * self.top_k) if self.pads else 0

    def grid(self, num_tokens: int) -> int:
        """Blocks of a launch."""
        return (1 if self.route else 0) + self.copy_blocks(num_tokens) + self.pad_blocks(num_tokens)


def row_vectors(*, hidden_size: int, token_format: TokenFormat) -> int:
    """See :attr:`DispatchConfig.row_vectors`."""
    if token_format is TokenFormat.BF16_PERMUTED:
        return permuted_size(hidden_size) // PERMUTED_VECTOR
    if token_format is TokenFormat.MXFP8_TCGEN05:
        return padded_blocks(hidden_size // MXFP8_BLOCK) * MXFP8_BLOCK // _VECTOR
    return hidden_size // _VECTOR


def needs_scale_rows(*, token_format: TokenFormat, alignment: int) -> bool:
    """Whether routing must also say in which row of the tiled scales each token's go: where a run can begin within a
    tile of 128 rows, while its scales begin a new one."""
    return token_format is TokenFormat.MXFP8_TCGEN05 and alignment % TILE_ROWS != 0


def is_one_launch(config: DispatchConfig, *, num_tokens: int, sm_count: int) -> bool:
    """Whether route and dispatch are one launch: few enough pairs for one block, all blocks on the device at once, and
    no more tokens than start-up has measured to be faster so (``threshold``).

    Args:
        config: of the call, as for two launches.
        num_tokens: T.
        sm_count: of the device.
    """
    most = threshold.most_tokens(config)
    if most is not None and num_tokens > most:
        return False
    few = num_tokens * config.top_k <= ROUTED_BY_ONE_BLOCK
    return few and 1 + config.grid(num_tokens) <= sm_count * config.blocks_per_sm


def choose_config(
    *,
    dtype: str,
    num_tokens: int,
    hidden_size: int,
    top_k: int,
    num_experts: int,
    alignment: int,
    token_format: TokenFormat,
    activation: Activation,
    rounding: Rounding,
    weighted: bool,
    load_alignment: int,
    id_dtype: str | None = None,
    has_map: bool = False,
    sm_count: int = 0,
) -> DispatchConfig:
    """The config for a call.

    Args:
        dtype, hidden_size, top_k, num_experts, alignment, token_format, activation, rounding, weighted: see
            :class:`DispatchConfig`.
        num_tokens: T, at least 1.
        load_alignment: widest load in bytes that the target and the rows of x allow.
        id_dtype: of the ids, to route in the same launch if that is better (the config's `route` then says so); None:
            another launch has routed.
        has_map, sm_count: of the ids and of the device, with id_dtype.

    Raises:
        ValueError: a value outside of its range; the message names it.
    """
    check(num_experts=num_experts, alignment=alignment, id_dtype=id_dtype or "int32")
    if dtype not in ITEM_BYTES:
        raise ValueError(f"tokens are {dtype}; they must be {', '.join(ITEM_BYTES)}")
    if hidden_size < MXFP8_BLOCK or hidden_size % MXFP8_BLOCK:
        raise ValueError(f"H is {hidden_size}; it must be a multiple of {MXFP8_BLOCK}")
    if not 1 <= top_k <= MAX_TOP_K:
        raise ValueError(f"top_k is {top_k}; it must be 1 to {MAX_TOP_K}")
    permuted = token_format is TokenFormat.BF16_PERMUTED
    if activation is Activation.BF16 and not permuted:
        raise ValueError(f"{token_format} holds quantized tokens only, got activation={activation.value!r}")
    if dtype == "mxfp8" and (weighted or activation is Activation.BF16):
        what = "can't be multiplied by router weights" if weighted else "are no bf16 activations"
        raise ValueError(f"tokens that arrive quantized are taken as they are and {what}: bring them unquantized")
    if num_tokens * row_vectors(hidden_size=hidden_size, token_format=token_format) > _MAX_VECTORS:
        raise ValueError(
            f"{num_tokens} tokens of {hidden_size} are more than one launch copies: dispatch fewer at a time "
            "(--max-num-batched-tokens)"
        )
    vector = PERMUTED_VECTOR if permuted else _VECTOR
    config = DispatchConfig(
        dtype=dtype,
        hidden_size=hidden_size,
        top_k=top_k,
        num_experts=num_experts,
        alignment=alignment,
        token_format=token_format,
        activation=activation,
        rounding=rounding,
        weighted=weighted,
        load_bytes=min(load_alignment, vector * ITEM_BYTES[dtype]),
        vector=vector,
        threads=_THREADS,
        route=None,
    )
    if id_dtype is None or not is_one_launch(config, num_tokens=num_tokens, sm_count=sm_count):
        return config
    route = RouteConfig(
        num_experts=num_experts,
        alignment=alignment,
        id_dtype=id_dtype,
        has_map=has_map,
        scale_rows=config.scale_rows,
        items=1 << (-(-num_tokens * top_k // _THREADS) - 1).bit_length(),
        threads=_THREADS,
    )
    return replace(config, route=route)


def warm_configs(*, max_tokens: int, target: str, top_k: int, **how: Any) -> tuple[DispatchConfig, ...]:
    """Every config that calls of 1 to max_tokens tokens with aligned rows can need, and what start-up times beside the
    form with one launch (``moe_experts/one_launch.py``).

    Args:
        max_tokens: T at most.
        target: compile target.
        top_k: of the calls.
        how: the other arguments of :func:`choose_config`.
    """
    few = min(max_tokens, ROUTED_BY_ONE_BLOCK // top_k + 1)
    found = [
        choose_config(num_tokens=num_tokens, load_alignment=widest_load(target), top_k=top_k, **how)
        for num_tokens in (*range(1, few + 1), max_tokens)
    ]
    found += [replace(config, route=None) for config in found if config.route is not None]
    return tuple(dict.fromkeys(found))
