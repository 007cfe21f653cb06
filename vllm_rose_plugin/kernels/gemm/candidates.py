"""Configs near the heuristic's that may be faster: what tuning measures. Imports neither torch nor cutlass.

A config has fields that say what is computed, which follow from the call, and free ones that say how. Everything here
changes free fields alone, so any candidate serves any number of tokens of its call.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import zip_longest

from vllm_rose_plugin.kernels.gemm.call import Call, heuristic
from vllm_rose_plugin.kernels.gemm.config import (
    W8A8_TILES,
    W8A16_TILES,
    WARPGROUP_ROWS,
    Epilogue,
    GemmConfig,
    consumer_registers,
    with_stages,
    with_tile,
)
from vllm_rose_plugin.kernels.gemm.config_sm100 import (
    COMPUTED_SM100,
    MAX_SPLIT,
    ROWS,
    TOKEN_TILES,
    Sm100Config,
    fill_up,
)
from vllm_rose_plugin.kernels.gemm.estimate import by_estimate

MOST = 8
"""Of a call: each costs a compilation."""

Config = GemmConfig | Sm100Config

_FREE = {
    GemmConfig: (
        "row_groups",
        "token_tile",
        "narrow_tokens",
        "k_tile",
        "pass_k",
        "in_flight",
        "blocks_per_sm",
        "cluster",
        "split_k",
        "stream_k",
    ),
    Sm100Config: ("pair", "split", "token_tile"),
}
"""Those that were chosen; stages and the like follow from them and from the target's memory."""

# (row_groups, blocks_per_sm, in_flight)
_W8A8_CUTS = ((2, 1, 4), (1, 3, 4), (2, 2, 2), (1, 3, 2), (1, 2, 4), (3, 1, 4))
_W8A16_CUTS = ((2, 1, 4), (3, 1, 4), (4, 1, 4), (1, 3, 4), (2, 2, 4), (1, 2, 4))
_OTHER_REGISTERS = {True: 56, False: 80}
"""Of a consumer thread besides its sums, with W8A8 and without: W8A16 holds weights that it widens. With these the
compiler spilled nothing (`tests/gemm_cutedsl/test_gemm_candidates.py`)."""
_LARGEST_SPLIT_TILE = 128
_MOST_ROW_GROUPS = 4
_HOPELESS = 1.5
"""Times the least estimate: only the best of a kind are measured where they take longer."""


def candidates(call: Call, expected_rows: int) -> tuple[Config, ...]:
    """The heuristic's config, then others near it, at most MOST in all, always in the same order.

    Args:
        call: what is computed. The format of its tokens is given: it was chosen before they were quantized.
        expected_rows: tokens to expect in all groups.

    Raises:
        ValueError: sizes that no kernel takes.
    """
    first = heuristic(call, expected_rows)
    if call.batch_invariant:
        return (first,)
    tokens = -(-expected_rows // call.num_groups)
    if isinstance(first, Sm100Config):
        near: Iterator[Config] = _near_sm100(first, tokens, call.target)
    elif call.num_groups == 1 and first.epilogue is Epilogue.PLAIN and not first.w8a8:
        near = _with_estimates(first, tokens, call.sm_count)
    else:
        near = _near_sm90(first, tokens)
    return tuple(dict.fromkeys((first, *near)))[:MOST]


def free_fields(config: Config) -> dict[str, int | bool]:
    """What distinguishes a config from the other candidates of its call."""
    return {name: getattr(config, name) for name in _FREE[type(config)]}


def with_free_fields(config: Config, values: Mapping[str, int | bool], *, target: str) -> Config:
    """The config with other free fields, and what follows from them.

    Raises:
        ValueError: other names or types than :func:`free_fields` gives, or what no kernel can do.
    """
    kinds = {name: type(value) for name, value in free_fields(config).items()}
    if {name: type(value) for name, value in values.items()} != kinds:
        raise ValueError(f"free fields are {', '.join(f'{name}: {kind.__name__}' for name, kind in kinds.items())}")
    if isinstance(config, Sm100Config):
        return _filled(config, target=target, **values)  # type: ignore[arg-type]
    changed = replace(config, **values)  # type: ignore[arg-type]  # refuses stream-K where it can't be
    if not _can_run(changed):
        raise ValueError(f"no kernel can be made with {dict(values)}")
    return with_stages(changed)


def _with_estimates(first: GemmConfig, tokens: int, sm_count: int) -> Iterator[GemmConfig]:
    """W8A16 with a single weight: the best of each way to share the work, by turns; then what has no estimate."""
    kinds: dict[str, list[tuple[float, GemmConfig]]] = {"stream_k": [], "plain": [], "split_k": []}
    for cycles, config in by_estimate(first, tokens=tokens, sm_count=sm_count):
        if _can_run(config):
            kinds["stream_k" if config.stream_k else "split_k" if config.split_k else "plain"].append((cycles, config))
    enough = _HOPELESS * min(cycles for (cycles, _), *_ in filter(None, kinds.values()))
    plain, split_k = (_promising(kinds[kind], 1, enough) for kind in ("plain", "split_k"))
    stream_k = _promising(kinds["stream_k"], 2, enough)  # whose estimate was never measured
    whole = replace(first, cluster=1, split_k=False, stream_k=False)
    others = [c for c in _near_sm90(whole, tokens) if c.blocks_per_sm > 1 or (c.cluster > 1 and not c.split_k)]
    yield from _by_turns(stream_k, plain, split_k, others[:1])
    yield from others[1:]


def _promising(found: list[tuple[float, GemmConfig]], least: int, enough: float) -> list[GemmConfig]:
    """The best of each token tile, then the rest: what is alike takes about as long. Only `least` are too slow."""
    best = {config.token_tile: (cycles, config) for cycles, config in reversed(found)}.values()
    ordered = [each for each in found if each in best] + [each for each in found if each not in best]
    return [config for place, (cycles, config) in enumerate(ordered) if place < least or cycles < enough]


def _near_sm90(first: GemmConfig, tokens: int) -> Iterator[GemmConfig]:
    cuts = [
        replace(first, row_groups=row_groups, blocks_per_sm=blocks, in_flight=in_flight)
        for row_groups, blocks, in_flight in (_W8A8_CUTS if first.w8a8 else _W8A16_CUTS)
        if row_groups <= 2 or (row_groups - 1) * WARPGROUP_ROWS < first.n  # else the last warpgroup has no rows
    ]
    tiles = []
    for tile in _neighbours(first.token_tile, W8A8_TILES if first.w8a8 else W8A16_TILES, tokens=tokens):
        other = with_tile(first, tile)
        tiles += [other, replace(other, row_groups=first.row_groups + 1)] if tile < first.token_tile else [other]
    shares = ((2, True), (1, False), (4, True), (2, False))
    alike = replace(first, narrow_tokens=0)
    clusters = [replace(alike, cluster=cluster, split_k=split_k) for cluster, split_k in shares]
    for config in _by_turns(cuts, tiles, _narrow(first, tokens), clusters):
        if config.row_groups <= _MOST_ROW_GROUPS and _can_run(config):
            try:
                yield with_stages(config)
            except ValueError:  # shared memory is too small
                continue


def _narrow(first: GemmConfig, tokens: int) -> Iterator[GemmConfig]:
    """Tiles for the fuller groups, with narrower matrix instructions for those up to the mean, or for what is left."""
    if first.num_groups == 1:
        return
    widths = W8A8_TILES if first.w8a8 else W8A16_TILES
    larger = [_with_fewer_rows(with_tile(first, width)) for width in widths if width > first.token_tile]
    for config in (first, *larger[:1]):
        least = tokens if tokens < config.token_tile else config.token_tile // 4
        narrow = next(width for width in widths if width >= least)
        if narrow < config.token_tile:
            yield replace(config, narrow_tokens=narrow)


def _with_fewer_rows(config: GemmConfig) -> GemmConfig:
    """As many as can run."""
    while config.row_groups > 1 and not _can_run(config):
        config = replace(config, row_groups=config.row_groups - 1)
    return config


def _can_run(config: GemmConfig) -> bool:
    """Whether registers hold the sums, and blocks of a cluster have whole pieces to share."""
    sums = config.token_tile // 2 * (1 + config.in_flight if config.w8a8 else 1)
    if sums + _OTHER_REGISTERS[config.w8a8] > (consumer_registers(config) or 255):
        return False
    if config.narrow_tokens and (config.split_k or config.stream_k):
        return False
    if config.cluster == 1:
        return not config.split_k
    if config.epilogue is not Epilogue.PLAIN:
        return False  # gate and up of a thread would end up in different blocks
    if config.split_k:
        return config.token_tile <= _LARGEST_SPLIT_TILE and config.token_tile % (4 * config.cluster) == 0
    return config.token_tile % (8 * config.cluster) == 0


def _near_sm100(first: Sm100Config, tokens: int, target: str) -> Iterator[Sm100Config]:
    free = free_fields(first)
    tiles = ({**free, "token_tile": tile} for tile in _neighbours(first.token_tile, TOKEN_TILES, tokens=tokens))
    pairs = ({**free, "pair": True, "split": 1}, {**free, "pair": False})
    splits = ({**free, "pair": False, "split": split} for split in range(1, MAX_SPLIT + 1) if split != 3)
    for values in _by_turns(tiles, pairs, splits):
        try:
            config = _filled(first, target=target, **values)
        except ValueError:  # memory is too small, or what it asks for doesn't go together
            continue
        if not config.pair or config.columns > ROWS:  # else the second block would have no rows
            yield config


def _filled(config: Sm100Config, *, target: str, token_tile: int, pair: bool, split: int) -> Sm100Config:
    shape = {name: getattr(config, name) for name in COMPUTED_SM100}
    return fill_up(shape, target=target, token_tile=token_tile, pair=bool(pair), split=split)


def _neighbours(tile: int, tiles: tuple[int, ...], *, tokens: int) -> list[int]:
    """The next two that are smaller, the next that is larger; none larger than what holds all tokens of a group."""
    enough = next((each for each in tiles if each >= tokens), tiles[-1])
    smaller = [each for each in reversed(tiles) if each < tile][:2]
    return smaller + [each for each in tiles if tile < each <= enough][:1]


def _by_turns(*kinds: Iterable) -> Iterator:
    """One of each kind, then the next of each: where the number is limited, no kind is left out."""
    for group in zip_longest(*kinds):
        yield from (each for each in group if each is not None)
