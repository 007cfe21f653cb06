"""What a draft runs on: kernels by its own quantization and the backends that were named, sampling on a CPU."""

from types import SimpleNamespace

import pytest
import torch

from vllm_rose_plugin.layers import gpu, mtp_config
from vllm_rose_plugin.seams import cpu_sampling

pytestmark = pytest.mark.slow

ROSE, AUTO = "rose_cutedsl", "auto"


@pytest.fixture
def chosen(monkeypatch):
    from vllm import platforms
    from vllm.config import KernelConfig

    def choose(*, cpu, mxfp8, moe, linear, per_quant=None, obstacle="", ranks=1, all_to_all="naive"):
        monkeypatch.setattr(platforms, "current_platform", SimpleNamespace(is_cpu=lambda: cpu))
        monkeypatch.setattr(mtp_config, "mxfp8_share", lambda quant_config: "all" if mxfp8 else "none")
        target = KernelConfig()
        for name, value in (("moe_backend", moe), ("linear_backend", linear), ("linear_backend_per_quant", per_quant)):
            object.__setattr__(target, name, value)
        monkeypatch.setattr(
            "vllm.config.utils.replace",
            lambda config, **changes: SimpleNamespace(
                **{"moe_backend": config.moe_backend, "linear_backend": config.linear_backend} | changes
            ),
        )
        monkeypatch.setattr(gpu, "obstacle", lambda: obstacle)
        parallel = SimpleNamespace(data_parallel_size=ranks, all2all_backend=all_to_all)
        whole = SimpleNamespace(kernel_config=target, parallel_config=parallel)
        own = mtp_config._kernel_config(whole, SimpleNamespace())
        return own.moe_backend, own.linear_backend

    return choose


@pytest.mark.parametrize(
    ("cpu", "mxfp8", "moe", "linear", "expected"),
    [
        (True, True, AUTO, AUTO, (ROSE, ROSE)),
        (True, True, "triton", AUTO, ("triton", ROSE)),
        (True, True, ROSE, ROSE, (ROSE, ROSE)),
        (False, True, AUTO, AUTO, (ROSE, ROSE)),
        (False, True, ROSE, ROSE, (ROSE, ROSE)),
        (False, True, "marlin", ROSE, ("marlin", ROSE)),
        (True, False, ROSE, ROSE, (AUTO, AUTO)),
        (False, False, ROSE, AUTO, (AUTO, AUTO)),
        (False, False, "triton", AUTO, ("triton", AUTO)),
    ],
)
def test_kernels_of_a_draft(chosen, cpu, mxfp8, moe, linear, expected):
    assert chosen(cpu=cpu, mxfp8=mxfp8, moe=moe, linear=linear) == expected


@pytest.mark.parametrize("why", [{"obstacle": "an old GPU"}, {"ranks": 2}])
def test_a_draft_that_our_kernels_cannot_serve_takes_vllms(chosen, why):
    assert chosen(cpu=False, mxfp8=True, moe=AUTO, linear=AUTO, **why) == (AUTO, AUTO)


def test_our_all_to_all_feeds_our_experts_with_data_parallelism(chosen):
    named = {"ranks": 2, "all_to_all": "rose_nvlink"}
    assert chosen(cpu=False, mxfp8=True, moe=AUTO, linear=AUTO, **named) == (ROSE, ROSE)
    assert chosen(cpu=False, mxfp8=False, moe=AUTO, linear=AUTO, **named) == (AUTO, AUTO)


def test_a_linear_backend_that_is_named_for_mxfp8_stays(chosen):
    named = {"mxfp8": "emulation"}
    assert chosen(cpu=True, mxfp8=True, moe=AUTO, linear=AUTO, per_quant=named) == (ROSE, AUTO)


@pytest.mark.parametrize("built", [False, True])
def test_sampling_stays_vllms_where_no_draft_of_ours_was_built(monkeypatch, built):
    monkeypatch.setattr(mtp_config, "_built", built)
    given = []
    expand = cpu_sampling._wrap_expand(lambda *args: given.append(args))
    output = torch.full((4,), -1.0)
    expand(output, torch.tensor([0.7, 0.0]), torch.tensor([1, 4]), 0, 1, MAX_NUM_TOKENS=32)
    assert output.tolist() == pytest.approx([0.7, 1, 1, 1] if built else [-1.0] * 4)
    assert [args[3:] for args in given] == ([] if built else [(0, 1, 32)])
