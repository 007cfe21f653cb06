"""Which config a call gets, and that warm-up knows all of them."""

import pytest

from vllm_rose_plugin.kernels.contracts import Activation, Rounding, TokenFormat
from vllm_rose_plugin.kernels.gemm import plan
from vllm_rose_plugin.kernels.gemm.config import Epilogue, GemmConfig
from vllm_rose_plugin.kernels.gemm.plan import Call, batch_invariant_rows, token_format_of, warm_configs
from vllm_rose_plugin.kernels.jit.fingerprint import config_text
from vllm_rose_plugin.kernels.jit.targets import LIMITS


def configs_of_calls(target, groups, activation, epilogue, rows_of_calls, **how):
    for rows in rows_of_calls:
        token_format = token_format_of(target=target, activation=activation, num_groups=groups, num_rows=rows)
        call = Call(
            target=target,
            sm_count=LIMITS[target].sm_count,
            num_groups=groups,
            token_format=token_format,
            epilogue=epilogue,
            out_format=token_format if epilogue is Epilogue.SWIGLU else None,
            activation=activation if epilogue is Epilogue.SWIGLU else Activation.MXFP8,
            **how,
        )
        yield plan.plan(call, expected_rows=rows, num_rows=rows)


@pytest.mark.parametrize("target", LIMITS)
@pytest.mark.parametrize(("groups", "n", "k", "max_rows"), [(1, 9216, 4096, 4000), (16, 3072, 4096, 20_000)])
def test_warm_configs_are_all_that_calls_can_need(target, groups, n, k, max_rows):
    epilogue = Epilogue.PLAIN if groups == 1 else Epilogue.SWIGLU
    for activation in Activation:
        if activation is Activation.BF16 and target != "sm_90a":
            continue
        shape = {"n": n, "k": k, "early_counts": True}
        warm = warm_configs(
            target=target,
            sm_count=LIMITS[target].sm_count,
            num_groups=groups,
            max_rows=max_rows,
            activation=activation,
            epilogue=epilogue,
            **shape,
        )
        assert len(set(warm)) == len(warm) and len({config_text(config) for config in warm}) == len(warm)
        step = 1 if groups == 1 else 7
        rows = [*range(1, 200), *range(200, max_rows + 1, step)]
        found = {made.config for made in configs_of_calls(target, groups, activation, epilogue, rows, **shape)}
        assert found <= set(warm) and (step > 1 or found == set(warm))


def test_warm_configs_with_bias_and_quantized_input():
    how = {
        "target": "sm_90a",
        "sm_count": 132,
        "num_groups": 1,
        "n": 192,
        "k": 96,
        "max_rows": 300,
        "activation": Activation.MXFP8,
    }
    plain, more = (warm_configs(**how, batch_invariant=True, quantized_input=given) for given in (False, True))
    assert set(plain) < set(more)
    assert {config.token_format for config in set(more) - set(plain)} == {TokenFormat.MXFP8_FP32_SCALES}
    assert all(
        config.bias and config.out_dtype == "float16" for config in warm_configs(**how, bias=True, out_dtype="float16")
    )
    assert all(config.limit is None for config in warm_configs(**how, limit=7.0)), "only SwiGLU has a limit"


@pytest.mark.parametrize("target", LIMITS)
def test_batch_invariant_mode_has_one_config(target):
    (only,) = warm_configs(
        target=target,
        sm_count=132,
        num_groups=4,
        n=192,
        k=96,
        max_rows=3000,
        activation=Activation.MXFP8,
        batch_invariant=True,
    )
    assert len({batch_invariant_rows(4)}) == 1
    if isinstance(only, GemmConfig):
        assert only.token_format is TokenFormat.BF16_PERMUTED


def test_formats():
    def of(target, rows, activation=Activation.MXFP8, **how):
        return token_format_of(target=target, activation=activation, num_groups=8, num_rows=rows, **how)

    assert of("sm_90a", 8) is TokenFormat.MXFP8_FP32_SCALES and of("sm_90a", 8000) is TokenFormat.BF16_PERMUTED
    assert of("sm_90a", 8, Activation.BF16) is TokenFormat.BF16_PERMUTED
    assert of("sm_90a", 8, batch_invariant=True) is TokenFormat.BF16_PERMUTED
    assert of("sm_107a", 8) is TokenFormat.MXFP8_TCGEN05
    with pytest.raises(ValueError, match="served on sm_90 only, this is sm_100f: set ROSE_ACTIVATION=mxfp8"):
        of("sm_100f", 8, Activation.BF16)
    with pytest.raises(ValueError, match="unknown target 'sm_80'"):
        of("sm_80", 8)


def test_sizes_that_no_kernel_takes_are_named():
    for target, n, k, message in (
        ("sm_90a", 100, 64, "N is 100"),
        ("sm_90a", 64, 48, "K is 48"),
        ("sm_100a", 100, 64, "n = 100"),
        ("sm_100a", 64, 48, "k = 48"),
    ):
        call = Call(
            target=target,
            sm_count=132,
            num_groups=1,
            n=n,
            k=k,
            token_format=TokenFormat.BF16_PERMUTED,
            rounding=Rounding.RCEIL,
        )
        with pytest.raises(ValueError, match=message):
            plan.plan(call, expected_rows=4, num_rows=4)
