"""Stream-K without a GPU: who has which work, and that flags and sums find each other in any order of events."""

import random
import threading
import time
from dataclasses import replace

import pytest
import torch
from launch_emulation import emulated

from vllm_rose_plugin.kernels.contracts import Activation, Mxfp8Tensor, TokenFormat
from vllm_rose_plugin.kernels.gemm import launch, one_run, plan, workspace
from vllm_rose_plugin.kernels.gemm.call import Call
from vllm_rose_plugin.kernels.gemm.choose import choose_config
from vllm_rose_plugin.kernels.gemm.config import Epilogue, with_stages
from vllm_rose_plugin.kernels.gemm.plan import warm_configs
from vllm_rose_plugin.kernels.gemm.stream_k import MOST_UNITS, Part, parts_of, range_of, share_of
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8

BF16 = TokenFormat.BF16_PERMUTED


def stream_k_config(**how):
    chosen = choose_config(num_groups=1, n=9216, k=4096, num_rows=512, token_format=BF16, early_counts=True)
    return with_stages(replace(chosen, cluster=1, split_k=False, stream_k=True, **how))


# ---- who has what ----


def assert_shared_well(*, blocks: int, tiles: int, passes: int) -> None:
    walks = [parts_of(block=b, blocks=blocks, tiles=tiles, passes=passes) for b in range(blocks)]
    done = [[0] * passes for _ in range(tiles)]
    given: dict[int, list[tuple[int, Part]]] = {}
    for block, walk in enumerate(walks):
        assert sum(part.num_passes for part in walk) <= -(-tiles * passes // blocks), "a longer share than needed"
        for place, part in enumerate(walk):
            assert part.num_passes >= 1 and part.first_pass >= 0
            for k in range(part.first_pass, part.first_pass + part.num_passes):
                done[part.tile][k] += 1
            if part.ends_early(passes):
                assert place == 0, "sums are handed over before a block waits for any, and once"
                given.setdefault(part.tile, []).append((block, part))
    assert all(times == 1 for tile in done for times in tile)
    for block, walk in enumerate(walks):
        for place, part in enumerate(walk):
            if part.ends_early(passes):
                continue
            assert (part.others > 0) == (part.first_pass > 0)
            assert part.others == 0 or place == len(walk) - 1, "a block waits at its end only"
            from_others = given.pop(part.tile, [])
            assert [b for b, _ in from_others] == list(range(block - part.others, block))
            at = 0
            for _, other in from_others:
                assert other.first_pass == at
                at += other.num_passes
            assert at == part.first_pass
    assert not given, "handed over to nobody: a flag would stay raised"


@pytest.mark.parametrize("blocks", [1, 2, 3, 5, 8, 13, 132])
@pytest.mark.parametrize("passes", [1, 2, 3, 7, 16, 32])
def test_every_pass_of_every_tile_is_done_once(blocks, passes):
    for tiles in (*range(0, 2 * blocks + 4), 5 * blocks - 1, 9 * blocks + 1):
        assert_shared_well(blocks=blocks, tiles=tiles, passes=passes)


def test_shares_of_real_layers():
    for n, k in ((9216, 4096), (4096, 8192), (2304, 4096), (4096, 2048), (32, 32)):
        for rows, tokens, pass_k in ((128, 256, 256), (128, 128, 256), (192, 64, 128), (128, 64, 128)):
            for m in (1, 63, 64, 65, 200, 512, 1000, 4096):
                tiles, passes = -(-n // rows) * -(-m // tokens), -(-k // pass_k)
                assert_shared_well(blocks=132, tiles=tiles, passes=passes)


def test_the_device_counts_as_the_host_does():
    """Int32 of the DSL, on the CPU, up to the most units there may be."""
    cutlass = pytest.importorskip("cutlass")
    import stream_k_on_device
    from cutlass.cute.runtime import from_dlpack

    for blocks, passes in ((132, 16), (7, 5), (132, 1)):
        most = MOST_UNITS // passes
        for tiles in (1, 3, 131, 132, 500, most - 1, most):
            units = tiles * passes
            share = share_of(units=units, blocks=blocks)
            out = torch.zeros((blocks, 8), dtype=torch.int32)
            stream_k_on_device.first_parts(from_dlpack(out), cutlass.Int32(units), cutlass.Int32(blocks), passes)
            for block, found in enumerate(out.tolist()):
                first, end = range_of(block=block, share=share, units=units)
                assert found[:2] == [first, end]
                if end > first:
                    expected = stream_k_on_device.last_part(
                        first=first, end=end, block=block, share=share, passes=passes
                    )
                    assert found[2:6] == list(expected) and found[6] == expected.ends_early(passes)


# ---- flags ----


class Machine:
    """Blocks as threads: they start in order, at most `slots` run, and a launch starts while the one before it runs."""

    def __init__(self, *, blocks: int, slots: int, seed: int):
        self.blocks, self.slots = blocks, threading.Semaphore(slots)
        self.flags = [0] * blocks
        self.random = random.Random(seed)
        self.faults: list[str] = []

    def pause(self) -> None:
        time.sleep(self.random.choice((0, 0, 0, 1e-4, 3e-4)))

    def expect(self, right: bool, fault: str) -> None:
        if not right:
            self.faults.append(fault)

    def run(self, launches: list[tuple[int, int]]) -> list[list]:
        """The results of launches of (tiles, passes): for each tile, the order in which its passes were added."""
        ended = [threading.Event() for _ in launches]
        results: list[list] = [[None] * tiles for tiles, _ in launches]
        threads = []
        for number, (tiles, passes) in enumerate(launches):
            partials: list = [None] * self.blocks
            left = list(range(self.blocks))
            for block in range(self.blocks):
                self.slots.acquire()

                def body(number=number, block=block, tiles=tiles, passes=passes, partials=partials, left=left):
                    if number:
                        ended[number - 1].wait()  # griddepcontrol.wait
                    for part in parts_of(block=block, blocks=self.blocks, tiles=tiles, passes=passes):
                        self.part(block, part, passes, partials, results[number])
                    if left.pop() == 0:  # the last one
                        self.expect(not any(self.flags), f"launch {number} left flags raised")
                        ended[number].set()
                    self.slots.release()

                threads.append(threading.Thread(target=body, daemon=True))
                threads[-1].start()
                self.pause()
        for thread in threads:
            thread.join(timeout=20)
        assert not any(thread.is_alive() for thread in threads), "blocks wait for each other"
        return results

    def part(self, block: int, part: Part, passes: int, partials: list, result: list) -> None:
        self.pause()
        sums = [(block, k) for k in range(part.first_pass, part.first_pass + part.num_passes)]
        if part.ends_early(passes):
            self.expect(partials[block] is None and self.flags[block] == 0, f"block {block} handed over twice")
            partials[block] = sums
            self.pause()
            self.flags[block] = 1
            return
        for other in range(block - part.others, block):
            deadline = time.monotonic() + 20
            while self.flags[other] == 0 and time.monotonic() < deadline:
                self.pause()
            self.flags[other] = 0
        for other in range(block - part.others, block):
            sums = sums + (partials[other] or [])
        self.expect(result[part.tile] is None, f"tile {part.tile} was written twice")
        result[part.tile] = sums


@pytest.mark.parametrize("slots", [1, 2, 5, 9])
def test_flags_of_launch_after_launch(slots):
    launches = [(4, 5), (7, 3), (1, 5), (2, 2), (0, 3), (30, 2), (4, 5), (11, 4), (1, 1), (4, 5)]
    found = []
    for seed in range(4):
        machine = Machine(blocks=9, slots=slots, seed=seed)
        results = machine.run(launches)
        assert not machine.faults
        for (_, passes), result in zip(launches, results, strict=True):
            for sums in result:
                assert sorted(k for _, k in sums) == list(range(passes))
        assert results[0] == results[6] == results[9], "the order of a sum depends on the launch"
        found.append(results)
    assert all(results == found[0] for results in found), "the order of a sum depends on what came first"


# ---- configs ----


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (dict(cluster=2), "single blocks"),
        (dict(cluster=2, split_k=True), "single blocks"),
        (dict(blocks_per_sm=2), "single blocks"),
        (dict(num_groups=2), "single weight"),
        (dict(epilogue=Epilogue.SWIGLU), "single weight"),
    ],
)
def test_what_stream_k_refuses(wrong, message):
    config = stream_k_config()
    with pytest.raises(ValueError, match=message):
        replace(config, **wrong)


def test_where_it_is_chosen():
    def of(m, n=9216, k=4096, **how):
        return choose_config(num_groups=1, n=n, k=k, num_rows=m, token_format=BF16, **how)

    assert all(of(m).stream_k for m in (64, 128, 256, 512, 1024)), "where it measured fastest"
    assert all(of(m, n=4096, k=8192).stream_k for m in (64, 128, 256, 512)) and of(512, n=2304).stream_k
    assert not of(4096).stream_k and not of(512, n=4096, k=2048).stream_k, "tiles fit, or nothing is gained"
    assert not of(1024, n=4096, k=8192).stream_k, "one wave of whole tiles"
    assert all(of(m).grid(132) == 132 for m in (128, 512))
    assert not any(of(m, batch_invariant=True).stream_k for m in range(1, 1200, 7))


def test_batch_invariant_calls_do_without():
    """Where tiles are cut follows from the number of tokens, and so would a row's bits."""
    how = dict(target="sm_90a", sm_count=132, num_groups=1, n=9216, k=4096)
    for rows in (64, 128, 512):
        call = Call(**how, token_format=BF16, batch_invariant=True)
        assert not plan.plan(call, expected_rows=rows, num_rows=rows).config.stream_k
    for invariant in (False, True):
        found = warm_configs(**how, max_rows=1024, activation=Activation.MXFP8, batch_invariant=invariant)
        assert any(config.stream_k for config in found) != invariant


def test_too_many_units_are_refused():
    config = stream_k_config(token_tile=64, k_tile=128, pass_k=128)
    config.check_units(2**20)
    with pytest.raises(ValueError, match="must be at most"):
        config.check_units(2**26)


# ---- memory ----


def test_workspace_of_streams_and_captures(monkeypatch):
    device = torch.device("cpu")
    with emulated(monkeypatch) as seen:

        def flags() -> torch.Tensor:
            partials, found = workspace.stream_k_workspace(device, blocks=132, handed_over=64)
            assert partials.shape == (132, 64) and found.shape == (132,) and not found.any()
            return found

        seen.capturing = True
        first, second = flags(), flags()
        assert first.data_ptr() != second.data_ptr() and not workspace._flags, "zeroed in every replay, kept by nobody"
        seen.capturing = False
        eager = flags()
        assert eager.data_ptr() == flags().data_ptr()
        seen.capturing = True
        captured = flags()
        assert captured.data_ptr() == flags().data_ptr() != eager.data_ptr(), "a replay may meet a launch"
        seen.stream = 8
        other = flags()
        assert other.data_ptr() not in (captured.data_ptr(), eager.data_ptr())
        rows = workspace._flags[device].rows
        assert all((found.data_ptr() - rows.data_ptr()) % 128 == 0 for found in (eager, captured, other))
        for seen.stream in range(100, 100 + workspace._ROWS):
            found = flags()
        assert found.data_ptr() != flags().data_ptr(), "no row left: zeroed for every launch"
        assert not rows.any()


def test_launches_bring_their_workspace(monkeypatch):
    config = stream_k_config(n=192, k=544, token_tile=64, k_tile=128, pass_k=128, bias=False)
    x = torch.randn(200, 544, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)
    weight = Mxfp8Tensor(*quantize_mxfp8(torch.randn(192, 544, generator=torch.Generator().manual_seed(1))))
    with emulated(monkeypatch) as seen:
        packed = pack_weight(weight, target="sm_90a")
        expected = launch.linear(x, packed)
        assert not seen.flags
        monkeypatch.setattr(plan, "heuristic", lambda call, rows: config)
        launch._kernel.cache_clear()
        outs = [launch.linear(x, packed) for _ in range(2)]
        assert all(torch.equal(out, expected) for out in outs)
        assert len(seen.flags) == 2 and seen.flags[0].data_ptr() == seen.flags[1].data_ptr()
        one_run.prepare_device(packed.codes.device, max_rows=10)
        assert list(workspace._flags) == [packed.codes.device]
