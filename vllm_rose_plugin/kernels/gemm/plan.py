"""Which kernel serves a call: what the host knows of it, the config that follows, and all configs that calls can need.

One place for every target, so that warm-up, self-check and calls can't disagree. Imports neither torch nor cutlass.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from vllm_rose_plugin.kernels.contracts import Activation, Rounding, TokenFormat
from vllm_rose_plugin.kernels.gemm import tuned
from vllm_rose_plugin.kernels.gemm.call import Call, heuristic, in_order_of
from vllm_rose_plugin.kernels.gemm.choose import choose_token_format
from vllm_rose_plugin.kernels.gemm.config import Epilogue, GemmConfig
from vllm_rose_plugin.kernels.gemm.config_sm100 import Sm100Config
from vllm_rose_plugin.kernels.jit.compile import compile
from vllm_rose_plugin.kernels.jit.targets import limits_of

_BATCH_INVARIANT_ROWS = 64
"""Tokens of a group that the one config of batch-invariant mode is chosen for."""
_DENSE_MEAN = 512


@dataclass(frozen=True)
class Plan:
    """A kernel and its launch."""

    target: str
    config: GemmConfig | Sm100Config
    grid: int

    def compile(self) -> Callable[..., Any]:
        """The compiled kernel; from memory, the disk, or the compiler."""
        return compile_config(self.config, target=self.target)


def serves(*, target: str | None, activation: Activation) -> bool:
    """Whether our kernels do; target: None where there is none."""
    return target is not None and (target.startswith("sm_90") or activation is Activation.MXFP8)


def token_format_of(
    *, target: str, activation: Activation, num_groups: int, num_rows: int, batch_invariant: bool = False
) -> TokenFormat:
    """The format in which tokens should be brought to a target's GEMM; ask before quantizing.

    Args:
        target: compile target.
        activation: BF16 is served on sm_90 only.
        num_groups, num_rows: groups, and tokens to expect in all of them.
        batch_invariant: the same answer for every num_rows.

    Raises:
        ValueError: the target doesn't serve the activation; the message names the setting that mends it.
    """
    limits_of(target)
    if not target.startswith("sm_90"):
        if activation is not Activation.MXFP8:
            raise ValueError(
                f"activation={activation.value!r} is served on sm_90 only, this is {target}: set "
                'ROSE_ACTIVATION=mxfp8 or --additional-config \'{"rose": {"activation": "mxfp8"}}\''
            )
        return TokenFormat.MXFP8_TCGEN05
    if batch_invariant:
        return TokenFormat.BF16_PERMUTED
    return choose_token_format(activation=activation, num_groups=num_groups, num_rows=num_rows)


def batch_invariant_rows(num_groups: int) -> int:
    """The number of tokens that stands for every number of tokens."""
    return _BATCH_INVARIANT_ROWS * num_groups


def plan(call: Call, *, expected_rows: int, num_rows: int) -> Plan:
    """The kernel for a call.

    Args:
        call: what it computes.
        expected_rows: tokens to expect in all groups; decides the config.
        num_rows: S, rows of the tokens; decides the grid where that follows it.

    Raises:
        ValueError: sizes that no kernel takes.
    """
    return plan_of(call, config_of(call, expected_rows), num_rows=num_rows)


def config_of(call: Call, expected_rows: int) -> GemmConfig | Sm100Config:
    """The config that serves a call; of a part of a weight, one that adds up in the order of the whole weight's."""
    if call.whole is not None:
        return in_order_of(heuristic(call, expected_rows), config_of(call.whole, expected_rows), call)
    whole = replace(call, domains=1)
    config = tuned.config(whole, expected_rows) or heuristic(whole, expected_rows)
    return in_domains(call, config, expected_rows)


def in_domains(call: Call, config: GemmConfig | Sm100Config, expected_rows: int) -> GemmConfig | Sm100Config:
    """The config for a weight in as many parts as the call says.

    Args:
        call: what it computes.
        config: for the same call with the weight in one part: only the order of its tiles changes, where it can.
        expected_rows: tokens to expect in all groups.

    Raises:
        ValueError: columns that can't be split so.
    """
    if call.domains == 1:
        return config
    try:
        split = replace(config, domains=call.domains)
    except ValueError:  # blocks share tiles; or there is no such split, which the heuristic says again
        return heuristic(call, expected_rows)
    if isinstance(split, GemmConfig) and split.row_tiles > config.row_tiles:
        return heuristic(call, expected_rows)  # a part ends in the middle of a tile
    return split


def plan_of(call: Call, config: GemmConfig | Sm100Config, *, num_rows: int) -> Plan:
    """The launch of a config.

    Args:
        call: what it computes.
        config: one of the call's candidates.
        num_rows: S, rows of the tokens.
    """
    return Plan(call.target, config, grid_of(config, sm_count=call.sm_count, num_rows=num_rows))


def grid_of(config: GemmConfig | Sm100Config, *, sm_count: int, num_rows: int) -> int:
    """Blocks of a launch on so many SMs, with so many rows of tokens."""
    if isinstance(config, GemmConfig):
        return config.grid(sm_count)
    return config.grid(sm_count=sm_count, num_rows=num_rows)


def compile_config(config: GemmConfig | Sm100Config, *, target: str) -> Callable[..., Any]:
    """The compiled kernel of a config."""
    return compile(family="gemm", config=config, build=build_of(config), target=target)


def build_of(config: GemmConfig | Sm100Config) -> Callable[..., Any]:
    """The function that describes a config's kernel to the compiler; imports cutlass."""
    if isinstance(config, GemmConfig):
        from vllm_rose_plugin.kernels.gemm import sm90

        return sm90.build
    from vllm_rose_plugin.kernels.gemm import sm100

    return sm100.build


def warm_configs(
    *,
    target: str,
    sm_count: int,
    num_groups: int,
    n: int,
    k: int,
    max_rows: int,
    activation: Activation,
    epilogue: Epilogue = Epilogue.PLAIN,
    out_dtype: str = "bfloat16",
    bias: bool = False,
    rounding: Rounding = Rounding.RCEIL,
    limit: float | None = None,
    early_counts: bool = False,
    batch_invariant: bool = False,
    quantized_input: bool = False,
    part_of: Callable[[Call], Call] | None = None,
) -> tuple[GemmConfig | Sm100Config, ...]:
    """Every config that calls of a layer can choose with 1 to max_rows tokens: compile these before the first request.

    Args:
        max_rows: most tokens over all groups.
        quantized_input: tokens may also arrive quantized by somebody else, which on sm_90 means W8A8 at any size.
        part_of: the call on a part of the weight, or on all its parts (``domains``); it is whole where this is None.
        (others): of the calls; see :class:`Call`.

    Returns:
        In the order in which the number of tokens grows, each once. Where there is no device, also what every table of
        measured choices in the cache names, since one of those devices may be what comes to serve.
    """
    found: dict[GemmConfig | Sm100Config, None] = {}
    for rows in _row_counts(num_groups, max_rows):
        token_format = token_format_of(
            target=target,
            activation=activation,
            num_groups=num_groups,
            num_rows=rows,
            batch_invariant=batch_invariant,
        )
        call = Call(
            target=target,
            sm_count=sm_count,
            num_groups=num_groups,
            n=n,
            k=k,
            token_format=token_format,
            epilogue=epilogue,
            out_dtype=out_dtype,
            bias=bias,
            out_format=token_format if epilogue is Epilogue.SWIGLU else None,
            activation=activation if epilogue is Epilogue.SWIGLU else Activation.MXFP8,
            rounding=rounding if epilogue is Epilogue.SWIGLU else Rounding.RCEIL,
            limit=limit if epilogue is Epilogue.SWIGLU else None,
            early_counts=early_counts,
            batch_invariant=batch_invariant,
        )
        calls = [call]
        if quantized_input and token_format is TokenFormat.BF16_PERMUTED:
            calls.append(replace(call, token_format=TokenFormat.MXFP8_FP32_SCALES))
        for each in calls:
            expected_rows = batch_invariant_rows(num_groups) if batch_invariant else rows
            if part_of is not None:
                found[config_of(part_of(each), expected_rows)] = None
                continue
            configs = tuned.configs(each, expected_rows)
            if not configs or not tuned.device_name():  # tables of other machines are no reason to leave these out
                configs = (heuristic(each, expected_rows), *configs)
            found.update(dict.fromkeys(configs))
    return tuple(found)


def warm_expert_configs(
    *,
    target: str,
    sm_count: int,
    num_groups: int,
    hidden_size: int,
    intermediate_size: int,
    max_rows: int,
    out_dtype: str,
    activation: Activation,
    rounding: Rounding,
    batch_invariant: bool = False,
    parts_of: tuple[Callable[[Call], Call] | None, Callable[[Call], Call] | None] = (None, None),
) -> Iterator[GemmConfig | Sm100Config]:
    """Every config of the two products of a layer of experts: w13 with SwiGLU, then w2; see :func:`warm_configs`.

    Args:
        parts_of: for w13 and for w2, see ``part_of`` there.
        (others): as there.
    """
    w13: dict[str, Any] = {"n": 2 * intermediate_size, "k": hidden_size, "epilogue": Epilogue.SWIGLU}
    w2: dict[str, Any] = {"n": hidden_size, "k": intermediate_size, "out_dtype": out_dtype}
    calls = (w13 | {"rounding": rounding, "early_counts": False}, w2 | {"early_counts": True})
    for call, part_of in zip(calls, parts_of, strict=True):
        yield from warm_configs(
            target=target,
            sm_count=sm_count,
            num_groups=num_groups,
            max_rows=max_rows,
            activation=activation,
            batch_invariant=batch_invariant,
            part_of=part_of,
            **call,
        )


def _row_counts(num_groups: int, max_rows: int) -> Iterator[int]:
    """Numbers of tokens among which are all where a choice can change.

    Choices look at the groups that can have tokens, and at tokens per group, rounded up: multiples of the groups stand
    for all numbers below them. Where these are many tokens, choices change after multiples of eight; so do the buckets
    of measured choices (``tuned.bucket``).
    """
    yield from range(1, min(num_groups, max_rows + 1))
    for mean in range(1, max_rows // num_groups + 1):
        if mean <= _DENSE_MEAN or mean % 8 == 0:
            yield mean * num_groups
    yield max_rows
