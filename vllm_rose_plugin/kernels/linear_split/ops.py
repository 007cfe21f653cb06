"""``torch.ops.rose.mxfp8_linear_split``, a linear layer whose weight lies in parts by columns.

Importing this module registers it, once per process.
"""

import torch

from vllm_rose_plugin.kernels.call_counts import count
from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, ScaleLayout
from vllm_rose_plugin.kernels.gemm.domains import linear_domains
from vllm_rose_plugin.kernels.gemm.launch import packed_linear_weight
from vllm_rose_plugin.kernels.gemm.reference import mxfp8_linear
from vllm_rose_plugin.kernels.jit.chosen import REFERENCE
from vllm_rose_plugin.kernels.mxfp8_quantize.family import ROSE
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8
from vllm_rose_plugin.kernels.mxfp8_quantize.scale_layout import row_major
from vllm_rose_plugin.kernels.op_library import register_op

NAME = "mxfp8_linear_split"
SCHEMA = (
    NAME + "(Tensor x, Tensor[] weight, Tensor[] scales, *, Tensor? sm_domains=None, Tensor? x_scales=None, "
    'Tensor? bias=None, str activation="mxfp8", str rounding="rceil", ScalarType? out_dtype=None, '
    "bool batch_invariant=False) -> Tensor"
)
"""Codes ``[N / parts, K]`` and scales of each part. With sm_domains, as in ``gemm/domains.py``, scales are packed and
our kernel computes; without, they are row-major and the reference does. The rest is as in ``mxfp8_linear``."""


def _mxfp8_linear_split(
    x,
    weight,
    scales,
    *,
    sm_domains=None,
    x_scales=None,
    bias=None,
    activation="mxfp8",
    rounding="rceil",
    out_dtype=None,
    batch_invariant=False,
):
    count(NAME, REFERENCE if sm_domains is None else ROSE)
    tiled = x_scales is not None and x_scales.ndim == 1
    operand = x
    if x_scales is not None:
        operand = Mxfp8Tensor(x, x_scales, ScaleLayout.TCGEN05_128X4 if tiled else ScaleLayout.ROW_MAJOR)
    if sm_domains is not None:
        return linear_domains(
            operand,
            [packed_linear_weight(*part) for part in zip(weight, scales, strict=True)],
            sm_domains=sm_domains,
            bias=bias,
            activation=activation,
            rounding=rounding,
            out_dtype=out_dtype,
            batch_invariant=batch_invariant,
        )
    if isinstance(operand, Mxfp8Tensor):
        operand = row_major(operand)
    elif Activation(activation) is Activation.MXFP8:
        out_dtype = out_dtype or x.dtype
        operand = Mxfp8Tensor(*quantize_mxfp8(x, rounding=rounding))
    biases = [None] * len(weight) if bias is None else bias.chunk(len(weight))
    columns = [
        mxfp8_linear(
            operand, Mxfp8Tensor(*part), bias=own, activation=activation, rounding=rounding, out_dtype=out_dtype
        )
        for *part, own in zip(weight, scales, biases, strict=True)
    ]
    return torch.cat(columns, dim=-1)


def _fake(x, weight, scales, *, out_dtype=None, **how):
    return x.new_empty((*x.shape[:-1], sum(part.shape[0] for part in weight)), dtype=out_dtype or x.dtype)


register_op(NAME, SCHEMA, _mxfp8_linear_split, fake=_fake)
