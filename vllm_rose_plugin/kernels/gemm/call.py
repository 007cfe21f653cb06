"""What the host knows of a call of the GEMM, and the config that the heuristics make of it.

Imports neither torch nor cutlass.
"""

from dataclasses import dataclass, replace
from typing import Any, Optional

from vllm_rose_plugin.kernels.contracts import Activation, Rounding, TokenFormat
from vllm_rose_plugin.kernels.gemm.choose import choose_config
from vllm_rose_plugin.kernels.gemm.config import Epilogue, GemmConfig, with_stages
from vllm_rose_plugin.kernels.gemm.config_sm100 import COMPUTED_SM100, Sm100Config, choose_config_sm100, fill_up


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
    whole: Optional["Call"] = None
    """The call on the weight of which this one has some columns: the result goes into a slice of that call's rows, and
    sums are added up in its order. None: on a whole weight."""
    clusters: bool = True
    """False where they can't be launched, as in green contexts that backfill SMs of another locality domain."""
    domains: int = 1
    """Parts of the weight, one in each locality domain."""

    @property
    def grid_follows_rows(self) -> bool:
        """Whether the number of blocks depends on the number of tokens."""
        return not self.target.startswith("sm_90")

    @property
    def out_columns(self) -> int:
        """Columns of the rows that the result is a slice of; 0: it's all of them."""
        if self.whole is None:
            return 0
        return self.whole.n // (2 if self.epilogue is Epilogue.SWIGLU else 1)

    def part(self, *, n: int, sm_count: int, clusters: bool = True) -> "Call":
        """The call on some of the weight's columns.

        Args:
            n: rows of a group of the part; with SwiGLU gate and up together.
            sm_count: SMs that it runs on.
            clusters: whether they can be launched there.
        """
        return replace(self, n=n, sm_count=sm_count, clusters=clusters, whole=self)


def heuristic(call: Call, expected_rows: int, *, token_tile: int | None = None) -> GemmConfig | Sm100Config:
    """The config that follows from a call's sizes alone.

    Args:
        call: what it computes.
        expected_rows: tokens to expect in all groups.
        token_tile: on sm_90, of several groups, to compare tiles; None: what follows from their tokens.

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
        clusters, out_columns = call.clusters, call.out_columns
        return choose_config_sm100(
            target=call.target, clusters=clusters, out_columns=out_columns, domains=call.domains, **shape
        )
    config = choose_config(
        **shape,
        token_format=call.token_format,
        activation=call.activation,
        out_format=call.out_format,
        early_counts=call.early_counts,
        batch_invariant=call.batch_invariant or call.whole is not None,
        sm_count=call.sm_count,
        domains=call.domains,
        token_tile=token_tile,
    )
    if config.cluster > 1 and not call.clusters:
        config = with_stages(replace(config, cluster=1, split_k=False))
    return replace(config, out_columns=call.out_columns)


def in_order_of(config: GemmConfig | Sm100Config, whole: GemmConfig | Sm100Config, call: Call) -> Any:
    """A part's config that adds up in the order of the whole weight's, as far as the part's SMs allow it.

    How many blocks share K is what decides that order. Without clusters none do; and stream-K, which cuts K where the
    number of tiles wants it, is left to whole weights.

    Args:
        config: the heuristic's for the part.
        whole: what the call on the whole weight uses.
        call: on the part.
    """
    if not call.clusters:
        return config
    if isinstance(config, Sm100Config):
        assert isinstance(whole, Sm100Config)
        if config.split == whole.split:
            return config
        shape = {name: getattr(config, name) for name in COMPUTED_SM100}
        return fill_up(shape, target=call.target, token_tile=config.token_tile, pair=config.pair, split=whole.split)
    assert isinstance(whole, GemmConfig)
    shares = (whole.cluster, whole.split_k)
    if whole.stream_k or (config.cluster, config.split_k) == shares:
        return config
    return with_stages(replace(whole, n=config.n, out_columns=config.out_columns))
