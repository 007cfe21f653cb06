"""What the compiler makes for every target, read on a machine with no GPU."""

import cutlass.cute
import cutlass.memory
import pytest
import tiny_kernel

from vllm_rose_plugin.kernels.jit.compile import compile_to_artifacts
from vllm_rose_plugin.kernels.jit.sass import resource_usage, sass
from vllm_rose_plugin.kernels.jit.targets import LIMITS, TARGETS, limits_of


@pytest.mark.parametrize("target", LIMITS)
def test_machine_code_of_every_target(target):
    made = compile_to_artifacts(family="tiny", config=tiny_kernel.TinyConfig(), build=tiny_kernel.build, target=target)
    assert f".target {target}" in made.ptx
    text = sass(made.cubin)
    assert f".target\t{target.rstrip('f')}" in text  # a family's code carries its base name
    assert "LDG" in text and "STG" in text and "FMUL" in text
    assert "STL" not in text and "LDL" not in text
    usage = resource_usage(made.cubin)
    assert usage["stack"] == 0 and usage["shared"] == 0
    assert 0 < usage["registers"] <= 24


def test_limits_agree_with_the_dsl():
    for target, limits in LIMITS.items():
        assert limits.shared_memory == cutlass.memory.get_smem_capacity_in_bytes(target.rstrip("af"))
        if limits.tmem_columns:
            assert limits.tmem_columns == cutlass.cute.arch.get_max_tmem_alloc_cols(target.rstrip("af"))


def test_every_target_has_limits():
    assert set(TARGETS.values()) < set(LIMITS)
    with pytest.raises(ValueError, match=r"sm_80.*sm_90a"):
        limits_of("sm_80")
