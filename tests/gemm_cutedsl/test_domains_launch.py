"""What calls on a weight in parts hand to the kernel, and what they refuse; kernels are emulated by torch."""

from dataclasses import replace

import pytest
import torch
from launch_emulation import emulated
from test_gemm_launch import random, random_weight

from vllm_rose_plugin.kernels.contracts import Activation, TokenFormat
from vllm_rose_plugin.kernels.gemm import domains, launch, one_run, workspace
from vllm_rose_plugin.kernels.gemm.call import Call
from vllm_rose_plugin.kernels.gemm.choose import choose_config
from vllm_rose_plugin.kernels.gemm.column_split import plan_split, split_packed
from vllm_rose_plugin.kernels.gemm.config import Epilogue
from vllm_rose_plugin.kernels.gemm.plan import plan, token_format_of, warm_configs
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight, pack_weight

BF16 = torch.bfloat16
TABLE = torch.arange(132, dtype=torch.int32) % 2
FORMATS = [
    ("sm_90a", TokenFormat.MXFP8_FP32_SCALES),
    ("sm_90a", TokenFormat.BF16_PERMUTED),
    ("sm_100f", TokenFormat.MXFP8_TCGEN05),
    ("sm_107a", TokenFormat.MXFP8_TCGEN05),
]


def make(part, shape, dtype):
    return torch.empty(shape, dtype=dtype)


def weights(*, groups: int, n: int, k: int, parts: int, target: str, gate_up: bool = False):
    packed = pack_weight(random_weight(groups, n, k, seed=n), target=target, gate_up=gate_up)
    split = plan_split(n=n, parts=parts, target=target, gate_up=gate_up)
    assert split.parts == parts
    return packed, split_packed(split, packed, make)


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize(("target", "token_format"), FORMATS)
@pytest.mark.parametrize("parts", [1, 2, 4])
def test_the_whole_weights_result(monkeypatch, target, token_format, parts):
    """w13 with SwiGLU, then w2 with a bias: one tensor of all columns, in the same order."""
    counts, gap = [128, 0, 5], 123
    offsets = torch.tensor([0, 128, 128, 128 + 5 + gap], dtype=torch.int32)
    runs = {"expert_offsets": offsets, "expert_counts": torch.tensor(counts, dtype=torch.int32)}
    w13, w13_parts = weights(groups=3, n=1024, k=96, parts=parts, target=target, gate_up=True)
    w2, w2_parts = weights(groups=3, n=512, k=512, parts=parts, target=target)
    bias = random(3, 512, seed=9).float()
    with emulated(monkeypatch, target) as seen:
        tokens = launch.quantize_tokens(random(256, 96), token_format=token_format)
        middle = launch.grouped_gemm_swiglu(tokens, w13, limit=4, **runs)
        found = domains.grouped_gemm_swiglu_domains(tokens, w13_parts, sm_domains=TABLE, limit=4, **runs)
        assert found.token_format is middle.token_format and found.k == middle.k
        rows = torch.cat([torch.arange(128), torch.arange(128, 133)])
        assert same(found.data[rows], middle.data[rows])
        expected = torch.zeros(256, 512, dtype=BF16)
        launch.grouped_gemm(middle, w2, out_dtype=BF16, bias=bias, out=expected, **runs)
        out = torch.zeros(256, 512, dtype=BF16)
        result = domains.grouped_gemm_domains(
            middle, w2_parts, sm_domains=TABLE, out_dtype=BF16, bias=bias, out=out, **runs
        )
        assert result is out and same(out, expected)
        assert {config.domains for config in seen.configs} == {1, parts}
        if parts > 1:
            first, second = (counters.data_ptr() for counters in seen.counters)
            assert first != second, "launches that follow each other share counters"


def test_no_tokens(monkeypatch):
    _, parts = weights(groups=2, n=256, k=96, parts=2, target="sm_90a")
    runs = {
        "expert_offsets": torch.zeros(3, dtype=torch.int32),
        "expert_counts": torch.zeros(2, dtype=torch.int32),
    }
    with emulated(monkeypatch) as seen:
        tokens = launch.quantize_tokens(random(0, 96), token_format=TokenFormat.BF16_PERMUTED)
        out = domains.grouped_gemm_domains(tokens, parts, sm_domains=TABLE, out_dtype=BF16, **runs)
        assert out.shape == (0, 256) and not seen.configs


# ---- counters ----


def call(parts: list[PackedWeight], table: torch.Tensor = TABLE) -> torch.Tensor:
    offsets = torch.tensor([0, 7], dtype=torch.int32)
    tokens = launch.quantize_tokens(random(7, 96), token_format=TokenFormat.BF16_PERMUTED)
    return domains.grouped_gemm_domains(
        tokens, parts, sm_domains=table, expert_offsets=offsets, expert_counts=offsets[1:].clone(), out_dtype=BF16
    )


def test_counters_by_turns_and_by_stream(monkeypatch):
    _, parts = weights(groups=1, n=128, k=96, parts=2, target="sm_90a")
    with emulated(monkeypatch) as seen:
        where = []
        for stream, capturing in [(7, False), (7, False), (7, False), (8, False), (7, True), (7, True), (7, False)]:
            seen.stream, seen.capturing = stream, capturing
            call(parts)
            where.append(seen.counters[-1].data_ptr())
        assert where[0] == where[2] and where[1] == where[6] and len(set(where)) == 5


def test_a_launch_that_failed_leaves_its_counters_to_the_next(monkeypatch):
    """The launch in front of that one has the other set, and may still draw from it."""
    _, parts = weights(groups=1, n=128, k=96, parts=2, target="sm_90a")

    def fail(*arguments, **how):
        raise RuntimeError("no such kernel")

    with emulated(monkeypatch) as seen:
        call(parts)
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no such kernel"):
            patch.setattr(launch, "run_kernel", fail)
            call(parts)
        call(parts)
        assert seen.counters[0].data_ptr() != seen.counters[1].data_ptr()


def test_counters_are_made_before_a_capture(monkeypatch):
    _, parts = weights(groups=1, n=128, k=96, parts=2, target="sm_90a")
    with emulated(monkeypatch) as seen:
        seen.capturing = True
        with pytest.raises(RuntimeError, match=r"call domains.prepare_domains\(\) or run"):
            call(parts)
        domains.prepare_domains(parts[0].codes.device)
        call(parts)


def test_what_launches_share_is_complete_whatever_torchs_default_device_is(monkeypatch):
    """vLLM builds a model with its device as torch's default, where zeros are a kernel in one stream."""
    monkeypatch.setattr(one_run, "_tables", {})
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    device = torch.device("cpu")
    with torch.device("meta"):
        counters, flags = workspace.Counters(device), workspace.Flags(device, blocks=132)
        offsets, counts = one_run.one_run(device, 7)
    assert not counters.rows.any() and not flags.rows.any()
    assert (offsets.tolist(), counts.tolist()) == ([0, 7], [7])


def test_more_streams_than_counters(monkeypatch):
    _, parts = weights(groups=1, n=128, k=96, parts=2, target="sm_90a")
    with emulated(monkeypatch) as seen:
        for seen.stream in range(256):
            call(parts)
        seen.stream = 256
        with pytest.raises(RuntimeError, match="ran on 256 streams"):
            call(parts)
        seen.stream = 3
        call(parts)


# ---- refusals ----


def test_refusals(monkeypatch):
    _, parts = weights(groups=1, n=128, k=96, parts=2, target="sm_90a")
    _, other = weights(groups=1, n=256, k=96, parts=2, target="sm_90a")
    with emulated(monkeypatch):
        with pytest.raises(ValueError, match="in 0 parts; one launch takes 1 to 4"):
            call([])
        with pytest.raises(ValueError, match="in 5 parts"):
            call([parts[0]] * 5)
        with pytest.raises(ValueError, match=r"part 1 is .*128.* parts must be alike"):
            call([parts[0], other[1]])
        with pytest.raises(ValueError, match=r"sm_domains must be \[SMs\], got \(2, 66\)"):
            call(parts, TABLE.view(2, 66))
        with pytest.raises(ValueError, match=r"sm_domains must be contiguous torch\.int32"):
            call(parts, TABLE.long())


def shape(**how) -> dict:
    return dict(num_groups=1, n=512, k=256, num_rows=8, token_format=TokenFormat.BF16_PERMUTED) | how


def test_configs_that_share_tiles_are_refused():
    config = choose_config(**shape(), domains=2)
    for how in (dict(split_k=True, cluster=2), dict(stream_k=True), dict(cluster=2)):
        with pytest.raises(ValueError, match="2 parts is for blocks that have whole tiles to themselves"):
            replace(config, **how)
    with pytest.raises(ValueError, match="domains is 5; it must be 1 to 4"):
        choose_config(**shape(), domains=5)
    with pytest.raises(ValueError, match="192 columns can't be 2 parts of whole tiles of 64"):
        choose_config(**shape(n=192), domains=2)
    with pytest.raises(ValueError, match="192 columns can't be 2 parts"):
        choose_config(**shape(n=384, epilogue=Epilogue.SWIGLU), domains=2)


# ---- configs ----


def test_the_whole_weights_config_where_it_can_be():
    experts = Call("sm_90a", 132, 16, 4096, 1536, TokenFormat.BF16_PERMUTED, domains=2)
    for rows in (1, 64, 1024, 8192):
        whole = plan(replace(experts, domains=1), expected_rows=rows, num_rows=rows)
        made = plan(experts, expected_rows=rows, num_rows=rows)
        assert made.config == replace(whole.config, domains=2) and made.grid == whole.grid
    few_columns = replace(
        experts, num_groups=128, n=768, k=4096, epilogue=Epilogue.SWIGLU, out_format=TokenFormat.BF16_PERMUTED
    )
    whole = plan(replace(few_columns, domains=1), expected_rows=8192, num_rows=8192).config
    made = plan(few_columns, expected_rows=8192, num_rows=8192).config
    assert (whole.row_tile, whole.row_tiles) == (256, 3)
    assert (made.row_tile, made.row_tiles) == (192, 4), "parts of 384 columns would be half of their second tile"
    linear = replace(experts, num_groups=1, n=9216, k=4096)
    assert plan(replace(linear, domains=1), expected_rows=512, num_rows=512).config.stream_k
    assert not plan(linear, expected_rows=512, num_rows=512).config.stream_k


def test_configs_from_sm_100_on():
    """Pairs stay, shared k doesn't."""
    call = Call("sm_107a", 212, 8, 4096, 1536, TokenFormat.MXFP8_TCGEN05, domains=2)
    for rows in (8, 1024, 8 * 300):
        whole = plan(replace(call, domains=1), expected_rows=rows, num_rows=rows)
        assert plan(call, expected_rows=rows, num_rows=rows).config == replace(whole.config, domains=2)
        assert whole.config.pair == (rows == 2400)
    few = replace(call, num_groups=2)
    assert plan(replace(few, domains=1), expected_rows=2, num_rows=2).config.split > 1
    made = plan(few, expected_rows=2, num_rows=2).config
    assert made.domains == 2 and made.split == 1
    with pytest.raises(ValueError, match="4224 columns can't be 2 parts of whole tiles of 128"):
        plan(replace(call, n=4224), expected_rows=8, num_rows=8)


def test_warm_up_knows_every_config_of_calls():
    how = dict(num_groups=8, n=1536, k=1024, epilogue=Epilogue.SWIGLU)
    warm = warm_configs(
        target="sm_90a",
        sm_count=132,
        max_rows=3000,
        activation=Activation.MXFP8,
        part_of=lambda whole: replace(whole, domains=2),
        early_counts=True,
        **how,
    )
    assert all(config.domains == 2 for config in warm)
    for rows in (1, 9, 64, 256, 257, 3000):
        token_format = token_format_of(target="sm_90a", activation=Activation.MXFP8, num_groups=8, num_rows=rows)
        made = Call(
            "sm_90a", 132, token_format=token_format, out_format=token_format, early_counts=True, domains=2, **how
        )
        assert plan(made, expected_rows=rows, num_rows=rows).config in warm
