"""What a model's layers ask of the kernels: those to compile ahead, with no GPU, and the GEMM's calls to tune.

What a server compiles at its start follows from its layers' sizes (``rank_shapes.py``) and from its largest step; tests
compare it with what vLLM's layers ask for.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from vllm_rose_plugin.kernels.contracts import Activation, Rounding, ScaleLayout
from vllm_rose_plugin.kernels.gemm import family as linear
from vllm_rose_plugin.kernels.gemm import plan
from vllm_rose_plugin.kernels.gemm.tune import Job
from vllm_rose_plugin.kernels.jit.compile import cache_key, compile
from vllm_rose_plugin.kernels.jit.store import open_store
from vllm_rose_plugin.kernels.jit.targets import limits_of
from vllm_rose_plugin.kernels.moe_combine import config as combine
from vllm_rose_plugin.kernels.moe_dispatch import config as dispatch
from vllm_rose_plugin.kernels.moe_experts import config as experts
from vllm_rose_plugin.kernels.moe_route import config as route
from vllm_rose_plugin.kernels.mxfp8_quantize import config as quantize
from vllm_rose_plugin.kernels.qk_norm import config as qk_norm
from vllm_rose_plugin.kernels.qk_norm import family as qk_norm_family
from vllm_rose_plugin.kernels.qk_norm.launch import ALIGNMENT
from vllm_rose_plugin.kernels.rank_shapes import RankShapes


@dataclass(frozen=True)
class Kernel:
    """One thing to compile."""

    family: str
    config: Any

    def build(self) -> Callable:
        """The function that describes it to the compiler; imports the DSL."""
        if self.family == "gemm":
            return plan.build_of(self.config)
        if self.family == "mxfp8_quantize":
            from vllm_rose_plugin.kernels.mxfp8_quantize import kernel as quantize_kernel

            return quantize_kernel.build
        if self.family == "moe_route":
            from vllm_rose_plugin.kernels.moe_route import kernel as route_kernel

            return route_kernel.build
        if self.family == "moe_dispatch":
            from vllm_rose_plugin.kernels.moe_dispatch import kernel as dispatch_kernel

            return dispatch_kernel.build
        if self.family == "moe_combine":
            from vllm_rose_plugin.kernels.moe_combine import kernel as combine_kernel

            return combine_kernel.build
        from vllm_rose_plugin.kernels.qk_norm import kernel as qk_norm_kernel

        return qk_norm_kernel.build


def kernels(
    shapes: RankShapes,
    *,
    target: str,
    max_tokens: int,
    activation: Activation = Activation.MXFP8,
    rounding: Rounding = Rounding.RCEIL,
) -> tuple[Kernel, ...]:
    """Every kernel that a server compiles at its start.

    Args:
        shapes: of a rank.
        target: compile target. Launch shapes follow the number of SMs that :func:`limits_of` gives for it; a device
            with another number may compile some kernels again.
        max_tokens: of one step, vLLM's `--max-num-batched-tokens`.
        activation, rounding: the plugin's settings.

    Raises:
        ValueError: no kernel serves the sizes on this target.
    """
    device: dict[str, Any] = {"target": target, "sm_count": limits_of(target).sm_count}
    found: dict[Kernel, None] = {}
    for n, k, bias in shapes.linears:
        for gemm in plan.warm_configs(
            num_groups=1,
            n=n,
            k=k,
            max_rows=max_tokens,
            activation=activation,
            out_dtype=shapes.dtype,
            bias=bias,
            early_counts=True,
            **device,
        ):
            found[Kernel("gemm", gemm)] = None
        for tokens in (1, max_tokens):  # few and many are brought into different formats on sm_90
            call = _linear_shape(shapes, tokens, n, k, bias, activation, rounding)
            for config in quantize.warm_configs(**linear.quantizer_call(call, target), **device):
                found[Kernel("mxfp8_quantize", config)] = None
        if activation is Activation.MXFP8:
            row_major: dict[str, Any] = {"dtype": shapes.dtype, "hidden_size": k, "layout": ScaleLayout.ROW_MAJOR}
            for config in quantize.warm_configs(**row_major, rounding=rounding, **device):
                found[Kernel("mxfp8_quantize", config)] = None
    found.update(dict.fromkeys(_experts(shapes, max_tokens, activation, rounding, device)))
    if shapes.qk_norm:
        found.update(dict.fromkeys(_qk_norm(shapes, device)))
    return tuple(found)


def gemm_jobs(
    shapes: RankShapes,
    *,
    target: str,
    sm_count: int,
    tokens: Sequence[int],
    activation: Activation = Activation.MXFP8,
    rounding: Rounding = Rounding.RCEIL,
) -> Iterator[Job]:
    """The calls of the GEMM to tune: linear layers, then w13 and w2 of the experts.

    Args:
        shapes: of a rank.
        target, sm_count: of the device.
        tokens: of a step; one after another for each layer.
        activation, rounding: the plugin's settings.

    Raises:
        ValueError: no kernel serves the sizes on this target.
    """
    for n, k, bias in shapes.linears:
        for each in tokens:
            shape = _linear_shape(shapes, each, n, k, bias, activation, rounding)
            yield Job(linear.call_of(shape, target, sm_count), each)
    layer = _layer(shapes, target, activation)
    yield from expert_jobs(layer, sm_count=sm_count, tokens=tokens, dtype=shapes.dtype, rounding=rounding)


def _layer(shapes: RankShapes, target: str, activation: Activation) -> experts.LayerShape:
    return experts.LayerShape(
        target=target,
        hidden_size=shapes.hidden_size,
        intermediate_size=shapes.expert_size,
        num_local_experts=shapes.num_local_experts,
        num_experts=shapes.num_experts,
        top_k=shapes.top_k,
        activation=activation,
    )


def expert_jobs(
    layer: experts.LayerShape, *, sm_count: int, tokens: Sequence[int], dtype: str, rounding: Rounding
) -> Iterator[Job]:
    """Those of a layer of experts: w13, then w2; see :func:`gemm_jobs`."""
    steps = [experts.step_of(layer, min(each, experts.chunk_tokens(layer.top_k))) for each in tokens]
    for product in (0, 1):
        for step in steps:
            calls = experts.gemm_calls(layer, step, sm_count=sm_count, dtype=dtype, rounding=rounding)
            yield Job(calls[product], step.expected_rows)


def _linear_shape(
    shapes: RankShapes, tokens: int, n: int, k: int, bias: bool, activation: Activation, rounding: Rounding
) -> linear.LinearShape:
    return linear.LinearShape(
        num_tokens=tokens,
        n=n,
        k=k,
        dtype=shapes.dtype,
        bias=bias,
        activation=activation,
        rounding=rounding,
        batch_invariant=False,
    )


def _experts(
    shapes: RankShapes, max_tokens: int, activation: Activation, rounding: Rounding, device: dict[str, Any]
) -> Iterator[Kernel]:
    """As ``moe_experts.launch.warm_up``."""
    layer = _layer(shapes, device["target"], activation)
    chunk = min(max_tokens, experts.chunk_tokens(shapes.top_k))
    ids: dict[str, Any] = {
        "num_experts": shapes.num_local_experts,
        "alignment": 1,
        "id_dtype": "int32",
        "has_map": shapes.num_experts > shapes.num_local_experts,
    }
    for token_format in experts.token_formats_of(layer.target, activation):
        for config in dispatch.warm_configs(
            max_tokens=chunk,
            top_k=shapes.top_k,
            dtype=shapes.dtype,
            hidden_size=shapes.hidden_size,
            token_format=token_format,
            activation=activation,
            rounding=rounding,
            weighted=False,
            **ids,
            **device,
        ):
            yield Kernel("moe_dispatch", config)
        scale_rows = dispatch.needs_scale_rows(token_format=token_format, alignment=1)
        for routing in route.warm_configs(
            max_pairs=chunk * shapes.top_k, sm_count=device["sm_count"], scale_rows=scale_rows, **ids
        ):
            yield Kernel("moe_route", routing)
    for product in plan.warm_expert_configs(
        num_groups=shapes.num_local_experts,
        hidden_size=shapes.hidden_size,
        intermediate_size=shapes.expert_size,
        max_rows=experts.step_of(layer, chunk).expected_rows,
        out_dtype=shapes.dtype,
        activation=activation,
        rounding=rounding,
        **device,
    ):
        yield Kernel("gemm", product)
    for sum_config in combine.warm_configs(
        hidden_size=shapes.hidden_size,
        top_k=shapes.top_k,
        dtype=shapes.dtype,
        out_dtype=shapes.dtype,
        weighted=True,
        **device,
    ):
        yield Kernel("moe_combine", sum_config)


def _qk_norm(shapes: RankShapes, device: dict[str, Any]) -> Iterator[Kernel]:
    call = qk_norm_family.QkNormShape(
        num_tokens=1,
        num_q_heads=shapes.num_q_heads,
        num_kv_heads=shapes.num_kv_heads,
        head_dim=shapes.head_dim,
        dtype=shapes.dtype,
        eps=shapes.eps,
        rotary_dim=shapes.head_dim,
    )
    for config in qk_norm.model_configs(
        weight_offset=0.0,
        alignment=ALIGNMENT,
        widest_load_bits=limits_of(device["target"]).widest_access,
        sm_count=device["sm_count"],
        **qk_norm_family.config_arguments(call),
    ):
        yield Kernel("qk_norm", config)


def compile_kernel(kernel: Kernel, *, target: str) -> bool:
    """Compile a kernel, or find it in the cache on disk; no GPU is needed.

    Returns:
        Whether it is on disk now.

    Raises:
        RuntimeError: the compiler is missing, mixed or too old for the target.
    """
    build = kernel.build()
    compile(family=kernel.family, config=kernel.config, build=build, target=target)
    disk = open_store()
    key = cache_key(family=kernel.family, config=kernel.config, build=build, target=target)
    return disk is not None and disk.get(key) is not None
