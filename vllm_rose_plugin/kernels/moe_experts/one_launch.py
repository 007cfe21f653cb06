"""Asks the device, at start-up, where route and dispatch are faster as two launches than as one.

The heuristic takes one launch while one block can route the pairs and all blocks fit on the device. Here the most
tokens for which it does so are timed both ways. Where two launches are faster, halving the interval finds where that
begins, up to an eighth. So a threshold is lowered and never raised.
"""

import functools

from vllm_rose_plugin.kernels.contracts import TokenFormat
from vllm_rose_plugin.kernels.jit.providers import Machine, Timer, choose
from vllm_rose_plugin.kernels.moe_dispatch import config as dispatch
from vllm_rose_plugin.kernels.moe_dispatch import threshold
from vllm_rose_plugin.kernels.moe_dispatch.family import LAUNCHES, TWO_LAUNCHES, DispatchShape
from vllm_rose_plugin.kernels.moe_experts.config import QUANTIZED, chunk_tokens, step_of
from vllm_rose_plugin.kernels.moe_experts.family import ExpertsShape, layer_of
from vllm_rose_plugin.kernels.moe_route.family import RouteShape
from vllm_rose_plugin.kernels.mxfp8_quantize.config import widest_load

_ID_DTYPE = "int32"


def check_one_launch(
    shape: ExpertsShape,
    *,
    most_tokens: int,
    target: str,
    sm_count: int,
    machine: Machine | None = None,
    timer: Timer | None = None,
) -> None:
    """Lower the threshold of a layer's calls to what was measured; once for layers that are alike.

    Args:
        shape: of a call of the layer, with any number of tokens.
        most_tokens: of a step.
        target, sm_count: of the device.
        machine, timer: as :func:`~vllm_rose_plugin.kernels.jit.providers.choose` takes them.
    """
    for token_format, (least, most) in _ranges(shape, most_tokens, target, sm_count).items():
        config = _config(shape, most, token_format, target)
        if threshold.known(config):
            continue

        def one_wins(tokens: int, token_format: TokenFormat = token_format) -> bool:
            calls = [_call(shape, tokens, token_format)]
            return choose(family=LAUNCHES, shapes=calls, machine=machine, timer=timer).provider != TWO_LAUNCHES

        if one_wins(most):
            threshold.record(config, None)
            continue
        good, bad = least - 1, most
        while bad - good > max(1, bad // 8):
            middle = (good + bad) // 2
            good, bad = (middle, bad) if one_wins(middle) else (good, middle)
        threshold.record(config, good)


@functools.lru_cache(maxsize=64)
def _ranges(shape: ExpertsShape, most_tokens: int, target: str, sm_count: int) -> dict[TokenFormat, tuple[int, int]]:
    """The least and the most tokens that the heuristic gives one launch, for each format that it writes."""
    layer = layer_of(shape, target)
    found: dict[TokenFormat, tuple[int, int]] = {}
    for tokens in range(
        1, min(most_tokens, chunk_tokens(shape.top_k), dispatch.ROUTED_BY_ONE_BLOCK // shape.top_k) + 1
    ):
        token_format = step_of(layer, tokens).token_format
        config = _config(shape, tokens, token_format, target)
        if dispatch.is_one_launch(config, num_tokens=tokens, sm_count=sm_count):
            found[token_format] = found.get(token_format, (tokens, tokens))[0], tokens
    return found


def _arrives(shape: ExpertsShape) -> str:
    return QUANTIZED if shape.quantized else shape.dtype


def _config(shape: ExpertsShape, num_tokens: int, token_format: TokenFormat, target: str) -> dispatch.DispatchConfig:
    """Of a call's dispatch as for two launches."""
    return dispatch.choose_config(
        dtype=_arrives(shape),
        num_tokens=num_tokens,
        hidden_size=shape.hidden_size,
        top_k=shape.top_k,
        num_experts=shape.num_local_experts,
        alignment=1,
        token_format=token_format,
        activation=shape.activation,
        rounding=shape.rounding,
        weighted=False,
        load_alignment=widest_load(target),
    )


def _call(shape: ExpertsShape, num_tokens: int, token_format: TokenFormat) -> DispatchShape:
    routing = RouteShape(num_tokens, shape.top_k, shape.num_local_experts, shape.num_experts, 1, _ID_DTYPE)
    return DispatchShape(
        routing=routing,
        hidden_size=shape.hidden_size,
        dtype=_arrives(shape),
        token_format=token_format,
        activation=shape.activation,
        rounding=shape.rounding,
        weighted=False,
    )
