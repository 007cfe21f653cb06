"""A linear layer's weight in parts: the op, and whether it is faster so; kernels are emulated by torch."""

from dataclasses import replace
from functools import partial

import pytest
import torch
from launch_emulation import emulated
from test_gemm_family import SHAPE as SMALL
from test_gemm_launch import random

import vllm_rose_plugin.kernels.ops  # noqa: F401  registers torch.ops.rose
from vllm_rose_plugin.kernels.contracts import Activation
from vllm_rose_plugin.kernels.gemm import domains, family, launch
from vllm_rose_plugin.kernels.gemm.column_split import plan_split, split_packed
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.kernels.jit.providers import NoProviderError
from vllm_rose_plugin.kernels.linear_split import compare, ops  # noqa: F401
from vllm_rose_plugin.kernels.linear_split.compare import ByTurns, Place, compare_split, family_of
from vllm_rose_plugin.kernels.moe_experts.compare_ways import WHOLE
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import DeviceFacts
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8

TABLE = torch.arange(132, dtype=torch.int32) % 2
SHAPE = replace(SMALL, n=256, bias=False)
TARGETS = ("sm_90a", "sm_100f", "sm_107a")


def layer(target: str, *, parts: int = 2, n: int = 512, k: int = 96):
    """(weight, the same packed, and in parts)"""
    codes, scales = quantize_mxfp8(random(n, k, seed=n))
    weight = family.Mxfp8Tensor(codes, scales)
    packed = pack_weight(weight, target=target)
    split = plan_split(n=n, parts=parts, target=target)
    assert split.parts == parts
    return weight, packed, split_packed(split, packed, lambda _, shape, dtype: torch.empty(shape, dtype=dtype))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("parts", [1, 2, 4])
@pytest.mark.parametrize("rows", [0, 1, 9, 130])
def test_the_whole_weights_result(monkeypatch, target, parts, rows):
    _, packed, split = layer(target, parts=parts)
    x, bias = random(rows, 96, seed=rows), random(512, seed=4)
    with emulated(monkeypatch, target) as seen:
        for how in ({}, {"bias": bias}, {"out_dtype": torch.float16}, {"batch_invariant": True}):
            expected = launch.linear(x, packed, **how)
            found = domains.linear_domains(x, split, sm_domains=TABLE, **how)
            assert found.dtype == expected.dtype and torch.equal(found, expected)
        if rows:
            assert {config.domains for config in seen.configs} == {1, parts}
            assert parts == 1 or all(not getattr(c, "stream_k", False) for c in seen.configs if c.domains == parts)


@pytest.mark.parametrize("target", TARGETS)
def test_tokens_that_somebody_else_has_quantized(monkeypatch, target):
    _, packed, split = layer(target)
    x = family.Mxfp8Tensor(*quantize_mxfp8(random(7, 96)))
    with emulated(monkeypatch, target):
        expected = launch.linear(x, packed, out_dtype=torch.bfloat16)
        assert torch.equal(domains.linear_domains(x, split, sm_domains=TABLE, out_dtype=torch.bfloat16), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bias": torch.zeros(256)}, r"bias must be \[512\]"),
        ({"sm_domains": TABLE.long()}, "sm_domains must be contiguous torch.int32"),
        ({"out_dtype": torch.float32}, "bf16 or fp16"),
    ],
)
def test_refusals(monkeypatch, change, message):
    _, _, split = layer("sm_90a")
    with emulated(monkeypatch), pytest.raises((TypeError, ValueError), match=message):
        domains.linear_domains(random(3, 96), split, **{"sm_domains": TABLE} | change)


@pytest.mark.parametrize("activation", list(Activation))
@pytest.mark.parametrize("quantized", [False, True])
def test_the_op_without_a_gpu(activation, quantized):
    """The reference on each part, beside the reference on the whole weight."""
    codes, scales = quantize_mxfp8(random(128, 96))
    x, bias = random(2, 5, 96), random(128)
    how = {"bias": bias, "activation": activation.value, "out_dtype": torch.bfloat16}
    if quantized:
        x, how["x_scales"] = quantize_mxfp8(x)
    expected = torch.ops.rose.mxfp8_linear(x, codes, scales, **how)
    found = torch.ops.rose.mxfp8_linear_split(x, list(codes.chunk(2)), list(scales.chunk(2)), **how)
    assert found.shape == expected.shape == (2, 5, 128)
    assert (found - expected).abs().max() <= 2**-7 * expected.abs().max()


def test_the_op_as_a_compiler_sees_it():
    codes, scales = quantize_mxfp8(random(128, 96))
    arguments = (random(5, 96), list(codes.chunk(2)), list(scales.chunk(2)))
    op = torch.ops.rose.mxfp8_linear_split
    torch.library.opcheck(op, arguments, {"bias": random(128)}, test_utils="test_faketensor")
    compiled = torch.compile(lambda *given: op(*given) + 1, fullgraph=True, backend="eager")
    assert torch.equal(compiled(*arguments), op(*arguments) + 1)


# ---- whether parts are faster ----


class Memory:
    def __init__(self, sizes, alive):
        self.parts, self.alive = [torch.zeros(size + 64, dtype=torch.uint8) for size in sizes], alive
        alive.append(self)

    def tensor(self, part, *, shape, dtype, offset):
        start = -self.parts[part].data_ptr() % 64 + offset
        return self.parts[part][start : start + torch.Size(shape).numel()].view(dtype).view(shape)

    def free(self):
        self.alive.remove(self)


class World:
    """A pretended GPU, whose memory is counted."""

    def __init__(self):
        self.alive, self.most, self.called = [], 0, []
        self.place = Place(plan_split(n=256, parts=2, target="sm_90a"), self.allocate, TABLE, True)

    def allocate(self, sizes):
        made = Memory(sizes, self.alive)
        self.most = max(self.most, len(self.alive))
        return made

    def compared(self, times, *, checked=(), tokens=(1, 9), wrong_from=0):
        real = compare.linear_domains

        def linear(x, parts, **how):
            self.called.append(x.shape[0])
            out = real(x, parts, **how)
            return out.roll(1, dims=1) if wrong_from and x.shape[0] >= wrong_from else out

        def timer(call):
            name = "single_launch" if isinstance(call._call, compare._OnParts) else WHOLE
            call()
            if name not in times:
                raise RuntimeError("no such kernel")
            return times[name]

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compare, "linear_domains", linear)
            return compare_split(
                shape_of=lambda count: replace(SHAPE, num_tokens=count), tokens=tokens, place=self.place,
                captured=True, checked=checked, timer=timer,
            )  # fmt: skip


@pytest.fixture
def world(monkeypatch, tmp_path):
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path))
    facts = DeviceFacts("sm_90a", 132)
    for module in (family, compare):
        monkeypatch.setattr(module, "device_facts", lambda index: facts)
        monkeypatch.setattr(module.quantize, "warm_up", lambda **how: None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda *device: None)
    real = family.make_inputs

    def make_inputs(shape, seed):
        x, weight, _, bias = real(shape, seed)
        return x, weight, pack_weight(weight, target="sm_90a"), bias

    monkeypatch.setattr(compare, "make_inputs", make_inputs)
    with emulated(monkeypatch):
        yield World()


def test_parts_are_checked_and_timed_and_their_memory_is_given_back(world):
    found = world.compared({WHOLE: 12.0, "single_launch": 10.0})
    assert found.microseconds == {WHOLE: [12.0] * 2, "single_launch": [10.0] * 2} and found.failed == {}
    assert found.gain(found.best()) == pytest.approx(1.2)
    assert set(world.called) == {1, 9} and world.most and world.alive == []
    again = world.compared({WHOLE: 1.0, "single_launch": 10.0})
    assert again == found, "by the verdict on disk"


def test_a_wrong_result_where_it_is_not_timed_is_found(world):
    found = world.compared({WHOLE: 12.0, "single_launch": 1.0}, checked=(40,), wrong_from=40)
    assert "num_tokens=40" in found.failed["single_launch"] and found.best() == ()
    assert world.alive == []


def test_a_launch_that_raises_is_not_used(world):
    found = world.compared({WHOLE: 12.0})
    assert found.failed == {"single_launch": "while it was timed: RuntimeError: no such kernel"}
    with pytest.raises(NoProviderError):
        world.compared({})


def test_the_configs_that_are_looked_up_are_those_that_are_launched(world, monkeypatch):
    with emulated(monkeypatch) as seen:
        for tokens in (1, 9, 200):
            shape = replace(SHAPE, num_tokens=tokens)
            *_, in_parts = family_of(world.place).config_of(shape, "sm_90a", 132)
            compare._OnParts(world.place, shape)(*compare.make_inputs(shape, 1))
            assert seen.configs[-1] == in_parts and in_parts.domains == 2


def test_each_call_that_is_timed_reads_another_copy(monkeypatch):
    """One weight would come from the L2 cache, however far its memory lies."""
    _, packed, _ = layer("sm_90a")
    seen = []

    def note(x, weight, packed, bias):
        seen.append(packed.codes.tensor)

    class OnGpu:
        """A tensor that says it is on a GPU."""

        def __init__(self, tensor):
            self.tensor, self.is_cuda, self.device = tensor, True, torch.device("cuda", 0)

        def numel(self):
            return self.tensor.numel()

        def clone(self):
            return OnGpu(self.tensor.clone())

    size = packed.codes.numel() + packed.scales.numel()
    for cache, copies in ((size, 3), (size // 2, 2), (0, 1), (1000 * size, 64)):
        properties = type("Properties", (), {"L2_cache_size": cache})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device, p=properties: p)
        given = replace(packed, codes=OnGpu(packed.codes), scales=OnGpu(packed.scales))

        call = ByTurns(
            partial(lambda x, weight, packed, bias: seen.append(packed.codes.tensor), None, None, given, None)
        )
        assert call.copies == copies
        seen.clear()
        for _ in range(copies + 1):
            call()
        assert len({each.data_ptr() for each in seen}) == copies
        assert all(torch.equal(each, packed.codes) for each in seen)
