"""Linear layers on bf16 tokens as they lie, the host half: what is copied first, what is refused, which provider."""

from dataclasses import replace

import pytest
import torch
from launch_emulation import emulated
from test_gemm_family import SHAPE, reference
from test_gemm_launch import assert_rows, random, random_weight

from vllm_rose_plugin.kernels import ops
from vllm_rose_plugin.kernels.contracts import Activation, TokenFormat
from vllm_rose_plugin.kernels.gemm import checks, family, launch, plan
from vllm_rose_plugin.kernels.gemm.family import FAMILY, LinearShape, calls_of, config_of
from vllm_rose_plugin.kernels.gemm.reference import mxfp8_linear
from vllm_rose_plugin.kernels.gemm.rows import NAME, as_rows
from vllm_rose_plugin.kernels.gemm.tokens import PackedTokens, pack_tokens, unpack_tokens
from vllm_rose_plugin.kernels.gemm.weights import pack_weight
from vllm_rose_plugin.kernels.jit import chosen
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import DeviceFacts

ROWS = TokenFormat.BF16_ROWS
FACTS = DeviceFacts("sm_90a", 132)
PLAIN = replace(SHAPE, activation=Activation.BF16)
ROSE_IN_ROWS = next(provider for provider in FAMILY.providers if provider.name == NAME)


def wide(rows: int = 9, columns: int = 128) -> torch.Tensor:
    return random(rows, columns, seed=columns)


IN_PLACE = {
    "contiguous": wide(9, 96),
    "columns of longer rows": wide()[:, 8:104],
    "every other row": wide(18, 96)[::2],
    "one row with a stride of its own": wide(9, 97)[0:1, :96],
}
COPIED = {
    "rows that start anywhere": wide(9, 97)[:, :96],
    "a start between 16 bytes": wide()[:, 1:97],
    "one row that starts there": wide()[:1, 1:97],
    "a row that is repeated": wide(1, 96).expand(9, 96),
    "rows that overlap": wide(1, 256).as_strided((9, 96), (16, 1)),
    "contiguous, from an odd start": wide(1, 9 * 96 + 1)[0, 1:].view(9, 96),
    "fp16": wide(9, 96).half(),
    "fp32": wide(9, 96).float(),
}


@pytest.mark.parametrize("name", [*IN_PLACE, *COPIED])
def test_what_a_kernel_can_read_is_not_copied(name):
    x = (IN_PLACE | COPIED)[name]
    tokens = as_rows(x)
    assert (tokens.token_format, tokens.scales, tokens.k, tokens.num_rows) == (ROWS, None, 96, len(x))
    assert (tokens.data.data_ptr() == x.data_ptr()) == (name in IN_PLACE)
    assert torch.equal(tokens.data, x.to(torch.bfloat16)) and tokens.data.stride(0) >= 96
    checks.check_tokens(tokens, x.device)
    assert torch.equal(unpack_tokens(tokens), x.to(torch.bfloat16).float())


@pytest.mark.parametrize("name", [*IN_PLACE, *COPIED])
def test_linear_gives_what_the_reference_gives(monkeypatch, name):
    x, weight, bias = (IN_PLACE | COPIED)[name], random_weight(64, 96), random(64, seed=3)
    with emulated(monkeypatch) as seen:
        monkeypatch.setattr(launch, "permute_tokens", None)  # a launch in front would fail
        packed = pack_weight(weight, target="sm_90a")
        how = dict(bias=bias, activation="bf16", out_dtype=torch.bfloat16, plain_rows=True)
        out = launch.linear(x, packed, **how)
        assert launch.linear(x[:0], packed, **how).shape == (0, 64)
    assert [config.token_format for config in seen.configs] == [ROWS]
    assert_rows(out, mxfp8_linear(x.to(torch.bfloat16), weight, bias=bias, activation="bf16"))


def test_quantized_tokens_and_other_targets_do_not_know_of_it(monkeypatch):
    weight, x = random_weight(64, 96), random(9, 96)
    for target, token_format in (("sm_90a", TokenFormat.MXFP8_FP32_SCALES), ("sm_100a", None)):
        with emulated(monkeypatch, target) as seen:
            out = launch.linear(x, pack_weight(weight, target=target), plain_rows=True)
        assert_rows(out, mxfp8_linear(x, weight))
        assert token_format is None or seen.configs[0].token_format is token_format


def test_batch_invariant_calls_run_one_config_wherever_rows_start(monkeypatch):
    weight, x = random_weight(64, 96), random(700, 97)
    how = dict(activation="bf16", batch_invariant=True, plain_rows=True)
    with emulated(monkeypatch) as seen:
        packed = pack_weight(weight, target="sm_90a")
        outs = [launch.linear(x[:m, :96], packed, **how) for m in (1, 65, 700)]
        outs.append(launch.linear(x[:, :96].contiguous(), packed, **how))
    assert len(set(seen.configs)) == 1 and seen.configs[0].token_format is ROWS
    assert all(torch.equal(out, outs[-1][: len(out)]) for out in outs)


def test_what_does_not_fit_is_named(monkeypatch):
    x, weight = wide(), random_weight(64, 96)
    with pytest.raises(ValueError, match="tokens that aren't quantized, got activation='mxfp8'"):
        launch.quantize_tokens(x, token_format=ROWS)
    with pytest.raises(ValueError, match="tokens that aren't quantized"):
        pack_tokens(x, token_format=ROWS)
    runs = {
        "expert_offsets": torch.tensor([0, 9], dtype=torch.int32),
        "expert_counts": torch.tensor([9], dtype=torch.int32),
    }
    with emulated(monkeypatch):
        packed = pack_weight(weight, target="sm_90a")
        for data in (COPIED["rows that start anywhere"], COPIED["a start between 16 bytes"], COPIED["fp16"], x):
            tokens = PackedTokens(ROWS, data, None, 96)
            with pytest.raises(ValueError, match=r"tokens must be torch.bfloat16 \(9, 96\) .* rows.as_rows\(\)"):
                launch.grouped_gemm(tokens, packed, out_dtype=torch.bfloat16, **runs)
        several = pack_weight(random_weight(2, 64, 96), target="sm_90a")
        both = {name: torch.tensor([*tensor.tolist(), 9], dtype=torch.int32) for name, tensor in runs.items()}
        tokens = pack_tokens(x[:, :96], token_format=ROWS, activation="bf16")
        with pytest.raises(ValueError, match="single weight without SwiGLU, got 2"):
            launch.grouped_gemm(as_rows(tokens.data), several, out_dtype=torch.bfloat16, **both)


def test_the_provider_passes_the_self_check(monkeypatch):
    monkeypatch.setattr(family, "device_facts", lambda index: FACTS)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(family.quantize, "warm_up", None)  # there is nothing to quantize
    with emulated(monkeypatch) as seen:
        monkeypatch.setattr(launch, "permute_tokens", None)
        for shape in (PLAIN, replace(PLAIN, num_tokens=1, bias=False), replace(PLAIN, batch_invariant=True)):
            assert ROSE_IN_ROWS.supports(shape, "sm_90a")
            x, weight, _, bias = FAMILY.make_inputs(shape, 3)
            result = ROSE_IN_ROWS.make(shape)(x, weight, pack_weight(weight, target="sm_90a"), bias)
            assert FAMILY.compare(result, reference(shape)) == ""
    assert {config.token_format for config in seen.configs} == {ROWS}


@pytest.mark.parametrize(
    ("shape", "target"),
    [
        (SHAPE, "sm_90a"),
        (replace(PLAIN, dtype="float16"), "sm_90a"),
        (PLAIN, "sm_100a"),
        (PLAIN, None),
    ],
)
def test_where_it_is_no_candidate(shape: LinearShape, target: str | None):
    assert not ROSE_IN_ROWS.supports(shape, target)
    if target is not None and plan.serves(target=target, activation=shape.activation):
        assert len(calls_of(shape, target, 132)) == 1 and len(config_of(shape, target, 132)) == 2


def test_its_kernels_are_those_of_permuted_tokens_but_for_the_tokens():
    for m in (1, 64, 2048):
        shape = replace(PLAIN, n=2304, k=4096, num_tokens=m)
        permuted, rows = calls_of(shape, *FACTS)
        assert rows == replace(permuted, token_format=ROWS)
        first, _, last = config_of(shape, *FACTS)
        assert last == replace(first, token_format=ROWS, out_format=ROWS)


def test_the_op_follows_the_verdict(monkeypatch):
    weight, x = random_weight(64, 96), random(9, 96)
    packed = pack_weight(weight, target="sm_90a").scales
    formats = {}
    for provider in ("rose", NAME):
        with emulated(monkeypatch) as seen, monkeypatch.context() as patch:
            patch.setattr(chosen, "provider", lambda family, x, provider=provider: provider)
            out = ops._mxfp8_linear(x, weight.codes, weight.scales, activation="bf16", packed_scales=packed)
            assert_rows(out, mxfp8_linear(x, weight, activation="bf16"))
            formats[provider] = [config.token_format for config in seen.configs]
    assert formats == {"rose": [TokenFormat.BF16_PERMUTED], NAME: [ROWS]}
