"""How launches are made by the size of a step: measured once, the slowest rank counts; every kernel is warm."""

import json
import sys
from pathlib import Path

import pytest
from exchange_cases import shape_of

sys.path.insert(0, str(Path(__file__).parents[1] / "memory"))
from rank_threads import run_ranks

from vllm_rose_plugin.kernels.dp_combine import config as combine
from vllm_rose_plugin.kernels.dp_dispatch import config as dispatch
from vllm_rose_plugin.kernels.dp_exchange.layout import MAX_BLOCKS
from vllm_rose_plugin.kernels.dp_exchange.table import KIND, Table, Tuning, Way, candidates, sizes

BROKEN = ([[1, "blocks", 3]], [[1, "threads", 1]], [[1, "blocks"]], [[1, "blocks", 1]], 5)
ONE, BLOCKS, WARPS = Tuning(Way.ONE_LAUNCH), Tuning(Way.BLOCKS, 2), Tuning(Way.WARPS, 4)


@pytest.fixture
def cache(monkeypatch, tmp_path):
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path))
    return tmp_path


def measured(times, situation="a GPU"):
    """(table, what was timed) of every rank, which takes `times[rank][way]` microseconds whatever the size."""

    def run(group):
        seen = []

        def time_us(tuning, size):
            seen.append((tuning, size))
            return times[group.rank][tuning.way] + size * 1e-3

        how = {"situation": situation, "sizes": (1, 8), "tunings": (ONE, BLOCKS, WARPS)}
        return KIND.measured(group=group, name="x", time_us=time_us, **how), seen

    values = run_ranks(len(times), run)
    for value in values:
        if isinstance(value, BaseException):
            raise value
    return values


FIRST = {Way.ONE_LAUNCH: 1.0, Way.BLOCKS: 5.0, Way.WARPS: 6.0}
SECOND = {Way.ONE_LAUNCH: 9.0, Way.BLOCKS: 4.0, Way.WARPS: 8.0}


def test_the_slowest_rank_counts_and_all_choose_alike(cache):
    (table, seen), (other, _) = measured([FIRST, SECOND])
    assert table == other == Table(((1, BLOCKS), (8, BLOCKS)))
    assert seen == [(tuning, size) for size in (1, 8) for tuning in (ONE, BLOCKS, WARPS)]


def test_it_is_measured_once_for_a_situation(cache):
    first = measured([FIRST, SECOND])[0][0]
    again, seen = measured([SECOND, SECOND])[0]
    assert again == first and not seen
    other, seen = measured([FIRST, FIRST], "another GPU")[0]
    assert other == Table(((1, ONE), (8, ONE))) and seen


@pytest.mark.parametrize(
    "content", ["", "{", "[]", *(json.dumps({"situation": "a GPU", "rows": rows}) for rows in BROKEN)]
)
def test_a_broken_file_is_measured_again(cache, content):
    measured([FIRST, SECOND])
    (path,) = cache.rglob("dp_exchange/*.json")
    path.write_text(content)
    table, seen = measured([SECOND, SECOND])[0]
    assert seen and table == Table(((1, BLOCKS), (8, BLOCKS)))


def test_a_step_has_the_row_of_the_next_larger_size():
    table = Table(((1, ONE), (8, BLOCKS)))
    assert [table.lookup(n) for n in (1, 2, 8, 9)] == [ONE, BLOCKS, BLOCKS, None]
    assert sizes(1) == (1,) and sizes(8) == (1, 2, 4, 8) and sizes(9) == (1, 2, 4, 8, 9)


@pytest.mark.parametrize("sm_count", [1, 132])
@pytest.mark.parametrize("max_tokens", [7, 600, 8192])
@pytest.mark.parametrize("group_size", [2, 24, 72])
@pytest.mark.parametrize("hidden_size", [32, 4096, 7168])
def test_no_row_of_a_table_needs_a_kernel_that_was_not_warmed_up(hidden_size, group_size, max_tokens, sm_count):
    max_tokens = min(max_tokens, shape_of(group_size).most_tokens)
    shape = shape_of(group_size, hidden_size=hidden_size, max_tokens=max_tokens)
    how, rows = {"shape": shape, "sm_count": sm_count}, group_size * max_tokens
    for warmed, choose, most in (
        (dispatch.send_sizes, lambda n, **t: dispatch.choose_send(num_tokens=n, input="mxfp8", **how, **t), max_tokens),
        (dispatch.receive_sizes, lambda n, **t: dispatch.choose_receive(total_rows=n, **how, **t), rows),
        (combine.send_sizes, lambda n, **t: combine.choose_send(total_rows=n, **how, **t), rows),
        (combine.receive_sizes, lambda n, **t: combine.choose_receive(num_tokens=n, **how, **t), max_tokens),
    ):
        warm = {
            choose(n, tuning=tuning)[0] for n in warmed(shape, sm_count) for tuning in dispatch.tunings_to_warm(True)
        }
        assert len(warm) <= 3
        for tuning in (None, *candidates()):
            for n in {1, 2, 5, 100, 1055, 1056, 1057, 4000, most} & set(range(1, most + 1)):
                config, blocks = choose(n, tuning=tuning)
                assert config in warm and 1 <= blocks <= min(n, MAX_BLOCKS)
                if hasattr(config, "input"):
                    assert blocks + group_size <= MAX_BLOCKS
                elif isinstance(config, dispatch.ReceiveConfig | combine.ReceiveConfig):
                    assert blocks * config.threads <= sm_count * 1024


@pytest.mark.parametrize("share", [1, 2, 4])
@pytest.mark.parametrize("sm_count", [1, 24, 132])
def test_one_launch_of_any_step_fits_on_the_device_at_once(share, sm_count):
    shape = shape_of(72, hidden_size=4096, max_tokens=2048)
    tuning = Tuning(Way.ONE_LAUNCH, share)
    for tokens in (1, 40, 2048):
        step = {"num_tokens": tokens, "total_rows": 72 * tokens, "shape": shape, "sm_count": sm_count}
        sending = dispatch.choose_fused(input="bfloat16", tuning=tuning, **step)
        adding = combine.choose_fused(tuning=tuning, **step)
        assert (sending is None) == (sm_count <= 72), "the plans' blocks alone fill it"
        for _, blocks in filter(None, (sending, adding)):
            assert blocks <= sm_count, "each has an SM to itself, whatever registers it takes"
        assert sending is None or sending[1] > 72, "nobody would send tokens"
        assert dispatch.choose_fused(input="bfloat16", tuning=Tuning(Way.BLOCKS, share), **step) is None
        assert combine.choose_fused(tuning=Tuning(Way.WARPS, share), **step) is None
