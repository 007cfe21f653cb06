"""The host's half of a call: what the kernel is given, what is returned, what is refused."""

import contextlib
import inspect
from types import SimpleNamespace

import pytest
import torch

from vllm_rose_plugin.kernels.all_reduce.config import Access
from vllm_rose_plugin.kernels.ep_combine import launch
from vllm_rose_plugin.kernels.ep_combine.kernel import EpCombine
from vllm_rose_plugin.kernels.moe_combine import launch as combine_launch
from vllm_rose_plugin.kernels.moe_combine.reference import combine_tokens

STAGING, CAPACITY = 1000, 2**21


class FakeReduce(SimpleNamespace):
    """An AllReduce without a buffer, over two ranks that have the same input."""

    def __call__(self, x, out):
        self.reduced.append((x, out))
        return out.copy_(x + x)


@pytest.fixture
def reduce(monkeypatch):
    """Notes the fused launches, (config, arguments by name), and what is reduced after a combine of its own."""
    launched: list = []
    names = [*inspect.signature(EpCombine.__call__).parameters][1:-1]

    def kernel(config, target):
        assert target == "sm_90a"
        return lambda *arguments: launched.append((config, dict(zip(names, arguments, strict=True))))

    def combined(y, *, out, out_dtype, **how):
        return out.copy_(combine_tokens(y, out_dtype=out_dtype, **how))

    monkeypatch.setattr(launch, "kernel", kernel)
    monkeypatch.setattr(launch, "combine_tokens", combined)
    monkeypatch.setattr(combine_launch, "check_on_gpu", lambda what, x: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    return FakeReduce(
        launched=launched,
        reduced=[],
        check=lambda: None,
        numbers=lambda source, target: (1, 2, 3, 0, STAGING, CAPACITY, STAGING, CAPACITY, 9, 10),
        group=SimpleNamespace(size=2),
        access=Access.PEERS,
        same_bits=False,
        target="sm_90a",
        sm_count=132,
        layout=SimpleNamespace(capacity=CAPACITY, max_bytes=CAPACITY),
    )


def aligned(*shape, dtype=torch.bfloat16):
    size = torch.Size(shape).numel()
    memory = torch.zeros(size + 64, dtype=dtype)
    start = -memory.data_ptr() % 32 // dtype.itemsize
    return memory[start : start + size].view(shape)


def given(num_tokens=3, **changes):
    """As keywords of a call."""
    slots = aligned(num_tokens, 2, dtype=torch.int32)
    return {"slots": slots, "topk_weights": aligned(num_tokens, 2, dtype=torch.float32).fill_(0.5), **changes}


def test_a_call_of_few_tokens_is_one_launch(reduce):
    y, how = aligned(5, 256).fill_(1.0), given(shared=aligned(3, 256))
    out = launch.ep_combine(reduce, y, **how)
    ((config, arguments),) = reduce.launched
    assert out.shape == (3, 256) and out.dtype == torch.bfloat16 and not reduce.reduced
    assert config.combine.weighted and config.combine.shared_dtype == "bfloat16" and config.combine.top_k == 2
    assert arguments["y"] is y and arguments["out"] is out and arguments["shared"] is how["shared"]
    assert arguments["slots"].shape == arguments["weights"].shape == (6,) and arguments["blocks"] == 1
    assert (arguments["source"], arguments["source_step"], arguments["report"]) == (STAGING, CAPACITY, 10)


def test_what_a_call_does_not_have_is_stood_in_for(reduce):
    y = aligned(5, 256)
    launch.ep_combine(reduce, y, **given(topk_weights=None), out=aligned(3, 256, dtype=torch.float16))
    ((config, arguments),) = reduce.launched
    assert not config.combine.weighted and config.combine.shared_dtype is None and config.dtype == "float16"
    assert arguments["shared"] is y and arguments["weights"].dtype == torch.float32


def test_many_tokens_are_two_launches_through_the_part(reduce):
    y = aligned(5, 256).fill_(1.0)
    for part in (None, aligned(3000, 256)):
        how = given(3000)
        out = launch.ep_combine(reduce, y, **how, part=part)
        (x, to) = reduce.reduced[-1]
        assert x is (out if part is None else part) and to is out and not reduce.launched
        assert (out == 2.0).all()
    assert len(reduce.reduced) == 2


def test_either_way_can_be_asked_for(reduce):
    y = aligned(5, 256)
    launch.ep_combine(reduce, y, **given(), fused=False)
    launch.ep_combine(reduce, y, **given(3000), fused=True, blocks=5)
    assert len(reduce.reduced) == 1 and reduce.launched[0][1]["blocks"] == 5
    assert launch.ep_combine(reduce, y, **given(0)).shape == (0, 256)
    assert len(reduce.reduced) == len(reduce.launched) == 1, "nothing is launched for no tokens"


@pytest.mark.parametrize(
    ("y", "how", "error", "message"),
    [
        (aligned(5, 256, dtype=torch.float32), given(), TypeError, "y must be torch.bfloat16 or torch.float16"),
        (aligned(5, 256), given(slots=aligned(3, 2, dtype=torch.int64)), TypeError, "slots must be torch.int32"),
        (aligned(5, 256), given(shared=aligned(4, 256)), ValueError, r"shared must be \(3, 256\)"),
        (aligned(5, 256), given(out=aligned(3, 128)), ValueError, "out must be contiguous"),
        (aligned(5, 256), given(8192), ValueError, "4194304 bytes .* are more than max_bytes=2097152: make it larger"),
    ],
)
def test_what_does_not_fit_is_named(reduce, y, how, error, message):
    with pytest.raises(error, match=message):
        launch.ep_combine(reduce, y, **how)
    assert not reduce.launched and not reduce.reduced
