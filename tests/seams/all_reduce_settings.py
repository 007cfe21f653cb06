"""What our check makes of a configuration of vLLM that has all-reduce set."""

from types import SimpleNamespace

from vllm_rose_plugin.layers import all_reduce_check


def check(monkeypatch, choice, *, cuda=True, ranks=2, fusion=None, norm="off", eager=False, passes=None, **compilation):
    """What becomes of fuse_allreduce_rms."""
    import vllm.config  # which asks the real platform while it is imported
    import vllm.platforms

    platform = SimpleNamespace(is_cuda=lambda: cuda, device_name="cpu")
    monkeypatch.setattr(vllm.platforms, "_current_platform", platform, raising=False)
    monkeypatch.setattr(vllm.platforms, "current_platform", platform, raising=False)
    fusions = SimpleNamespace(fuse_allreduce_rms=fusion)
    all_reduce_check.check_config(
        SimpleNamespace(
            additional_config={"rose": {"all_reduce": choice, "all_reduce_norm": norm}},
            model_config=SimpleNamespace(enforce_eager=eager),
            parallel_config=SimpleNamespace(tensor_parallel_size=ranks),
            compilation_config=SimpleNamespace(
                **{"mode": 3, "backend": "inductor", **compilation}, pass_config=fusions, inductor_compile_config=passes
            ),
        )
    )
    return fusions.fuse_allreduce_rms
