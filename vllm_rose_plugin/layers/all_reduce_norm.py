"""``torch.ops.rose.all_reduce_norm``, and the pass that puts it into vLLM's compiled graphs.

A graph has the op or hasn't by the configuration alone, which vLLM hashes; whether a call is one launch is decided when
it runs, by what all ranks of the group agreed on. So graphs from the compile cache of one rank fit those of the others.
"""

import inspect
import sys
from typing import Any

import torch
from torch import fx
from vllm.compilation.passes.inductor_pass import InductorPass

from vllm_rose_plugin.kernels import call_counts
from vllm_rose_plugin.layers import live_groups
from vllm_rose_plugin.layers.group_norm import vllm_norm

OP = "all_reduce_norm"
"""Also in the counts of calls; providers are those of all-reduce, and ``unfused``."""
PASS_KEY = "post_grad_custom_post_pass"
"""Of ``compilation_config.inductor_compile_config``: the one place that vLLM has for a pass from outside."""

_SCHEMA = (
    f"{OP}(Tensor x, Tensor residual, Tensor weight, float eps, str group_name) -> (Tensor rows, Tensor new_residual)"
)
_DTYPES = (torch.bfloat16, torch.float16)


def _all_reduce_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """(T, H) each; (H,) weight."""
    group = live_groups.find(group_name)
    if group is not None:
        fused = group.normalized(x, residual=residual, weight=weight, eps=eps)
        if fused is not None:
            return fused
    call_counts.count(OP, "unfused")
    # As `_fake` says, results are contiguous; and vLLM's kernel wants that of what it is given.
    return vllm_norm(torch.ops.vllm.all_reduce(x.contiguous(), group_name), residual.contiguous(), weight, eps)


def _fake(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float, group_name: str
) -> tuple[torch.Tensor, torch.Tensor]:
    return x.new_empty(x.shape), residual.new_empty(residual.shape)


def register() -> None:
    """Register the op, once per process; as in ``kernels/ops.py``, it outlives this module."""
    namespace = torch.ops.rose
    if f"_{OP}_library" in namespace.__dict__:
        return
    library = torch.library.Library("rose", "FRAGMENT")
    library.define(_SCHEMA, tags=(torch.Tag.pt2_compliant_tag,))
    library.impl(OP, _all_reduce_norm, "CompositeExplicitAutograd")
    torch.library.register_fake(f"rose::{OP}", _fake, lib=library)
    namespace.__dict__[f"_{OP}_library"] = library


register()


class AllReduceNormPass(InductorPass):
    """Replaces an all-reduce over ranks whose sum goes into vLLM's ``fused_add_rms_norm``, and nowhere else."""

    def __call__(self, graph: fx.Graph) -> None:
        """Changes the graph in place, before vLLM lowers its own ops."""
        for norm in list(graph.nodes):
            if norm.op == "call_function" and norm.target is torch.ops.vllm_ir.fused_add_rms_norm.default:
                _fuse(graph, norm)

    def uuid(self) -> str:
        """Of this file: vLLM puts it into the keys of its compile caches."""
        return InductorPass.hash_source(inspect.getsource(sys.modules[__name__]))


def _fuse(graph: fx.Graph, norm: fx.Node) -> None:
    asked = _arguments(norm)
    rows, residual, weight = asked["x"], asked["x_residual"], asked["weight"]
    if not isinstance(weight, fx.Node) or asked.get("variance_size") is not None:
        return
    if rows.op != "call_function" or rows.target is not torch.ops.vllm.all_reduce.default or len(rows.users) != 1:
        return
    reduced = _arguments(rows)
    # As in the communicator's seam: no other group can be ours.
    if reduced["group_name"].split(":")[0] != "tp":
        return
    x, kept, scale = (node.meta["val"] for node in (reduced["tensor"], residual, weight))
    if x.ndim != 2 or x.dtype not in _DTYPES or kept.dtype != x.dtype:
        return
    if scale.dtype != x.dtype:
        from vllm_rose_plugin.layers.log import logger

        logger.warning_once(
            'The setting "all_reduce_norm" leaves norms whose weight is %s to vLLM, as those of Gemma and Qwen3.5 are: '
            "our launch takes %s.",
            scale.dtype,
            x.dtype,
        )
        return
    with graph.inserting_before(norm):
        fused = graph.call_function(
            torch.ops.rose.all_reduce_norm.default,
            (reduced["tensor"], residual, weight, asked["epsilon"], reduced["group_name"]),
        )
    # Nothing else of the norm's: inductor takes what it says of arguments for those of the new op.
    fused.meta.update({key: norm.meta[key] for key in ("val", "stack_trace") if key in norm.meta})
    norm.replace_all_uses_with(fused)
    graph.erase_node(norm)
    graph.erase_node(rows)


def _arguments(node: fx.Node) -> dict[str, Any]:
    """By name, those that are given."""
    assert isinstance(node.target, torch._ops.OpOverload)
    names = [argument.name for argument in node.target._schema.arguments]
    return dict(zip(names, node.args, strict=False)) | node.kwargs
