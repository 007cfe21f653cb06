"""A layer of experts on an NVIDIA GPU: route and dispatch, w13 with SwiGLU, w2, combine.

Four launches for a decode step and five for prefill, chained by programmatic dependent launch. Nothing here reads the
device, waits for it or allocates: memory is the caller's, so all of it can be captured into a CUDA graph. A config's
first call compiles its kernel and loads it onto the device, so it must come before; see :func:`warm_up`.
"""

from collections.abc import Sequence
from typing import Any

import torch

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, Rounding
from vllm_rose_plugin.kernels.gemm import launch as gemm
from vllm_rose_plugin.kernels.gemm import plan
from vllm_rose_plugin.kernels.gemm.checks import OUT_DTYPES, check_on_gpu
from vllm_rose_plugin.kernels.gemm.domains import prepare_domains
from vllm_rose_plugin.kernels.gemm.one_run import prepare_device
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight
from vllm_rose_plugin.kernels.moe_combine import launch as combine
from vllm_rose_plugin.kernels.moe_dispatch import launch as dispatch
from vllm_rose_plugin.kernels.moe_experts.config import QUANTIZED, LayerShape, chunk_tokens, step_of, token_formats_of
from vllm_rose_plugin.kernels.moe_experts.memory import ALIGNMENT, views, workspace_bytes
from vllm_rose_plugin.kernels.moe_experts.ways import OneLaunch, Way, products
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts


def moe_experts(
    x: torch.Tensor | Mxfp8Tensor,
    *,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    w13: PackedWeight | Sequence[PackedWeight],
    w2: PackedWeight | Sequence[PackedWeight],
    out: torch.Tensor,
    workspace: torch.Tensor,
    route_workspace: torch.Tensor,
    way: Way | None = None,
    num_experts: int | None = None,
    expert_map: torch.Tensor | None = None,
    activation: Activation | str = Activation.MXFP8,
    rounding: Rounding | str = Rounding.RCEIL,
    weight_on_input: bool = False,
    shared: torch.Tensor | None = None,
    batch_invariant: bool = False,
) -> None:
    """What ``reference.moe_experts`` computes, into ``out``.

    Args:
        x: bf16, fp16 or fp32 ``[T, H]`` on a CUDA device; rows are contiguous and may lie any distance apart. Or MXFP8
            with contiguous row-major scales, with activation MXFP8 and without weight_on_input.
        topk_ids: int32 or int64 ``[T, top_k]``, contiguous; ids that are not here are left out.
        topk_weights: float32 ``[T, top_k]``, contiguous; None sums without weights.
        w13: packed with gate_up, w2: packed; or their parts, by columns of the products, see ``column_split.py``.
        out: bf16 or fp16 ``[T, H]``, contiguous; may overlap neither x nor the workspace.
        workspace: uint8, starting at a multiple of 128 bytes, at least :func:`memory.workspace_bytes` of them. Holds
            nothing between calls.
        route_workspace: of ``moe_route.launch.route_workspace``; serves one call at a time.
        way: how parts are multiplied; needed where there are several.
        num_experts: on all ranks; those of this rank by default. Says how many rows to expect here.
        expert_map: int32 ``[E_global]``, local index or -1; None: ids are local. Its contents may change between
            replays of a graph.
        activation, rounding: of the tokens and of SwiGLU's result.
        weight_on_input: the router weight is multiplied to the experts' input and not to their result.
        shared: bf16 or fp16 ``[T, H]``, the shared expert's output, added to the sum.
        batch_invariant: one config for every T, so that a token's bits depend on that token alone; of whole weights.

    Raises:
        TypeError, ValueError: what doesn't fit; the message names it.
    """
    check_on_gpu("x", _elements(x))
    w13 = (w13,) if isinstance(w13, PackedWeight) else tuple(w13)
    w2 = (w2,) if isinstance(w2, PackedWeight) else tuple(w2)
    if way is None and max(len(w13), len(w2)) > 1:
        raise ValueError(f"w13 in {len(w13)} and w2 in {len(w2)} parts need a way to multiply them")
    if way is not None and batch_invariant:
        raise ValueError("batch_invariant needs whole weights, these lie in parts")
    num_tokens, top_k = topk_ids.shape
    shape = LayerShape(
        target=w13[0].target,
        hidden_size=w13[0].k,
        intermediate_size=w2[0].k,
        num_local_experts=w13[0].num_groups,
        num_experts=num_experts or w13[0].num_groups,
        top_k=top_k,
        activation=Activation(activation),
        batch_invariant=batch_invariant,
    )
    _check(shape, x, w13, w2, num_tokens, out)
    if weight_on_input and topk_weights is None:
        raise ValueError("weight_on_input needs topk_weights")
    needed = workspace_bytes(
        num_tokens=num_tokens,
        top_k=top_k,
        num_local_experts=shape.num_local_experts,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        token_formats=token_formats_of(shape.target, shape.activation),
    )
    if workspace.dtype != torch.uint8 or workspace.ndim != 1 or workspace.numel() < needed:
        raise ValueError(
            f"the workspace of {num_tokens} tokens must be flat torch.uint8 of at least {needed} bytes, "
            f"got {workspace.dtype} {tuple(workspace.shape)}"
        )
    if workspace.data_ptr() % ALIGNMENT and workspace.numel():
        raise ValueError(f"the workspace must start at a multiple of {ALIGNMENT} bytes, got {workspace.data_ptr():#x}")
    each = chunk_tokens(top_k)
    for begin in range(0, num_tokens, each):
        rows = slice(begin, min(begin + each, num_tokens))
        _chunk(
            shape,
            Mxfp8Tensor(x.codes[rows], x.scales[rows]) if isinstance(x, Mxfp8Tensor) else x[rows],
            topk_ids=topk_ids[rows],
            topk_weights=None if topk_weights is None else topk_weights[rows],
            w13=w13,
            w2=w2,
            way=way,
            out=out[rows],
            workspace=workspace,
            route_workspace=route_workspace,
            expert_map=expert_map,
            rounding=Rounding(rounding),
            weight_on_input=weight_on_input,
            shared=None if shared is None else shared[rows],
        )


def _chunk(
    shape: LayerShape,
    x: torch.Tensor | Mxfp8Tensor,
    *,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor | None,
    w13: tuple[PackedWeight, ...],
    w2: tuple[PackedWeight, ...],
    way: Way | None,
    out: torch.Tensor,
    workspace: torch.Tensor,
    route_workspace: torch.Tensor,
    expert_map: torch.Tensor | None,
    rounding: Rounding,
    weight_on_input: bool,
    shared: torch.Tensor | None,
) -> None:
    num_tokens = len(topk_ids)
    step = step_of(shape, num_tokens)
    memory = views(shape, step, num_tokens, workspace, out.dtype)
    dispatch.route_and_dispatch(
        x,
        topk_ids,
        num_local_experts=shape.num_local_experts,
        workspace=route_workspace,
        token_format=step.token_format,
        expert_map=expert_map,
        activation=shape.activation,
        rounding=rounding,
        topk_weights=topk_weights if weight_on_input else None,
        routed=memory.routed,
        out=memory.tokens,
    )
    runs: dict[str, Any] = {
        "expert_offsets": memory.routed.expert_offsets,
        "expert_counts": memory.routed.expert_counts,
    }
    if way is None:
        gemm.grouped_gemm_swiglu(
            memory.tokens,
            w13[0],
            activation=shape.activation,
            rounding=rounding,
            out=memory.intermediate,
            expected_rows=step.expected_rows,
            early_counts=False,  # the kernel in front writes them
            batch_invariant=shape.batch_invariant,
            **runs,
        )
        gemm.grouped_gemm(
            memory.intermediate,
            w2[0],
            out_dtype=out.dtype,
            out=memory.y,
            expected_rows=step.expected_rows,
            early_counts=True,
            batch_invariant=shape.batch_invariant,
            **runs,
        )
    else:
        products(
            memory.tokens,
            w13,
            w2,
            way=way,
            intermediate=memory.intermediate,
            out=memory.y,
            activation=shape.activation,
            rounding=rounding,
            expected_rows=step.expected_rows,
            **runs,
        )
    combine.combine_tokens(
        memory.y,
        slots=memory.routed.slots,
        topk_weights=None if weight_on_input else topk_weights,
        shared=shared,
        out=out,
    )


def _elements(x: torch.Tensor | Mxfp8Tensor) -> torch.Tensor:
    return x.codes if isinstance(x, Mxfp8Tensor) else x


def _check(
    shape: LayerShape,
    x: torch.Tensor | Mxfp8Tensor,
    w13: tuple[PackedWeight, ...],
    w2: tuple[PackedWeight, ...],
    num_tokens: int,
    out: torch.Tensor,
) -> None:
    experts, hidden_size, size = shape.num_local_experts, shape.hidden_size, shape.intermediate_size
    found = {(part.num_groups, part.k, part.gate_up) for part in w13}, {(part.num_groups, part.k) for part in w2}
    rows = sum(part.n for part in w13), sum(part.n for part in w2)
    if (len(found[0]), len(found[1]), *rows) != (1, 1, 2 * size, hidden_size) or w2[0].num_groups != experts:
        shapes = [" + ".join(str(list(part.codes.shape)) for part in weight) for weight in (w13, w2)]
        raise ValueError(f"w13 must be [E, 2 * I, H] and w2 [E, H, I], got {shapes[0]} and {shapes[1]}")
    if not w13[0].gate_up or any(part.gate_up for part in w2):
        raise ValueError("w13 must be packed with gate_up=True, and w2 without")
    size_of_x = tuple(_elements(x).shape)
    if size_of_x != (num_tokens, hidden_size):
        raise ValueError(f"x must be {(num_tokens, hidden_size)} for these topk_ids and weights, got {size_of_x}")
    if out.dtype not in OUT_DTYPES:
        raise TypeError(f"out must be bf16 or fp16, got {out.dtype}: serve with --dtype bfloat16")
    if tuple(out.shape) != (num_tokens, hidden_size):
        raise ValueError(f"out must be {(num_tokens, hidden_size)}, got {tuple(out.shape)}")
    if shape.num_experts < experts:
        raise ValueError(f"num_experts is {shape.num_experts}; at least the {experts} of this rank exist")


def _in_parts(way: Way | None, parts: tuple[int, int]) -> dict[str, Any]:
    """What ``plan.warm_expert_configs`` is to know of weights in parts."""
    if way is None:
        return {}
    return {"parts_of": tuple(way.part_of(count) if count > 1 else None for count in parts)}


def warm_up(
    *,
    device: torch.device,
    hidden_size: int,
    intermediate_size: int,
    num_local_experts: int,
    num_experts: int,
    top_k: int,
    max_tokens: int,
    dtype: torch.dtype,
    has_map: bool,
    activation: Activation,
    rounding: Rounding,
    weighted: bool = True,
    id_dtype: str = "int32",
    quantized: bool = False,
    ways: Sequence[Way] = (),
    parts: tuple[int, int] = (1, 1),
    batch_invariant: bool = False,
) -> None:
    """Compile, or load, every kernel that calls of 1 to max_tokens tokens can choose on a device.

    Args:
        device: the GPU.
        quantized: x is MXFP8, and dtype that of out alone.
        ways: in which weights in parts are launched.
        parts: of w13 and of w2.
        batch_invariant: see :func:`moe_experts`.
        (others): of the layer and of its calls. dtype is of x and of out; weights are multiplied on the output.
    """
    facts = device_facts(device.index)
    shape = LayerShape(
        target=facts.target,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_local_experts=num_local_experts,
        num_experts=num_experts,
        top_k=top_k,
        activation=activation,
        batch_invariant=batch_invariant,
    )
    chunk = min(max_tokens, chunk_tokens(top_k))
    formats = token_formats_of(shape.target, activation)
    if batch_invariant:
        formats = (step_of(shape, chunk).token_format,)
    with torch.cuda.device(device):
        prepare_device(device, max_rows=1)
        if any(isinstance(way, OneLaunch) for way in ways):
            prepare_domains(device)
        dispatch.warm_up(
            hidden_size=hidden_size,
            top_k=top_k,
            num_local_experts=num_local_experts,
            max_tokens=chunk,
            dtype=QUANTIZED if quantized else str(dtype).removeprefix("torch."),
            id_dtype=id_dtype,
            has_map=has_map,
            token_formats=formats,
            activation=activation,
            rounding=rounding,
        )
        for way in ways or (None,):
            for config in plan.warm_expert_configs(
                **facts._asdict(),
                num_groups=num_local_experts,
                hidden_size=hidden_size,
                intermediate_size=intermediate_size,
                max_rows=step_of(shape, chunk).expected_rows,
                out_dtype=OUT_DTYPES[dtype],
                activation=activation,
                rounding=rounding,
                batch_invariant=batch_invariant,
                **_in_parts(way, parts),
            ):
                plan.compile_config(config, target=facts.target)
        combine.warm_up(hidden_size=hidden_size, top_k=top_k, dtype=OUT_DTYPES[dtype], weighted=weighted)
