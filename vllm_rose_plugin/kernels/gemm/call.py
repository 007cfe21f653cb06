"""What the host knows of a call of the GEMM, and the config that the heuristics make of it.

Imports neither torch nor cutlass.
"""

from dataclasses import dataclass
from typing import Any

from vllm_rose_plugin.kernels.contracts import Activation, Rounding, TokenFormat
from vllm_rose_plugin.kernels.gemm.config import Epilogue, GemmConfig, choose_config
from vllm_rose_plugin.kernels.gemm.config_sm100 import Sm100Config, choose_config_sm100


@dataclass(frozen=True)
class Call:
    """A call of the GEMM, without the number of its tokens."""

    target: str
    sm_count: int
    num_groups: int
    n: int
    k: int
    token_format: TokenFormat
    epilogue: Epilogue = Epilogue.PLAIN
    out_dtype: str = "bfloat16"
    """PLAIN: "bfloat16" or "float16"."""
    bias: bool = False
    out_format: TokenFormat | None = None
    """SWIGLU: what it writes."""
    activation: Activation = Activation.MXFP8
    """SWIGLU: whether its result is quantized."""
    rounding: Rounding = Rounding.RCEIL
    """SWIGLU: of its result."""
    limit: float | None = None
    early_counts: bool = False
    batch_invariant: bool = False
    """One config for every number of tokens, and on every machine: none that was measured, and no stream-K."""

    @property
    def grid_follows_rows(self) -> bool:
        """Whether the number of blocks depends on the number of tokens."""
        return not self.target.startswith("sm_90")


def heuristic(call: Call, expected_rows: int) -> GemmConfig | Sm100Config:
    """The config that follows from a call's sizes alone.

    Args:
        call: what it computes.
        expected_rows: tokens to expect in all groups.

    Raises:
        ValueError: sizes that no kernel takes.
    """
    shape: dict[str, Any] = {
        "num_groups": call.num_groups,
        "n": call.n,
        "k": call.k,
        "num_rows": expected_rows,
        "epilogue": call.epilogue,
        "out_dtype": call.out_dtype,
        "bias": call.bias,
        "rounding": call.rounding,
        "limit": call.limit,
    }
    if not call.target.startswith("sm_90"):
        return choose_config_sm100(target=call.target, **shape)
    return choose_config(
        **shape,
        token_format=call.token_format,
        activation=call.activation,
        out_format=call.out_format,
        early_counts=call.early_counts,
        batch_invariant=call.batch_invariant,
        sm_count=call.sm_count,
    )
