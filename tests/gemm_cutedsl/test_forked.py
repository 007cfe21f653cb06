"""Launches side by side: what each sees of the others, joined streams after a failure, and columns of one result."""

import contextlib

import pytest
import torch

from vllm_rose_plugin.kernels.contracts import Activation, Rounding, TokenFormat
from vllm_rose_plugin.kernels.gemm.call import Call
from vllm_rose_plugin.kernels.gemm.config import Epilogue, GemmConfig
from vllm_rose_plugin.kernels.gemm.forked import ForkedStreams
from vllm_rose_plugin.kernels.gemm.forked_gemm import columns_of
from vllm_rose_plugin.kernels.gemm.plan import config_of
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens, pack_tokens, unpack_tokens


class Stream:
    """Holds what it has waited for and what was launched on it, so an event is a copy of that."""

    device = 0

    def __init__(self, number):
        self.cuda_stream, self.done, self.captured = number, set(), False

    def record_event(self):
        return frozenset(self.done), self.captured

    def wait_event(self, event):
        done, captured = event
        assert captured or not self.captured, "a capture can't wait for what lies outside of it"
        self.done |= done
        self.captured = self.captured or captured


class Device:
    """A parent stream and others; the current one is what ``torch.cuda`` would say."""

    def __init__(self, monkeypatch, count, *, captured=False):
        self.parent = self.current = Stream(0)
        self.parent.captured = captured
        self.others = [Stream(1 + i) for i in range(count)]
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        self.saw = {}

    @contextlib.contextmanager
    def on(self, stream):
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def launch(self, name, *, fails=False):
        def made():
            if fails:
                raise RuntimeError(name)
            self.saw[name] = frozenset(self.current.done)
            self.current.done.add(name)

        return made


@pytest.mark.parametrize("captured", [False, True])
def test_launches_see_what_was_before_and_not_each_other(monkeypatch, captured):
    device = Device(monkeypatch, 2, captured=captured)
    device.launch("quantize")()
    streams = ForkedStreams(device.others)
    streams.run([device.launch("a0"), device.launch("a1")], [device.launch("b0"), device.launch("b1")])
    device.launch("combine")()
    assert device.saw["a0"] == device.saw["a1"] == {"quantize"}
    assert device.saw["b0"] == device.saw["b1"] == {"quantize", "a0", "a1"}
    assert device.saw["combine"] == {"quantize", "a0", "a1", "b0", "b1"}
    assert all(stream.captured == captured for stream in device.others)
    streams.run([device.launch("c0")])  # fewer launches than streams
    assert "combine" in device.saw["c0"] and "c0" in device.parent.done


@pytest.mark.parametrize("fails", ["a0", "a1", "b0", "b2"])
def test_a_launch_that_raises_leaves_no_stream_unjoined(monkeypatch, fails):
    device = Device(monkeypatch, 3, captured=True)
    rounds = [["a0", "a1"], ["b0", "b1", "b2"]]
    with pytest.raises(RuntimeError, match=fails):
        ForkedStreams(device.others).run(
            *([device.launch(name, fails=name == fails) for name in names] for names in rounds)
        )
    assert device.current is device.parent
    assert all(stream.done <= device.parent.done for stream in device.others)
    assert fails not in device.parent.done
    device.launch("after")()
    assert device.saw["after"] == frozenset(device.parent.done - {"after"})


def test_what_can_not_be_launched(monkeypatch):
    device = Device(monkeypatch, 2)
    with pytest.raises(ValueError, match="0 streams"):
        ForkedStreams([])
    with pytest.raises(ValueError, match="all different"):
        ForkedStreams(device.others + device.others[:1])
    streams = ForkedStreams(device.others)
    for rounds in ([], [[]], [[device.launch("x")] * 3], [[device.launch("x")], []]):
        with pytest.raises(ValueError, match="must be of 1 to 2"):
            streams.run(*rounds)
    assert device.saw == {}


def test_two_engines_share_streams(monkeypatch):
    """Each call has events of its own: what one engine launches meanwhile is no matter to the other's join."""
    device = Device(monkeypatch, 2)
    streams, other = ForkedStreams(device.others), Stream(9)

    def meanwhile():
        with device.on(other):
            device.launch("theirs")()
            ForkedStreams(device.others).run([device.launch("other")])
        device.launch("mine")()

    streams.run([meanwhile])
    assert "mine" in device.parent.done and {"theirs", "other"} <= other.done and "mine" not in other.done


@pytest.mark.parametrize("token_format", TokenFormat)
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_columns_of_tokens(token_format, parts):
    """Tokens that are put together of shares are the tokens."""
    k = parts * 128
    x = torch.randn(128, k, generator=torch.Generator().manual_seed(parts))
    packed = pack_tokens(x, token_format=token_format)
    whole = PackedTokens(
        token_format,
        torch.zeros_like(packed.data),
        None if packed.scales is None else torch.zeros_like(packed.scales),
        k,
    )
    for number, share in enumerate(x.chunk(parts, dim=1)):
        own, view = pack_tokens(share, token_format=token_format), columns_of(whole, number, parts)
        assert view.k == own.k == k // parts and view.num_rows == 128
        view.data.view(torch.uint8).copy_(own.data.view(torch.uint8))
        if view.scales is not None:
            view.scales.view(-1)[: own.scales.numel()].copy_(own.scales.view(-1))
    assert torch.equal(unpack_tokens(whole), unpack_tokens(packed))


@pytest.mark.parametrize(
    ("token_format", "k"),
    [(TokenFormat.BF16_PERMUTED, 192), (TokenFormat.MXFP8_TCGEN05, 384), (TokenFormat.MXFP8_FP32_SCALES, 96)],
)
def test_columns_that_would_begin_inside_a_block(token_format, k):
    packed = pack_tokens(torch.randn(128, k), token_format=token_format)
    with pytest.raises(ValueError, match=f"{k} columns can't be 2 shares"):
        columns_of(packed, 1, 2)


def call(target, *, tokens, **how):
    sm90 = target == "sm_90a"
    token_format = TokenFormat.MXFP8_TCGEN05
    if sm90:
        token_format = TokenFormat.MXFP8_FP32_SCALES if tokens <= 32 else TokenFormat.BF16_PERMUTED
    values = {"sm_count": 132 if sm90 else 212, "num_groups": 4, "n": 1024, "k": 2048, "token_format": token_format}
    return Call(target=target, **values | how)


@pytest.mark.parametrize("target", ["sm_90a", "sm_107a"])
@pytest.mark.parametrize("groups", [1, 4, 128])
@pytest.mark.parametrize("epilogue", Epilogue)
def test_parts_share_k_as_the_whole_weight_does(target, groups, epilogue):
    """So that sums are added up in the same order; with a single weight sm_90 may use stream-K, which parts can't."""
    swiglu = {"epilogue": epilogue, "activation": Activation.MXFP8, "rounding": Rounding.RCEIL}
    for tokens in (1, 5, 16, 64, 300, 4000):
        whole = call(target, tokens=tokens, num_groups=groups, **swiglu if epilogue is Epilogue.SWIGLU else {})
        if epilogue is Epilogue.SWIGLU and target == "sm_90a":
            whole = Call(**{**vars(whole), "out_format": whole.token_format})
        rows = tokens * groups
        of_whole = config_of(whole, rows)
        config = config_of(whole.part(n=512, sm_count=100), rows)
        columns = 512 if epilogue is Epilogue.SWIGLU else 1024
        assert (config.n, config.out_columns, config.out_pitch) == (512, columns, columns)
        if isinstance(config, GemmConfig):
            assert not config.stream_k
            if not of_whole.stream_k:
                assert (config.cluster, config.split_k) == (of_whole.cluster, of_whole.split_k)
        else:
            assert config.split == of_whole.split
        alone = config_of(whole.part(n=512, sm_count=106, clusters=False), rows)
        assert (alone.cluster if isinstance(alone, GemmConfig) else alone.blocks) == 1
        assert alone.n == 512
