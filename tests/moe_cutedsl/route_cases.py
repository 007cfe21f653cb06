"""Compiles routing and dispatch, records their launch from the compiled host function, and runs it on the CPU."""

import functools
import re
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import torch
from grid_machine import Machine, Memory

sys.path.insert(0, str(Path(__file__).parents[1] / "gemm_cutedsl"))
from sm100_host import Launch, aligned, launch_of

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK, Activation, Mxfp8Tensor, Rounding, TokenFormat
from vllm_rose_plugin.kernels.jit import compile as jit
from vllm_rose_plugin.kernels.moe_dispatch import config as dispatch
from vllm_rose_plugin.kernels.moe_dispatch import kernel as dispatch_kernel
from vllm_rose_plugin.kernels.moe_dispatch.reference import max_rows
from vllm_rose_plugin.kernels.moe_route import config as route
from vllm_rose_plugin.kernels.moe_route import kernel as route_kernel
from vllm_rose_plugin.kernels.mxfp8_quantize.config import widest_load
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import fp32_pitch, padded_blocks

TARGETS = ["sm_100a", "sm_100f", "sm_103a", "sm_107a", "sm_90a"]
SM_COUNT = 132
POISON = 0xAB


class Routed(NamedTuple):
    """What routing writes."""

    counts: torch.Tensor
    offsets: torch.Tensor
    slots: torch.Tensor
    scale_rows: torch.Tensor | None


class Made(NamedTuple):
    """A compiled kernel."""

    compiled: object
    ptx: str
    cubin: bytes

    @property
    def param_sizes(self) -> list[int]:
        head = self.ptx[: self.ptx.index("\n{")]
        return [
            int(a or 0) or {"32": 4, "64": 8}[b]
            for a, b in re.findall(
                r"\.param (?:\.align \d+ \.b8 \S+_param_\d+\[(\d+)\]|\.[bu](\d+) \S+_param_\d+)", head
            )
        ]


@functools.cache
def made(config, target: str) -> Made:
    kernel = route_kernel if isinstance(config, route.RouteConfig) else dispatch_kernel
    with tempfile.TemporaryDirectory() as folder:
        compiled = jit._run_compiler(config, kernel.build, target, keep=folder)
        return Made(compiled, compiled.artifacts.PTX, compiled.artifacts.CUBIN)


def poisoned(shape: tuple, dtype: torch.dtype) -> torch.Tensor:
    tensor = aligned(shape, dtype)
    tensor.view(torch.uint8).fill_(POISON)
    return tensor


def placed(tensor: torch.Tensor) -> torch.Tensor:
    """A copy at an aligned address."""
    copy = aligned(tuple(tensor.shape), tensor.dtype)
    copy.copy_(tensor)
    return copy


def empty_routed(num_tokens: int, top_k: int, num_experts: int, *, scale_rows: bool) -> Routed:
    return Routed(
        poisoned((num_experts,), torch.int32),
        poisoned((num_experts + 1,), torch.int32),
        poisoned((num_tokens, top_k), torch.int32),
        poisoned((num_tokens, top_k), torch.int32) if scale_rows else None,
    )


def new_workspace(num_experts: int) -> torch.Tensor:
    workspace = aligned((route.workspace_words(num_experts=num_experts, sm_count=SM_COUNT),), torch.int32)
    workspace[route.HEADER_WORDS :] = -7  # only the header must be zero
    return workspace


def flat(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.view(-1)


def launched(config, target: str, tensors: dict, results: set[str], *, seed: int, ended=lambda: None):
    """Runs a launch with these arguments.

    Returns:
        (the launch, how often each byte of each result was stored to)
    """
    kernel = made(config, target)
    launch: Launch = launch_of(kernel.compiled, list(tensors.values()), kernel.param_sizes)
    memory = Memory({name: t for name, t in tensors.items() if t is not None}, results)
    machine = Machine(kernel.ptx, memory, launch.params, grid=launch.grid[0], shared=max(launch.shared, 16), seed=seed)
    assert launch.block == (machine.program.threads, 1, 1) and launch.pdl and launch.grid[1:] == (1, 1)
    machine.run(ended=ended)
    written = {}
    for name in results:
        if tensors[name] is not None and tensors[name].numel():
            written[name] = machine.written.get(tensors[name].data_ptr())
    return launch, written


def late(tensor: torch.Tensor):
    """Hides a tensor's content until the kernel in front has ended: (what shows it, in place)."""
    real = tensor.clone()
    tensor.view(torch.uint8).fill_(0x77)
    return lambda: tensor.copy_(real)


def run_route(
    config: route.RouteConfig, target: str, topk_ids, expert_map, *, workspace=None, seed: int = 0
) -> tuple[Routed, Launch]:
    ids = placed(topk_ids)
    out = empty_routed(*ids.shape, config.num_experts, scale_rows=config.scale_rows)
    workspace = new_workspace(config.num_experts) if workspace is None else workspace
    tensors = {
        "ids": ids.view(-1),
        "expert_map": None if expert_map is None else placed(expert_map),
        "workspace": workspace,
        "counts": out.counts,
        "offsets": out.offsets,
        "slots": flat(out.slots),
        "scale_rows": flat(out.scale_rows),
    }
    results = {"workspace", "counts", "offsets", "slots", "scale_rows"}
    launch, _ = launched(config, target, tensors, results, seed=seed, ended=late(ids))
    return out, launch


class Dispatched(NamedTuple):
    """What a dispatch writes."""

    rows: torch.Tensor  # (S, row bytes) uint8
    scales: torch.Tensor
    routed: Routed
    launch: Launch
    written: dict


def scale_buffer(config: dispatch.DispatchConfig, num_rows: int) -> torch.Tensor:
    blocks = config.hidden_size // MXFP8_BLOCK
    if config.token_format is TokenFormat.MXFP8_FP32_SCALES:
        return poisoned((blocks, fp32_pitch(num_rows)), torch.float32)
    if config.token_format is TokenFormat.MXFP8_TCGEN05:
        tiles = num_rows // 128 + min(config.num_experts, num_rows)
        return poisoned((tiles * 128 * padded_blocks(blocks),), torch.uint8)
    return poisoned((16,), torch.uint8)


def run_dispatch(
    config: dispatch.DispatchConfig,
    target: str,
    x: torch.Tensor | Mxfp8Tensor,
    *,
    routed: Routed | None = None,
    topk_ids: torch.Tensor | None = None,
    expert_map: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    workspace: torch.Tensor | None = None,
    seed: int = 0,
) -> Dispatched:
    """x may have any strides; where `routed` is None, the same launch routes."""
    if isinstance(x, Mxfp8Tensor):
        plain, x_scales = placed(x.codes.view(torch.uint8)), placed(x.scales)
    else:
        plain, x_scales = x, None
    num_tokens = plain.shape[0]
    if routed is None:
        routed = empty_routed(num_tokens, config.top_k, config.num_experts, scale_rows=config.scale_rows)
        workspace = new_workspace(config.num_experts) if workspace is None else workspace
    num_rows = max_rows(
        num_tokens=num_tokens, top_k=config.top_k, num_local_experts=config.num_experts, alignment=config.alignment
    )
    rows = poisoned((num_rows, config.row_bytes), torch.uint8)
    scales = scale_buffer(config, num_rows)
    ids = placed(topk_ids).view(-1) if config.route else None
    tensors = {
        "x": plain,
        "x_scales": flat(x_scales),
        "topk_weights": flat(placed(topk_weights)) if config.weighted else None,
        "ids": ids,
        "expert_map": placed(expert_map) if config.route and config.route.has_map else None,
        "workspace": workspace if config.route else None,
        "counts": routed.counts,
        "offsets": routed.offsets,
        "slots": flat(routed.slots),
        "scale_rows": flat(routed.scale_rows) if config.scale_rows else None,
        "rows": rows,
        "scales": scales,
    }
    results = {"rows", "scales"}
    shown = [late(plain)]
    if config.route:
        results |= {"workspace", "counts", "offsets", "slots", "scale_rows"}
        shown.append(late(ids))
    else:
        shown += [late(tensor) for tensor in routed if tensor is not None]
    launch, written = launched(config, target, tensors, results, seed=seed, ended=lambda: [show() for show in shown])
    return Dispatched(rows, scales, routed, launch, written)


def dispatch_config(x, *, target: str, token_format: TokenFormat, top_k: int, num_experts: int, **how):
    quantized = isinstance(x, Mxfp8Tensor)
    tensor = x.codes if quantized else x
    how = {
        "alignment": 1,
        "activation": Activation.MXFP8,
        "rounding": Rounding.RCEIL,
        "weighted": False,
        "load_alignment": widest_load(target),
        "sm_count": SM_COUNT,
        "num_tokens": tensor.shape[0],
        **how,
    }
    return dispatch.choose_config(
        dtype="mxfp8" if quantized else str(x.dtype).removeprefix("torch."),
        hidden_size=tensor.shape[1],
        token_format=token_format,
        top_k=top_k,
        num_experts=num_experts,
        **how,
    )
