"""The host's half of a call: what the kernel is given, what is returned, what is refused."""

import contextlib
import inspect
from types import SimpleNamespace

import pytest
import torch

from vllm_rose_plugin.kernels.all_reduce.config import Access, Algorithm, Tuning
from vllm_rose_plugin.kernels.all_reduce_norm import launch
from vllm_rose_plugin.kernels.all_reduce_norm.kernel import AllReduceNorm
from vllm_rose_plugin.kernels.contracts import Activation, TokenFormat
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens, pack_tokens

STAGING, CAPACITY = 1000, 2**20


@pytest.fixture
def reduce(monkeypatch):
    """An AllReduce without a buffer, which notes the launches: (config, arguments by name)."""
    launched: list = []
    names = [*inspect.signature(AllReduceNorm.__call__).parameters][1:-1]

    def kernel(config, target):
        assert target == "sm_90a"
        return lambda *arguments: launched.append((config, dict(zip(names, arguments, strict=True))))

    def numbers(source, target):
        return (1, 2, 3, 0, *((STAGING, CAPACITY) if source is None else (source, 0)), STAGING, CAPACITY, 9, 10)

    monkeypatch.setattr(launch, "kernel", kernel)
    monkeypatch.setattr(launch, "check_on_gpu", lambda what, x: None)
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    heap: list[torch.Tensor] = []
    return SimpleNamespace(
        launched=launched,
        heap=heap,
        check=lambda: None,
        heap_offset=lambda x: 4096 if any(x is tensor for tensor in heap) else None,
        numbers=numbers,
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


def given(num_rows=3, hidden_size=256, **changes):
    return {
        "residual": aligned(num_rows, hidden_size),
        "weight": aligned(hidden_size),
        "residual_out": aligned(num_rows, hidden_size),
        "eps": 1e-6,
        **changes,
    }


def test_a_plain_call(reduce):
    x, how = aligned(3, 256), given()
    out, residual_out = launch.all_reduce_norm(reduce, x, **how)
    ((config, arguments),) = reduce.launched
    assert out.shape == x.shape and out.dtype == x.dtype and residual_out is how["residual_out"]
    assert config.token_format is None and config.copy_in and config.algorithm is Algorithm.ONE_SHOT
    assert arguments["x"] is x and arguments["out"] is out and arguments["blocks"] == 3 and arguments["eps"] == 1e-6
    assert arguments["residual"] is how["residual"] and arguments["residual_out"] is residual_out
    assert (arguments["source"], arguments["source_step"]) == (STAGING, CAPACITY) and arguments["report"] == 10


@pytest.mark.parametrize("token_format", TokenFormat)
def test_results_are_shaped_as_the_packers(reduce, token_format):
    for num_rows in (0, 1, 130):
        x = aligned(num_rows, 256)
        result, _ = launch.all_reduce_norm(reduce, x, token_format=token_format, **given(num_rows))
        expected = pack_tokens(x, token_format=token_format)
        assert isinstance(result, PackedTokens) and result.token_format is token_format and result.k == 256
        assert result.data.shape == expected.data.shape and result.data.dtype == expected.data.dtype
        if expected.scales is None:
            assert result.scales is None
        else:
            assert result.scales.shape == expected.scales.shape and result.scales.dtype == expected.scales.dtype
    assert len(reduce.launched) == 2, "nothing is launched for no rows"


def test_a_zero_copy_input_is_read_where_it_lies(reduce):
    x = aligned(256, 256)
    reduce.heap.append(x)
    launch.all_reduce_norm(reduce, x, **given(256))
    ((config, arguments),) = reduce.launched
    assert not config.copy_in and config.algorithm is Algorithm.TWO_SHOT
    assert (arguments["source"], arguments["source_step"], arguments["target"]) == (4096, 0, STAGING)


def test_a_measured_tuning_decides(reduce):
    launch.all_reduce_norm(reduce, aligned(64, 256), tuning=Tuning(Algorithm.TWO_SHOT, 5), **given(64))
    ((config, arguments),) = reduce.launched
    assert config.algorithm is Algorithm.TWO_SHOT and arguments["blocks"] == 5


@pytest.mark.parametrize(
    ("x", "changes", "error", "message"),
    [
        (aligned(3, 256, dtype=torch.float32), {}, TypeError, "x must be torch.bfloat16 or torch.float16"),
        (aligned(3, 2, 128), {}, ValueError, r"x must be \[T, H\], got shape \(3, 2, 128\)"),
        (aligned(3, 256), {"residual": aligned(4, 256)}, ValueError, r"residual must be contiguous \(3, 256\)"),
        (aligned(3, 256), {"weight": aligned(128)}, ValueError, r"weight must be contiguous \(256,\)"),
        (aligned(256, 3).t(), {}, ValueError, "x must be contiguous"),
        (aligned(769)[1:].view(3, 256), {}, ValueError, "start at a multiple of 2 bytes; it must be 16: copy them"),
        (aligned(4096, 256), {}, ValueError, "2097152 bytes .* are more than max_bytes=1048576: make it larger"),
        (
            aligned(3, 256),
            {"token_format": TokenFormat.MXFP8_TCGEN05, "activation": Activation.BF16},
            ValueError,
            "holds quantized tokens only",
        ),
    ],
)
def test_what_does_not_fit_is_named(reduce, x, changes, error, message):
    with pytest.raises(error, match=message):
        launch.all_reduce_norm(reduce, x, **given(x.shape[0], **changes))
    assert not reduce.launched


def test_residuals_that_overlap_are_refused(reduce):
    both = aligned(4, 256)
    how = given(residual=both[:3], residual_out=both[1:])
    with pytest.raises(ValueError, match="overlap without being the same"):
        launch.all_reduce_norm(reduce, aligned(3, 256), **how)
