"""What the router is compiled for, and how that follows from a call's shapes. Imports neither torch nor cutlass."""

from dataclasses import dataclass

MAX_EXPERTS = 512
ID_DTYPES = ("int32", "int64")
WARP = 32

_THREADS = 512
_ITEMS = (8, 16, 32)
"""Few blocks with many pairs each: after the grid barrier every block reads the counts of all of them."""
HEADER_WORDS = 4
"""Of a workspace, before the blocks' counts: the grid barrier, the flag of decode, two that are unused."""
BARRIER_WORD, FLAG_WORD = 0, 1


@dataclass(frozen=True)
class RouteConfig:
    """Constants of one kernel.

    A warp takes `items` x 32 neighbouring (token, k) pairs, and a block those of its warps, so that the order of the
    pairs is that of blocks, warps, items and lanes.
    """

    num_experts: int
    """E, of this rank."""
    alignment: int
    """Rows to which runs are padded."""
    id_dtype: str
    """"int32" or "int64"."""
    has_map: bool
    """Ids are global, and `expert_map` says which of them are here."""
    scale_rows: bool
    """Rows of the tiled scales are written too: where each run begins a tile of 128."""
    items: int
    threads: int

    @property
    def warps(self) -> int:
        return self.threads // WARP

    @property
    def chunks(self) -> int:
        """Groups of 32 experts."""
        return -(-self.num_experts // WARP)

    @property
    def parts(self) -> int:
        """Threads that share the blocks' counts of one expert."""
        return max(1, self.threads // (self.chunks * WARP))

    @property
    def pairs_per_block(self) -> int:
        return self.threads * self.items

    def blocks(self, num_pairs: int) -> int:
        """Blocks of a launch."""
        return max(1, -(-num_pairs // self.pairs_per_block))


def choose_config(
    *,
    num_pairs: int,
    num_experts: int,
    alignment: int,
    id_dtype: str,
    has_map: bool,
    scale_rows: bool,
    sm_count: int,
) -> RouteConfig:
    """The config of a launch that only routes.

    Args:
        num_pairs: T * top_k; decides how many pairs a thread takes, so that all blocks fit on the device at once.
        num_experts, alignment, id_dtype, has_map, scale_rows: see :class:`RouteConfig`.
        sm_count: of the device.

    Raises:
        ValueError: a value outside of its range; the message names it.
    """
    check(num_experts=num_experts, alignment=alignment, id_dtype=id_dtype)
    items = next((items for items in _ITEMS if num_pairs <= sm_count * _THREADS * items), None)
    if items is None:
        raise ValueError(
            f"{num_pairs} pairs of a token and an expert are more than the {sm_count * _THREADS * _ITEMS[-1]} that one "
            "launch routes on this device: route fewer tokens at a time (--max-num-batched-tokens)"
        )
    return RouteConfig(
        num_experts=num_experts,
        alignment=alignment,
        id_dtype=id_dtype,
        has_map=has_map,
        scale_rows=scale_rows,
        items=items,
        threads=_THREADS,
    )


def warm_configs(*, max_pairs: int, sm_count: int, **how) -> tuple[RouteConfig, ...]:
    """Every config that calls of up to max_pairs pairs can need; `how` as in :func:`choose_config`."""
    steps = {min(max_pairs, sm_count * _THREADS * items) for items in _ITEMS}
    found = [choose_config(num_pairs=pairs, sm_count=sm_count, **how) for pairs in sorted(steps)]
    return tuple(dict.fromkeys(found))


def workspace_words(*, num_experts: int, sm_count: int) -> int:
    """int32 words of a workspace: any launch of a device fits."""
    return HEADER_WORDS + sm_count * num_experts


def check(*, num_experts: int, alignment: int, id_dtype: str) -> None:
    """Refuse what no kernel routes."""
    if not 1 <= num_experts <= MAX_EXPERTS:
        raise ValueError(f"num_local_experts is {num_experts}; it must be 1 to {MAX_EXPERTS}")
    if alignment < 1:
        raise ValueError(f"alignment must be at least 1 row, got {alignment}")
    if id_dtype not in ID_DTYPES:
        raise ValueError(f"topk_ids are {id_dtype}; they must be {' or '.join(ID_DTYPES)}")
