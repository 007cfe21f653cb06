"""Our all-to-all in both vLLM versions: a layer of experts over two data-parallel ranks, which are CPU processes."""

import socket
from types import SimpleNamespace

import pytest
import torch

from vllm_rose_plugin.layers import all_to_all_check

slow = pytest.mark.slow
WAYS = (("mxfp8", "reference"), ("bf16", "reference"), ("mxfp8", "sm_90a"), ("bf16", "sm_90a"), ("mxfp8", "sm_100a"))


@pytest.fixture(scope="module")
def port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return str(probe.getsockname()[1])


@pytest.fixture(params=WAYS, ids="-".join)
def way(request):
    return request.param


@pytest.fixture
def ranks(probe, version, way, port):
    activation, target = way
    first = probe(version, "all_to_all", activation, port, target)
    return first, first["other"]


@slow
def test_vllms_group_and_layers_get_ours(ranks, way):
    for rank in ranks:
        assert rank["manager"] == "RoseAll2AllManager"
        assert (rank["prepare"], rank["experts"]) == ("RosePrepareAndFinalize", "RoseCuteDslExperts")
        assert rank["payload"] == {"mxfp8": "mxfp8", "bf16": "bfloat16"}[way[0]]
        assert rank["shared"], "layers of a shape have one exchange"
        assert rank["reduced"] == [True, True]


@slow
def test_tokens_of_every_rank_meet_all_experts(ranks):
    """Full and small steps, one with no token on a rank and one with padding only; NaN in the padding."""
    for rank in ranks:
        assert rank["wrong"] == [0] * 7
        assert rank["calls"] == {"dp_dispatch": {"reference": 7}, "dp_combine": {"reference": 7}}


@slow
def test_micro_batches_of_vllms_threads_have_an_exchange_each_and_one_order_on_all_ranks(ranks):
    """Three layers; while one's tokens travel, vLLM runs the other's attention, or experts."""
    layer = [
        [number, f"{way}_{half}"]
        for way in ("dispatch", "combine")
        for number in (0, 1)
        for half in ("send", "receive")
    ]
    assert [rank["overlapping"] for rank in ranks] == [[[0, 0], 3 * layer]] * 2


@slow
def test_halves_are_one_call_where_nothing_runs_between_them(ranks):
    """Which NVLink has in one launch; `dispatch_send` and so on are what one call is made of between processes."""
    for rank in ranks:
        (wrong, alone), (wrong_too, beside) = rank["beside_shared_experts"]
        assert wrong == wrong_too == 0
        assert alone == ["dispatch", "dispatch_send", "combine", "combine_send", "combine_receive"]
        assert beside == ["dispatch", "dispatch_send", "combine_send", "combine_receive"]


@pytest.mark.parametrize(
    ("sizes", "has"),
    [({}, False), ({"n_shared_experts": None}, False), ({"n_shared_experts": 1}, True),
     ({"shared_expert_intermediate_size": 0}, False), ({"shared_expert_intermediate_size": 512}, True)],
)  # fmt: skip
def test_models_with_shared_experts_are_known(sizes, has):
    from vllm_rose_plugin.layers.prepare_finalize import has_shared_experts

    assert has_shared_experts(SimpleNamespace(hf_text_config=SimpleNamespace(**sizes))) is has
    assert not has_shared_experts(None)


@pytest.mark.parametrize("balanced", [False, True])
def test_shared_experts_run_while_results_travel_unless_experts_are_balanced(monkeypatch, balanced):
    """Asked of vLLM itself, which then runs them first."""
    from vllm.model_executor.layers.fused_moe.runner.shared_experts import SharedExperts, SharedExpertsOrder

    from vllm_rose_plugin.layers import prepare_finalize

    parallel = SimpleNamespace(enable_eplb=balanced, all2all_backend="rose_nvlink", use_fi_nvl_two_sided_kernels=False)
    moe_config = SimpleNamespace(moe_parallel_config=parallel)
    model_config = SimpleNamespace(hf_text_config=SimpleNamespace(n_shared_experts=1))
    current = lambda: SimpleNamespace(model_config=model_config, lora_config=None)  # noqa: E731
    monkeypatch.setattr(prepare_finalize, "get_current_vllm_config_or_none", current)
    made = prepare_finalize.RosePrepareAndFinalize(manager=None, moe_config=moe_config)
    shared = SharedExperts(torch.nn.Identity(), moe_config, False, made.supports_async)
    order = shared._determine_shared_experts_order(torch.zeros(1, 1))
    assert (order == SharedExpertsOrder.MK_INTERNAL_OVERLAPPED) is made._shared_experts is not balanced


@slow
def test_kernels_of_a_gpu_take_what_comes(ranks, way):
    """With room for the tokens of all ranks; codes where the exchange sends them."""
    if way[1] == "reference":
        assert "launches" not in ranks[0]
        return
    for rank in ranks:
        assert rank["launches"] == ["combine", "route_and_dispatch", "w13", "w2"]
        assert rank["warmed"] == [way[0] == "mxfp8", rank["most_tokens"]]
        assert rank["needed"] == [2, way[0] == "mxfp8"]


@slow
def test_too_many_tokens_are_refused_before_anything_is_sent(ranks):
    for rank in ranks:
        assert "17" in rank["many"] and "max_tokens=16" in rank["many"] and "--max-num-batched-tokens" in rank["many"]
        assert rank["after"] == 0, "and the next step works"


@slow
def test_a_rank_that_was_killed_is_a_named_error_within_the_deadline(ranks):
    """After it took its part in dispatch."""
    first, _ = ranks
    message, seconds = first["late"]
    assert "rank 0 waited 2 s for rank 1 in phase 'combine row' of epoch 14" in message
    assert "all_to_all_timeout" in message and 1.9 < seconds < 6
    for rank in ranks:
        assert rank["fault"] == [False, [0, 0], None]
    assert first["late_fault"] == [True, [0, 1]] and first["late_clean"] == message
    assert first["late_worker"] == message, "as the worker finds it around a step"


@slow
def test_which_classes_of_experts_it_feeds(probe, version, port):
    found = probe(version, "all_to_all", "mxfp8", port, "reference")["refusals"]
    classes = found["classes"]
    for name in ("RoseCuteDslExperts", "TritonExperts", "DeepGemmExperts", "CutlassExpertsFp8"):
        assert classes[name] is None
    assert len(classes) > 40
    for name, reason in classes.items():
        assert (reason is None) == (found["kinds"][name] == "tokens"), (name, reason)
        assert reason is None or "rose_nvlink" in reason
    assert "routes in the kernel" in classes["TrtLlmFp8ExpertsMonolithic"]
    for name in ("RoseCuteDslBatchedExperts", "BatchedDeepGemmExperts"):
        assert "sorted by expert" in classes[name]
    assert "one scale for all tokens" in found["tensor"]
    assert "--dtype bfloat16" in found["dtype"] and "LoRA" in found["lora"]
    ranks_flags = "--data-parallel-size times --tensor-parallel-size"
    assert "7 experts over 2 ranks" in found["experts"] and found["experts"].endswith(ranks_flags)
    assert "3000 ranks; it must be 2 to 72" in found["ranks"] and found["ranks"].endswith(ranks_flags)
    assert ranks_flags not in found["tokens"]
    assert "max_tokens=1048576" in found["tokens"] and "--max-num-batched-tokens" in found["tokens"]
    assert found["selection"].startswith("--moe-backend rose_cutedsl can't serve") and "float16" in found["selection"]


@slow
def test_experts_outside_of_modular_kernels_end_start_up(probe, version, port):
    found = probe(version, "all_to_all", "mxfp8", port, "reference")["logits"]
    assert "--all2all-backend rose_nvlink can't serve this model" in found and "--moe-backend" in found


@slow
def test_the_name_is_legal_and_deals_tokens_out_over_tensor_parallel_ranks(probe, version, port):
    found = probe(version, "all_to_all", "mxfp8", port, "reference")["parallel"]
    wrong = found.pop("wrong")
    assert found == {"ours": True, "one": False, "tensor": False, "in": True, "out": False}
    assert "rose_nvlink" in wrong and "rose_nvlinks" in wrong and "allgather_reducescatter" in wrong


@slow
def test_micro_batches_are_legal_with_our_name_and_still_refused_with_others(probe, version, port):
    found = probe(version, "all_to_all", "mxfp8", port, "reference")["micro_batches"]
    assert found["rose_nvlink"] == 2 and found["deepep_low_latency"] == 2
    refused = found["flashinfer_nvlink_two_sided"]
    assert "Microbatching currently only supports" in refused


@slow
def test_steps_of_one_rank_alone_are_refused(ranks):
    for rank in ranks:
        assert "can't leave ranks out" in rank["mask"] and "--enable-elastic-ep" in rank["mask"]


@slow
def test_no_cuda_context(ranks):
    assert ranks[0]["cuda_starts"] == 0


@pytest.fixture
def manager(monkeypatch):
    """Makes a manager of four ranks, on one host or several."""
    from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase

    from vllm_rose_plugin.layers import all_to_all

    def made(*, several_hosts):
        def base(self, cpu_group, tcp_store_group):
            self.internode, self.world_size = several_hosts, 4

        monkeypatch.setattr(All2AllManagerBase, "__init__", base)
        return all_to_all.RoseAll2AllManager(None)

    config = SimpleNamespace(parallel_config=SimpleNamespace(use_ubatching=False, enable_expert_parallel=True))
    monkeypatch.setattr(all_to_all, "get_current_vllm_config", lambda: config)
    monkeypatch.setattr(all_to_all.settings, "current", lambda: SimpleNamespace(all_to_all_timeout=1.0))
    return made


def test_without_a_gpu_ranks_on_several_hosts_are_refused_when_the_group_is_made(manager):
    assert manager(several_hosts=False).fault() is None
    with pytest.raises(ValueError, match="the 4 ranks are on several: set --data-parallel-size-local"):
        manager(several_hosts=True)


def test_micro_batches_leave_all_sms_to_deepgemm(manager, monkeypatch):
    from vllm.v1.worker import ubatch_utils

    communicator = SimpleNamespace(all2all_manager=manager(several_hosts=False))
    monkeypatch.setattr(ubatch_utils, "get_ep_group", lambda: SimpleNamespace(device_communicator=communicator))
    monkeypatch.setattr(ubatch_utils, "SMControlContextManager", lambda **given: given)
    parallel = SimpleNamespace(enable_expert_parallel=True, enable_dbo=True, all2all_backend="rose_nvlink")
    assert ubatch_utils.create_sm_control_context(parallel)["comm_sms"] == 0


def check(monkeypatch, *, cuda=False, lora=None, dtype=torch.bfloat16, eager=True, **parallel):
    import vllm.platforms

    platform = SimpleNamespace(is_cuda=lambda: cuda, is_cpu=lambda: not cuda, device_name="cpu")
    monkeypatch.setattr(vllm.platforms, "_current_platform", platform, raising=False)
    monkeypatch.setattr(vllm.platforms, "current_platform", platform, raising=False)
    values = {"data_parallel_size": 2, "enable_expert_parallel": True, "prefill_context_parallel_size": 1}
    all_to_all_check.check_config(
        SimpleNamespace(
            parallel_config=SimpleNamespace(**{**values, "enable_elastic_ep": False, **parallel}),
            lora_config=lora,
            model_config=SimpleNamespace(dtype=dtype, enforce_eager=eager),
        )
    )


def test_what_can_be_served_is_not_refused(monkeypatch):
    check(monkeypatch)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"data_parallel_size": 1}, "--data-parallel-size N"),
        ({"enable_expert_parallel": False}, "--enable-expert-parallel"),
        ({"prefill_context_parallel_size": 2}, "--prefill-context-parallel-size"),
        ({"enable_elastic_ep": True}, "--enable-elastic-ep"),
        ({"lora": object()}, "--enable-lora"),
        ({"dtype": torch.float16}, "--dtype bfloat16"),
        ({"eager": False}, "--enforce-eager"),
        ({"cuda": True}, "can't serve here"),
    ],
)
def test_what_cannot_be_served_is_named_with_the_way_out(monkeypatch, changes, reason):
    if changes.get("cuda"):
        monkeypatch.setattr("vllm_rose_plugin.layers.gpu.obstacle", lambda: "the kernels can't be compiled")
    with pytest.raises(ValueError, match="--all2all-backend rose_nvlink") as caught:
        check(monkeypatch, **changes)
    assert reason in str(caught.value)
