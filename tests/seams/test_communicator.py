"""Our all-reduce in the groups of both vLLM versions: two ranks over gloo, a fake in place of the kernels."""

import pytest
from all_reduce_settings import check

from vllm_rose_plugin.config import AllReduceChoice, RoseConfig

slow = pytest.mark.slow


@pytest.fixture
def ranks(probe, version, model):
    first = probe(version, "communicator", model, "auto")
    return first, first["other"]


@slow
def test_only_the_tensor_parallel_group_is_ours_and_it_is_still_vllms_class(ranks):
    for rank in ranks:
        assert rank["communicators"] == {"tp": "RoseCommunicator", "ep": "CudaCommunicator", "world": "NoneType"}
        assert rank["is_cuda_communicator"]
        assert rank["max_bytes"] == [64 * 256 * 2], "most tokens, hidden size, bytes of bfloat16"
        assert rank["stats"] == {"tp:0": "p2p, since there are 2 ranks and NVLS is taken from 4"}


@slow
def test_rows_of_hidden_states_are_ours_and_the_rest_is_vllms(ranks):
    ours, vllms = ["rose_p2p", 0], ["vllm", 0]
    for rank in ranks:
        assert rank["reduced"] == {
            "rows": ours,
            "all": ours,
            "too many": vllms,
            "float32": vllms,
            "int8": vllms,
            "columns": ours,
            "odd": ours,
        }


@slow
def test_a_compiled_graph_gets_to_ours_through_vllms_op(ranks):
    for rank in ranks:
        assert rank["compiled"]["ops"] == ["vllm.all_reduce"] and rank["compiled"]["wrong"] == 0
        assert rank["compiled"]["grown"] == {"rose_p2p": 1, "vllm": 0}


@slow
def test_a_peer_that_did_not_come_is_an_error_in_every_step_of_the_worker(ranks):
    steps = ranks[0]["steps"]
    assert steps["kind"] and steps["before"] == "tokens" and len(steps["errors"]) == 4
    assert all("rank 0 waited 60 s for rank 1" in error for error in steps["errors"])
    assert steps["timeout"] == 60.0, "start-up is over"


@slow
def test_all_kinds_of_results_of_vllms_are_looked_at(ranks):
    assert ranks[0]["adoptable"] == dict.fromkeys(
        (
            "AsyncGPUModelRunnerOutput",
            "AsyncGPUPoolingModelRunnerOutput",
            "AsyncOutput",
            "AsyncPoolingOutput",
        ),
        True,
    )


@slow
def test_groups_live_side_by_side_sleep_and_end(ranks):
    for rank in ranks:
        assert rank["two"] == ["tp:0", "tp:1"] and rank["second"] == 0
        assert rank["one"] == ["tp:0"] and rank["second_log"] == ["close"]
        assert rank["slept"] == ["suspend", "resume", "close"] and rank["still"] == ["rose_p2p", 0]
        assert rank["left"] == []
        assert rank["anew"] == [["tp:2"], ["rose_p2p", 0], 3]


@slow
def test_the_setting_alone_leaves_the_norms_to_vllm(ranks):
    assert ranks[0]["recorded"]["all_reduce"] == "auto" and ranks[0]["recorded"]["qk_norm"] == "off"


@slow
def test_without_the_setting_groups_are_vllms_and_nothing_of_ours_is_imported(probe, version, model):
    first = probe(version, "communicator", model, "")
    for rank in (first, first["other"]):
        assert rank["communicators"] == {"tp": "CudaCommunicator", "ep": "CudaCommunicator", "world": "NoneType"}
        assert rank["imported"] == [] and rank["recorded"] is None and rank["wrong"] == 0
        assert rank["method"].endswith("cuda_communicator.CudaCommunicator.all_reduce")


@slow
def test_no_cuda_context(ranks):
    assert [rank["cuda_starts"] for rank in ranks] == [0, 0]


@pytest.mark.parametrize("choice", ["auto", "p2p", "nvls"])
def test_the_fusion_that_would_go_past_ours_is_off_unless_it_is_asked_for(monkeypatch, lines, choice):
    assert check(monkeypatch, choice) is False and check(monkeypatch, choice, fusion=False) is False
    assert lines == []
    assert check(monkeypatch, choice, fusion=True) is True
    assert len(lines) == 1 and "fuse_allreduce_rms is on" in lines[0] and f'"all_reduce": "{choice}"' in lines[0]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ranks": 1}, "has nothing to do: there is one rank."),
        ({"cuda": False}, "it needs NVIDIA GPUs, and this is cpu."),
    ],
)
def test_auto_says_that_it_has_nothing_to_do(monkeypatch, lines, changes, reason):
    assert check(monkeypatch, "auto", **changes) is None
    assert len(lines) == 1 and reason in lines[0]


@pytest.mark.parametrize("choice", ["p2p", "nvls"])
def test_a_named_way_is_refused_where_there_is_no_gpu(monkeypatch, lines, choice):
    with pytest.raises(ValueError, match=f'"{choice}".* can\'t be served: it needs NVIDIA GPUs, and this is cpu'):
        check(monkeypatch, choice, cuda=False)


def test_nvls_has_no_order_for_batch_invariance(monkeypatch, lines):
    monkeypatch.setenv("VLLM_BATCH_INVARIANT", "1")
    with pytest.raises(ValueError, match=r'VLLM_BATCH_INVARIANT: .*"p2p".* order of ranks'):
        check(monkeypatch, "nvls")
    assert check(monkeypatch, "p2p") is False and check(monkeypatch, "auto") is False


@pytest.mark.parametrize(
    ("given", "environ", "asks"),
    [
        ({}, {}, False),
        ({"all_reduce": "off"}, {"ROSE_ALL_REDUCE": "auto"}, False),
        ({"all_reduce": "p2p"}, {}, True),
        ({}, {"ROSE_ALL_REDUCE": "nvls"}, True),
        ({}, {"ROSE_ALL_REDUCE": "off"}, False),
        ({"qk_norm": "auto"}, {}, False),
    ],
)
def test_which_settings_name_us(given, environ, asks):
    assert RoseConfig.asks_for("all_reduce", {"rose": given}, environ) is asks


def test_the_settings_and_their_typos():
    assert RoseConfig.load(None, {}).all_reduce == "off" and RoseConfig.load(None, {}).all_reduce_timeout == 60.0
    assert RoseConfig.load(None, {"ROSE_ALL_REDUCE": "nvls"}).all_reduce == AllReduceChoice.NVLS
    assert RoseConfig.load(None, {"ROSE_ALL_REDUCE_TIMEOUT": "2.5"}).all_reduce_timeout == 2.5
    with pytest.raises(ValueError, match=r"ROSE_ALL_REDUCE: 'on' is not allowed: .*'auto', 'p2p', 'nvls' or 'off'"):
        RoseConfig.load(None, {"ROSE_ALL_REDUCE": "on"})
    for value in ("0", "-1", "inf", "nan", "soon", "86401"):
        with pytest.raises(ValueError, match=f"ROSE_ALL_REDUCE_TIMEOUT: '{value}' is not allowed"):
            RoseConfig.load(None, {"ROSE_ALL_REDUCE_TIMEOUT": value})


def test_the_deadline_is_hashed_only_where_it_was_changed():
    assert "all_reduce_timeout" not in RoseConfig.load(None, {}).recorded()
    assert RoseConfig.load({"rose": {"all_reduce_timeout": 5}}, {}).recorded()["all_reduce_timeout"] == 5.0
    assert RoseConfig.load(None, {}).recorded()["all_reduce"] == "off"


def test_recipes_know_the_variables():
    from vllm_rose_plugin.recipes.check import environment

    known = {name for value in vars(environment).values() if isinstance(value, tuple | frozenset) for name in value}
    assert {"ROSE_ALL_REDUCE", "ROSE_ALL_REDUCE_TIMEOUT"} <= known
