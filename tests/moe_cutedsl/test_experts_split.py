"""A layer of experts whose weights lie in parts, with emulated kernels: bits of whole weights, and what is launched."""

from dataclasses import replace

import pytest
import torch
from experts_emulation import EmulatedStreams, aligned_bytes, emulated
from test_experts_launch import SHAPE, TARGETS

from vllm_rose_plugin.kernels.gemm import plan
from vllm_rose_plugin.kernels.gemm.column_split import plan_split, split_packed
from vllm_rose_plugin.kernels.gemm.forked_gemm import Forked, gemm_launches, swiglu_launches
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.kernels.jit.providers import NoProviderError
from vllm_rose_plugin.kernels.moe_experts import family, launch, ops, ways
from vllm_rose_plugin.kernels.moe_experts.compare_ways import WHOLE, Comparison, compare_ways, family_of, ways_of
from vllm_rose_plugin.kernels.moe_experts.family import by_rose, make_inputs, run_kernels
from vllm_rose_plugin.kernels.moe_experts.ways import OneLaunch, Ways

PARTS = replace(SHAPE, hidden_size=256, intermediate_size=256)
"""Two parts everywhere, four on sm_90."""
WAYS = [("sm_90a", "forked"), ("sm_100a", "forked"), ("sm_90a", "one")]


def forked(seen, parts=2, *, sm_counts=(64, 62), clusters=True):
    return Forked(EmulatedStreams(parts, seen), sm_counts, clusters)


def one_launch(parts=2):
    return OneLaunch(torch.arange(132, dtype=torch.int32) % parts)


def splits_of(shape, target, parts):
    """Of w13 and w2."""
    return (
        plan_split(n=2 * shape.intermediate_size, parts=parts, target=target, gate_up=True),
        plan_split(n=shape.hidden_size, parts=parts, target=target),
    )


def parts_of(shape, target, inputs, parts):
    """(w13, w2), each as a list."""
    splits = splits_of(shape, target, parts)
    packed = pack_weight(inputs.w13, target=target, gate_up=True), pack_weight(inputs.w2, target=target)
    return [
        split_packed(
            split, weight, lambda _, size, dtype: aligned_bytes(torch.Size(size).numel()).view(dtype).view(size)
        )
        if split.parts > 1
        else [weight]
        for split, weight in zip(splits, packed, strict=True)
    ], packed


def bits(tensor):
    return tensor.view(torch.int16)


@pytest.fixture
def gpu_memory(monkeypatch):
    """As aligned as a GPU's."""
    empty = torch.empty

    def new_memory(*size, **how):
        one = len(size) == 1 and isinstance(size[0], int) and how.get("dtype") is torch.uint8
        return aligned_bytes(*size) if one else empty(*size, **how)

    monkeypatch.setattr(torch, "empty", new_memory)


@pytest.mark.parametrize("num_tokens", [1, 9, 130])
@pytest.mark.parametrize(("target", "way"), WAYS)
def test_the_bits_of_whole_weights(monkeypatch, gpu_memory, target, num_tokens, way):
    shape = replace(PARTS, num_tokens=num_tokens)
    inputs = make_inputs(shape, num_tokens)  # some experts have no tokens, one token is NaN
    parts, whole = parts_of(shape, target, inputs, 2)
    with emulated(monkeypatch, target) as seen:
        expected = run_kernels(shape, inputs, whole[:1], whole[1:])
        seen.launches.clear()
        seen.streams.clear()
        found = run_kernels(shape, inputs, *parts, way=forked(seen) if way == "forked" else one_launch())
    assert torch.equal(bits(found), bits(expected))
    if way == "one":
        assert seen.names() == ["route_and_dispatch", "w13", "w2", "combine"] and seen.streams == [None, None]
        return
    assert seen.names() == ["route_and_dispatch", "w13", "w13", "w2", "w2", "combine"], "shared work is done once"
    assert seen.streams == [0, 1, 0, 1]
    assert [(config.n, config.out_columns) for _, config, _ in seen.launches[1:5]] == 2 * [(256, 256)] + 2 * [
        (128, 256)
    ]


@pytest.mark.parametrize("split", ["w13", "w2"])
@pytest.mark.parametrize(("target", "way"), WAYS)
def test_one_of_the_weights_is_whole(monkeypatch, gpu_memory, target, split, way):
    """As with TP4, where a half of w13 is no multiple of a tile."""
    inputs = make_inputs(PARTS, 2)
    parts, whole = parts_of(PARTS, target, inputs, 2)
    parts = (parts[0], whole[1:]) if split == "w13" else (whole[:1], parts[1])
    with emulated(monkeypatch, target) as seen:
        expected = run_kernels(PARTS, inputs, whole[:1], whole[1:])
        seen.streams.clear()
        found = run_kernels(PARTS, inputs, *parts, way=forked(seen) if way == "forked" else one_launch())
    assert torch.equal(bits(found), bits(expected))
    if way == "forked":
        assert seen.streams == ([0, 1, None] if split == "w13" else [None, 0, 1])


def test_four_parts_and_no_tokens(monkeypatch, gpu_memory):
    inputs = make_inputs(PARTS, 2)
    parts, whole = parts_of(PARTS, "sm_90a", inputs, 4)
    nobody = inputs._replace(topk_ids=torch.full_like(inputs.topk_ids, -1))
    with emulated(monkeypatch) as seen:
        way = forked(seen, 4, sm_counts=(32, 32, 30, 24), clusters=False)
        expected = run_kernels(PARTS, inputs, whole[:1], whole[1:])
        assert torch.equal(bits(run_kernels(PARTS, inputs, *parts, way=way)), bits(expected))
        assert (run_kernels(PARTS, nobody, *parts, way=way) == 0).all()
        none = replace(PARTS, num_tokens=0)
        empty = make_inputs(replace(PARTS, num_tokens=1), 1)
        empty = empty._replace(x=empty.x[:0], topk_ids=empty.topk_ids[:0], topk_weights=empty.topk_weights[:0])
        assert run_kernels(none, empty, *parts, way=way).shape == (0, 256)


@pytest.mark.parametrize("target", TARGETS)
def test_every_config_of_a_call_is_warmed_up(monkeypatch, gpu_memory, target):
    """Of parts, for each way."""
    compiled, used = set(), set()
    shape = replace(PARTS, num_tokens=300)
    inputs = make_inputs(shape, 2)
    parts, _ = parts_of(shape, target, inputs, 2)
    with emulated(monkeypatch, target) as seen:
        both = [forked(seen), forked(seen, sm_counts=(66, 66), clusters=False)]
        if target == "sm_90a":
            both.append(one_launch())
        with monkeypatch.context() as patch:
            for module in ("dispatch", "combine"):
                patch.setattr(getattr(launch, module), "warm_up", lambda **how: None)
            patch.setattr(plan, "compile_config", lambda config, *, target: compiled.add(config))
            launch.warm_up(
                device=torch.device("cpu"), hidden_size=256, intermediate_size=256, num_local_experts=4, num_experts=4,
                top_k=2, max_tokens=300, dtype=torch.bfloat16, has_map=False, activation=shape.activation,
                rounding=shape.rounding, ways=both, parts=(2, 2),
            )  # fmt: skip
        for tokens in (1, 3, 8, 17, 60, 130, 300):
            seen.launches.clear()
            some = replace(shape, num_tokens=tokens)
            for way in both:
                run_kernels(some, make_inputs(some, 1), *parts, way=way)
            used |= {config for name, config, _ in seen.launches if name in ("w13", "w2")}
    assert used <= compiled and len(used) > 4


def test_what_does_not_fit(monkeypatch, gpu_memory):
    inputs = make_inputs(PARTS, 2)
    parts, whole = parts_of(PARTS, "sm_90a", inputs, 2)
    with emulated(monkeypatch) as seen:
        with pytest.raises(ValueError, match="w13 in 2 and w2 in 1 parts need a way"):
            run_kernels(PARTS, inputs, parts[0], whole[1:])
        with pytest.raises(ValueError, match="2 parts for 3 streams on 2 partitions"):
            run_kernels(PARTS, inputs, *parts, way=forked(seen, 3))
        with pytest.raises(ValueError, match="w13 must be"):
            run_kernels(PARTS, inputs, parts[0][:1], parts[1], way=forked(seen))
        assert "w13" not in seen.names()


def test_launches_check_their_output(monkeypatch, gpu_memory):
    inputs = make_inputs(PARTS, 2)
    parts, _ = parts_of(PARTS, "sm_90a", inputs, 2)
    runs = {"expert_offsets": torch.arange(5, dtype=torch.int32), "expert_counts": torch.ones(4, dtype=torch.int32)}
    from vllm_rose_plugin.kernels.contracts import TokenFormat
    from vllm_rose_plugin.kernels.gemm.tokens import pack_tokens

    tokens = pack_tokens(torch.randn(4, 256), token_format=TokenFormat.MXFP8_FP32_SCALES)
    with emulated(monkeypatch) as seen:
        way = forked(seen)
        with pytest.raises(TypeError, match=r"bf16 or fp16, got torch\.float32"):
            gemm_launches(tokens, parts[1], forked=way, out=torch.zeros(4, 256), **runs)
        with pytest.raises(ValueError, match="parts must be alike and packed with gate_up=False"):
            gemm_launches(tokens, parts[0], forked=way, out=torch.zeros(4, 256).bfloat16(), **runs)
        with pytest.raises(ValueError, match="out must be contiguous"):
            gemm_launches(tokens, parts[1], forked=way, out=torch.zeros(4, 128).bfloat16(), **runs)
        with pytest.raises(ValueError, match="4 rows of 256, got 4 rows of 128"):
            short = pack_tokens(torch.randn(4, 128), token_format=TokenFormat.MXFP8_FP32_SCALES)
            swiglu_launches(tokens, parts[0], forked=way, out=short, **runs)


def test_ways_by_number_of_tokens():
    a, b, c = (one_launch() for _ in range(3))
    chosen = ways_of(["a", "a", "b", "a", "c"], [1, 8, 64, 512, 4096], {"a": a, "b": b, "c": c})
    assert chosen.names == ("a", "b", "a", "c") and chosen.up_to == (8, 64, 512)
    found = [chosen.at(tokens) for tokens in (1, 8, 9, 64, 65, 512, 513, 10**6)]
    assert [way is each for way, each in zip(found, (a, a, b, b, a, a, c, c), strict=True)] == [True] * 8
    with pytest.raises(ValueError, match="can't be told apart"):
        Ways(("a", "b"), (a, b), ())
    with pytest.raises(ValueError, match="can't be told apart"):
        Ways(("a", "b", "c"), (a, b, c), (8, 1))


def test_names_are_found_and_stay(monkeypatch):
    monkeypatch.setattr(ways, "_registered", {})
    first, second = Ways(("a",), (one_launch(),)), Ways(("a",), (one_launch(),))
    ways.register("x", first)
    ways.register("x", second)  # another engine of the process that chose alike
    assert ways.registered("x") is first
    with pytest.raises(ValueError, match="registered as 'y'; there are x"):
        ways.registered("y")


def test_the_op(monkeypatch, gpu_memory):
    """It finds the way by name and number of tokens, and has no reference."""
    monkeypatch.setattr(ways, "_registered", {})
    inputs = make_inputs(PARTS, 2)
    parts, whole = parts_of(PARTS, "sm_90a", inputs, 2)
    with emulated(monkeypatch) as seen:
        expected = by_rose(PARTS)(*inputs._replace(packed=whole))
        ways.register("few forked", Ways(("default", "single_launch"), (forked(seen), one_launch()), (8,)))
        out = torch.empty(9, 256, dtype=torch.bfloat16)
        arguments = [[getattr(part, kind) for part in weight] for weight in parts for kind in ("codes", "scales")]
        arguments = [
            [part.view(torch.float8_e4m3fn) if i % 2 == 0 else part for part in a] for i, a in enumerate(arguments)
        ]
        size = 2**20

        def call(tokens):
            torch.ops.rose.moe_experts_split(
                inputs.x[:tokens], inputs.topk_ids[:tokens], inputs.topk_weights[:tokens], *arguments,
                ways="few forked", out=out[:tokens], workspace=aligned_bytes(size),
                route_workspace=torch.zeros(2**14, dtype=torch.int32), num_experts=4,
            )  # fmt: skip
            return seen.names()

        assert call(9).count("w13") == 2  # whole, then one launch
        assert torch.equal(bits(out), bits(expected))
        assert call(8).count("w13") == 4
        with monkeypatch.context() as patch:
            patch.setattr(ops.chosen, "provider", lambda name, x: "reference")
            with pytest.raises(
                RuntimeError, match=r'by rose only, the self-check chose reference: .*"locality": "off"'
            ):
                call(8)


class Memory:
    """Parts in torch's memory, counted."""

    def __init__(self, sizes, alive):
        self.parts, self.alive = [aligned_bytes(size) for size in sizes], alive
        alive.append(self)

    def tensor(self, part, *, shape, dtype, offset):
        return self.parts[part][offset : offset + torch.Size(shape).numel()].view(dtype).view(shape)

    def free(self):
        self.alive.remove(self)


class FakeDomains:
    count, forced = 2, True

    def __init__(self):
        self.alive, self.most = [], 0

    def allocate(self, sizes):
        self.most = max(self.most, 1 + len(self.alive))
        return Memory(sizes, self.alive)


def compared(monkeypatch, tmp_path, ways_to_try, *, checked=(), **times):
    """A comparison whose times are given; memory that it took is back."""
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    domains = FakeDomains()

    def shape_of(tokens):
        return replace(PARTS, num_tokens=tokens, captured=False)

    real = make_inputs

    def inputs_of(shape, seed):
        made = real(shape, seed)
        return made._replace(packed=parts_of(shape, "sm_90a", made, 1)[1])

    from vllm_rose_plugin.kernels.moe_experts import compare_ways as module

    monkeypatch.setattr(module, "make_inputs", inputs_of)
    called = []

    def timer(call):
        call()
        call()
        name = getattr(call.func, "way", WHOLE)
        called.append(name)
        key = next((k for k, way in ways_to_try.items() if way is name), WHOLE)
        if key not in times:
            raise RuntimeError("operation not permitted when stream is capturing")
        return times[key]

    found = compare_ways(
        shape_of=shape_of, tokens=(1, 9), ways=ways_to_try, splits=splits_of(PARTS, "sm_90a", 2), domains=domains,
        checked=checked, timer=timer,
    )  # fmt: skip
    assert domains.alive == [] and domains.most <= 2
    return found


def test_ways_are_checked_and_timed(monkeypatch, gpu_memory, tmp_path):
    with emulated(monkeypatch) as seen:
        tried = {"default": forked(seen), "single_launch": one_launch()}
        found = compared(monkeypatch, tmp_path, tried, whole=12.0, default=10.0, single_launch=8.0)
    assert found.microseconds == {"default": [10.0] * 2, "single_launch": [8.0] * 2, WHOLE: [12.0] * 2}
    assert found.best() == ("single_launch",) * 2 and found.failed == {}
    assert found.gain(found.best()) == pytest.approx(1.5)


@pytest.mark.parametrize("captured", [False, True])
def test_each_call_that_is_timed_reads_other_experts(monkeypatch, gpu_memory, tmp_path, captured):
    """The same ones would come from the L2 cache, however far their memory lies. All ways read the same."""
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    from vllm_rose_plugin.kernels.moe_experts import compare_ways as module

    ids: dict[object, list] = {}
    now = [None]

    def run(shape, given, *weights, way=None):
        ids.setdefault((now[0], shape.num_tokens), []).append(given.topk_ids)
        return torch.zeros(1)

    def time(call):
        now[0] = len({name for name, _ in ids if name is not None})
        for _ in range(16):
            call()
        now[0] = None
        return 1.0

    real = make_inputs
    monkeypatch.setattr(module, "_bits_differ", lambda result, expected: "")
    monkeypatch.setattr(module, "make_inputs", lambda s, seed: real(s, seed)._replace(packed=(None, None)))
    monkeypatch.setattr(module._OnParts, "place", lambda self, given: None)
    for where in (module, family):
        monkeypatch.setattr(where, "run_kernels", run)
    monkeypatch.setattr(module, "time_in_graph" if captured else "time_on_gpu", time)
    shape = replace(PARTS, num_local_experts=16, num_experts=64, captured=captured)
    compare_ways(
        shape_of=lambda tokens: replace(shape, num_tokens=tokens), tokens=(1, 9), ways={"default": one_launch()},
        splits=splits_of(PARTS, "sm_90a", 2), domains=FakeDomains(),
    )  # fmt: skip
    timed = {key: calls for key, calls in ids.items() if key[0] is not None}
    assert len(timed) == 4 and all(len(calls) == 16 for calls in timed.values())
    for tokens in (1, 9):
        calls, others = (found for (_, count), found in timed.items() if count == tokens)
        assert all(torch.equal(a, b) for a, b in zip(calls, others, strict=True))
        assert len({tuple(each.flatten().tolist()) for each in calls}) == 16
        assert all(
            each.dtype == torch.int32 and len(set(row)) == len(row) for each in calls for row in each[:3].tolist()
        )
        if tokens == 1:
            assert len(set(torch.cat(calls).flatten().tolist())) > 4 * shape.top_k
        else:
            assert all((each[-1] == -1).all() and each[-2, 0] == 64 + 3 for each in calls), "nobody's stay nobody's"


def test_a_verdict_holds_for_what_was_tuned(monkeypatch, gpu_memory, tmp_path):
    """Whole weights may be faster with other configs, or with other numbers of tokens in one launch."""
    with emulated(monkeypatch) as seen:
        tried = {"default": forked(seen)}
        first = compared(monkeypatch, tmp_path, tried, whole=12.0, default=10.0)
        assert compared(monkeypatch, tmp_path, tried, whole=1.0, default=10.0) == first, "by the verdict on disk"
        monkeypatch.setattr(family.tuned, "digest", lambda: "another table")
        tuned = compared(monkeypatch, tmp_path, tried, whole=9.0, default=10.0)
        monkeypatch.setattr(family.threshold, "digest", lambda: "another threshold")
        lowered = compared(monkeypatch, tmp_path, tried, whole=8.0, default=10.0)
    assert [each.microseconds[WHOLE] for each in (first, tuned, lowered)] == [[12.0] * 2, [9.0] * 2, [8.0] * 2]


class WrongFrom(EmulatedStreams):
    """Leaves out a part where there are so many rows."""

    def __init__(self, parts, seen, *, rows):
        super().__init__(parts, seen)
        self.rows = rows

    def run(self, *rounds):
        rows = next(rows for name, _, rows in reversed(self.seen.launches) if name == "route_and_dispatch")
        super().run(*(launches[:1] if rows >= self.rows else launches for launches in rounds))


def test_a_way_with_other_bits_is_not_used(monkeypatch, gpu_memory, tmp_path):
    """Here the parts change places."""

    class Swapped(EmulatedStreams):
        def run(self, *rounds):
            for launches in rounds:
                launches[0]()

    with emulated(monkeypatch) as seen:
        wrong = Forked(Swapped(2, seen), (64, 64), True)
        tried = {"default": wrong, "single_launch": one_launch()}
        found = compared(monkeypatch, tmp_path, tried, whole=12.0, default=1.0, single_launch=13.0)
    assert "other bits than whole weights give" in found.failed["default"]
    assert found.best() == ("single_launch",) * 2 and found.gain(found.best()) < 1


def test_a_way_with_other_bits_where_it_is_not_timed_is_not_used(monkeypatch, gpu_memory, tmp_path):
    """As if the kernel that serves 17 tokens and more of a part were wrong."""

    with emulated(monkeypatch) as seen:
        tried = {"default": Forked(WrongFrom(2, seen, rows=17 * PARTS.top_k), (64, 64), True)}
        tried["single_launch"] = one_launch()
        unseen = compared(monkeypatch, tmp_path, tried, whole=12.0, default=1.0, single_launch=9.0)
        found = compared(monkeypatch, tmp_path, tried, checked=(17,), whole=12.0, default=1.0, single_launch=9.0)
    assert unseen.failed == {} and unseen.best() == ("default",) * 2
    assert "num_tokens=17" in found.failed["default"] and found.best() == ("single_launch",) * 2
    assert found.microseconds == {"single_launch": [9.0] * 2, WHOLE: [12.0] * 2}, "17 tokens aren't timed"


@pytest.mark.parametrize("target", TARGETS)
def test_the_configs_that_are_looked_up_are_those_that_are_launched(monkeypatch, gpu_memory, target):
    """So that a check at one number of tokens for each runs every kernel of parts that a step can launch."""
    inputs = make_inputs(PARTS, 2)
    parts, _ = parts_of(PARTS, target, inputs, 2)
    several = set()
    with emulated(monkeypatch, target) as seen:
        ways_to_try = {
            "default": forked(seen),
            "backfill": forked(seen, sm_counts=(66, 66), clusters=False),
        }
        if target == "sm_90a":
            ways_to_try["single_launch"] = one_launch()
        candidates = family_of(ways=ways_to_try, splits=splits_of(PARTS, target, 2), domains=FakeDomains())
        sm_count = launch.device_facts(0).sm_count
        for tokens in (1, 3, 8, 17, 60, 130, 300):
            some = replace(PARTS, num_tokens=tokens)
            looked_up = candidates.config_of(some, target, sm_count)
            for way, expected in zip(ways_to_try.values(), looked_up, strict=True):
                seen.launches.clear()
                run_kernels(some, make_inputs(some, 1), *parts, way=way)
                launched = [config for name, config, _ in seen.launches if name in ("w13", "w2")]
                assert tuple(dict.fromkeys(launched)) == expected
            several.add(looked_up)
    assert len(several) > 1


def test_a_way_that_raises_while_it_is_timed_is_not_used(monkeypatch, gpu_memory, tmp_path):
    """It may run call by call and not in a graph. Its parts' memory is given back."""
    with emulated(monkeypatch) as seen:
        tried = {"default": forked(seen), "single_launch": one_launch()}
        found = compared(monkeypatch, tmp_path, tried, whole=12.0, single_launch=8.0)
    assert found.failed == {
        "default": "while it was timed: RuntimeError: operation not permitted when stream is capturing"
    }
    assert found.best() == ("single_launch",) * 2


def test_nothing_is_faster_than_whole_weights_that_raise(monkeypatch, gpu_memory, tmp_path):
    with emulated(monkeypatch) as seen:
        tried = {"default": forked(seen)}
        found = compared(monkeypatch, tmp_path, tried, default=1.0)
        assert found.best() == () and "while it was timed" in found.failed[WHOLE]
        with pytest.raises(NoProviderError, match=r"moe_locality: .*default: while it was timed.*whole: while"):
            compared(monkeypatch, tmp_path, tried)


def test_no_way_passes():
    assert Comparison((1, 8), {}, {"default": "broken"}).best() == ()
