"""The residual and the RMS norm behind our all-reduce of a group, in one launch where that is faster."""

from importlib.metadata import version
from typing import Any

import torch

from vllm_rose_plugin.kernels.all_reduce.config import Tuning
from vllm_rose_plugin.kernels.all_reduce.launch import AllReduce
from vllm_rose_plugin.kernels.all_reduce.table import Table
from vllm_rose_plugin.kernels.all_reduce_norm.config import DTYPES, MAX_HIDDEN_SIZE, ROW_MULTIPLE
from vllm_rose_plugin.kernels.all_reduce_norm.launch import all_reduce_norm
from vllm_rose_plugin.kernels.all_reduce_norm.tune import tune_norm, warm_norm

_ALIGNMENT = 32
_TYPES = tuple(getattr(torch, name) for name in DTYPES)


class GroupNorm:
    """Made by :func:`make_norm`; all ranks decide alike, as in ``group_all_reduce.py``."""

    def __init__(self, *, reduce: AllReduce, table: Table, hidden_size: int, dtype: torch.dtype, most_rows: int):
        """For :func:`make_norm`."""
        self._reduce, self._table = reduce, table
        self._hidden_size, self._dtype, self._most_rows = hidden_size, dtype, most_rows

    @property
    def why(self) -> str:
        """For which numbers of tokens, in words."""
        row_bytes = self._hidden_size * self._dtype.itemsize
        ranges: list[list[int]] = []
        before = 0
        for size, tuning in self._table.rows:
            if tuning is not None and ranges and ranges[-1][1] == before:
                ranges[-1][1] = size // row_bytes
            elif tuning is not None:
                ranges.append([before + 1, size // row_bytes])
            before = size // row_bytes
        texts = " and ".join(f"{first} to {last}" for first, last in ranges)
        return f"in one launch with residual and norm for {texts} tokens" if texts else ""

    def takes(self, x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> Tuning | None:
        """How a call is served, None: unfused. Looks at nothing that can differ between ranks."""
        same = x.dtype == residual.dtype == weight.dtype == self._dtype
        rows = x.ndim == 2 and x.shape[1] == self._hidden_size and 0 < x.shape[0] <= self._most_rows
        if not same or not rows or residual.shape != x.shape:
            return None
        return self._table.lookup(x.shape[0] * self._hidden_size * self._dtype.itemsize)

    def __call__(
        self, x: torch.Tensor, *, residual: torch.Tensor, weight: torch.Tensor, eps: float, tuning: Tuning
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """``(normalized rows, new residual)``, new tensors ``[T, H]``.

        Args:
            tuning: what :meth:`takes` said.

        Raises:
            PeerTimeoutError: an earlier launch gave up.
        """
        # Other kernels than those that were warmed up serve what isn't aligned, and add squares in another order.
        x, residual, weight = (_aligned(tensor) for tensor in (x, residual, weight))
        rows, new = all_reduce_norm(self._reduce, x, residual=residual, weight=weight, eps=eps, tuning=tuning)
        assert isinstance(rows, torch.Tensor)
        return rows, new


def make_norm(reduce: AllReduce, *, hidden_size: int, dtype: torch.dtype, most_rows: int) -> GroupNorm:
    """Timed beside our all-reduce and vLLM's norm, its kernels loaded; collective.

    Args:
        reduce: ready for plain launches.
        hidden_size, dtype: of the model's hidden states.
        most_rows: of a step.

    Raises:
        GroupError: some rank can't; the same text on all.
        MissingRankError: some rank didn't arrive.
    """

    def able() -> None:
        if dtype not in _TYPES:
            raise ValueError(f"the model's dtype is {dtype}; the fused launch takes {', '.join(map(str, _TYPES))}")
        if hidden_size % ROW_MULTIPLE or not 0 < hidden_size <= MAX_HIDDEN_SIZE:
            raise ValueError(
                f"hidden_size is {hidden_size}; the fused launch takes multiples of {ROW_MULTIPLE} up to "
                f"{MAX_HIDDEN_SIZE}"
            )

    reduce.group.agree("all-reduce and norm: what the kernel takes", able)
    how: dict[str, Any] = {"hidden_size": hidden_size, "dtype": dtype, "most_rows": most_rows}
    table = tune_norm(
        reduce,
        **how,
        unfused=lambda x, residual, weight, eps: vllm_norm(reduce(x), residual, weight, eps),
        unfused_name=f"vllm {version('vllm')}",
    )
    warm_norm(reduce, table=table, **how)
    return GroupNorm(reduce=reduce, table=table, **how)


def vllm_norm(
    rows: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """vLLM's own, in one launch where it has a kernel; `rows` may be overwritten, the residual is not."""
    import vllm.kernels  # noqa: F401  which registers them; a worker has done it
    from vllm import ir

    op = ir.ops.fused_add_rms_norm
    kernel, given = op.impls.get("vllm_c"), (rows, residual, weight, eps)
    if kernel is None or not kernel.supported or not kernel.supports_args(*given):
        return op.impls["native"].impl_fn(*given)
    return kernel.impl_fn(rows, residual.clone(), weight, eps)


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.contiguous()
    return tensor if tensor.data_ptr() % _ALIGNMENT == 0 else tensor.clone()
