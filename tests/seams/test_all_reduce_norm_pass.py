"""Our pass among vLLM's own, in both versions: two ranks over gloo, fakes in place of our kernels."""

from types import SimpleNamespace

import pytest
import torch
from all_reduce_settings import check
from torch._subclasses.fake_tensor import FakeTensorMode

from vllm_rose_plugin.config import RoseConfig
from vllm_rose_plugin.layers.all_reduce_norm import PASS_KEY, AllReduceNormPass

slow = pytest.mark.slow
FUSED = ["rose.all_reduce_norm.default"]
UNFUSED = ["vllm.all_reduce.default", "vllm_ir.fused_add_rms_norm.default"]


@pytest.fixture
def ranks(probe, version, model):
    first = probe(version, "all_reduce_norm", model, "auto")
    return first, first["other"]


@slow
def test_the_pass_travels_to_the_workers_and_is_hashed(ranks):
    for rank in ranks:
        assert rank["pass"] == "AllReduceNormPass" and rank["travels"] and rank["hash"]
        assert rank["recorded"]["all_reduce_norm"] == "auto"
        assert rank["shape"] == {"hidden_size": "256", "dtype": "torch.bfloat16", "most_rows": "64"}
        assert rank["stats"]["tp:0"].endswith("; in one launch with residual and norm for 1 to 8 tokens")


@slow
@pytest.mark.parametrize(
    ("function", "ops"),
    [
        ("twice", 2 * FUSED),
        ("behind_no_ops", FUSED),
        ("used_elsewhere", UNFUSED),
        ("without_residual", ["vllm.all_reduce.default", "vllm_ir.rms_norm.default"]),
        ("float32", UNFUSED),
        ("one_added_to_the_weight", UNFUSED),
        ("three_dimensions", UNFUSED),
        ("no_sum", ["vllm_ir.fused_add_rms_norm.default"]),
    ],
)
def test_sums_that_go_into_a_norm_and_nowhere_else_are_fused(ranks, function, ops):
    for rank in ranks:
        found = rank["fused"][function]
        assert found["ops"] == ops and len(found["same"]) >= 4 and all(found["same"])
        fused = ops.count(*FUSED)
        few, many = ({"rose_p2p": fused}, {"unfused": fused}) if fused else ({}, {})
        assert found["calls"] == [few, many], "one graph; whether it is one launch is decided when it runs"


@slow
def test_few_rows_are_one_launch_and_the_rest_are_two(ranks):
    for rank in ranks:
        for count, found in rank["sizes"].items():
            assert found["rows"] and found["new"] and found["inputs"] and found["new memory"], count
            plain, fused = found["paths"]["all_reduce"], found["paths"]["all_reduce_norm"]
            expected = ([], ["rose_p2p"]) if int(count) <= 8 else (["rose_p2p"], ["unfused"])
            assert (plain, fused) == ((["vllm"], ["unfused"]) if int(count) > 64 else expected)


@slow
def test_graphs_with_the_op_run_where_the_group_is_vllms(ranks):
    for rank in ranks:
        assert rank["without a group"] == {"same": [True, True], "grown": ["all_reduce", "all_reduce_norm"]}


def passes_of(monkeypatch, *, norm="auto", present=None, **changes):
    passes = {} if present is None else {PASS_KEY: present}
    check(monkeypatch, "p2p", norm=norm, passes=passes, **changes)
    return passes


def test_the_check_adds_the_pass_once_and_only_if_asked(monkeypatch, lines):
    first = passes_of(monkeypatch)
    assert [type(value) for value in first.values()] == [AllReduceNormPass]
    again = passes_of(monkeypatch, present=first[PASS_KEY])
    assert again[PASS_KEY] is first[PASS_KEY]
    assert passes_of(monkeypatch, norm="off") == {} and lines == []


@pytest.mark.parametrize(
    ("changes", "environ", "reason"),
    [
        ({"eager": True}, {}, "--enforce-eager compiles no graph"),
        ({"mode": 0}, {}, "compilation mode NONE with backend 'inductor' runs no pass of vLLM's; it takes VLLM"),
        ({"mode": 1}, {}, "compilation mode STOCK_TORCH_COMPILE"),
        ({"backend": "eager"}, {}, "compilation mode VLLM_COMPILE with backend 'eager'"),
        ({}, {"VLLM_BATCH_INVARIANT": "1"}, "VLLM_BATCH_INVARIANT wants a token's bits to be the same in any batch"),
    ],
)
def test_nothing_is_added_where_no_graph_can_have_it(monkeypatch, lines, changes, environ, reason):
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert passes_of(monkeypatch, **changes) == {}
    assert len(lines) == 1 and '"all_reduce_norm": "auto"' in lines[0] and reason in lines[0]


def test_one_rank_alone_has_nothing_to_fuse(monkeypatch, lines):
    assert passes_of(monkeypatch, ranks=1) == {}


@slow
def test_workers_time_norms_only_where_graphs_have_them(probe, version, model):
    """Else start-up would time launches that nothing makes, and say that they serve."""
    cases = [
        ({}, {}),
        ({"enforce_eager": True}, {}),
        ({"optimization_level": 0}, {}),
        ({}, {"VLLM_USE_BREAKABLE_CUDAGRAPH": "1"}),
        ({}, {"VLLM_BATCH_INVARIANT": "1"}),
    ]
    found = probe(version, "all_reduce_norm_wish", model, stdin=cases)["found"]
    assert found == [{"asked": True, "pass": True}] + 4 * [{"asked": False, "pass": False}]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_norms_that_are_left_to_vllm_for_their_weight_are_named(lines, dtype):
    import vllm.ir.ops  # noqa: F401  which registers them

    graph = torch.fx.Graph()
    x, residual, weight = (graph.placeholder(name) for name in ("x", "residual", "weight"))
    x.meta["val"] = residual.meta["val"] = torch.empty(3, 256, dtype=torch.bfloat16, device="meta")
    weight.meta["val"] = torch.empty(256, dtype=dtype, device="meta")
    total = graph.call_function(torch.ops.vllm.all_reduce.default, (x, "tp:0"))
    norm = torch.ops.vllm_ir.fused_add_rms_norm.default
    graph.output(graph.call_function(norm, (total, residual, weight, 1e-6)))
    AllReduceNormPass()(graph)
    fused = [node.target for node in graph.nodes if node.op == "call_function"]
    if dtype == torch.bfloat16:
        assert fused == [torch.ops.rose.all_reduce_norm.default] and lines == []
    else:
        assert fused[-1] is norm and len(lines) == 1
        assert "weight is torch.float32 to vLLM" in lines[0] and "takes torch.bfloat16" in lines[0]


@pytest.mark.parametrize("strides", ["rows", "columns"])
def test_results_lie_as_the_compiler_was_told(monkeypatch, strides):
    """Also where what comes in doesn't: the code that inductor makes counts on it."""
    from vllm.distributed import parallel_state

    coordinator = SimpleNamespace(_all_reduce_out_place=torch.clone)
    monkeypatch.setitem(parallel_state._groups, "tp:elsewhere", lambda: coordinator)
    x, residual = (torch.randn(3, 256).bfloat16() for _ in range(2))
    if strides == "columns":
        x, residual = (tensor.t().contiguous().t() for tensor in (x, residual))
    given = x, residual, torch.ones(256).bfloat16()
    real = torch.ops.rose.all_reduce_norm(*given, 1e-6, "tp:elsewhere")
    with FakeTensorMode() as mode:
        told = torch.ops.rose.all_reduce_norm(*map(mode.from_tensor, given), 1e-6, "tp:elsewhere")
    assert [tensor.stride() for tensor in real] == [tensor.stride() for tensor in told] == [(256, 1)] * 2


def test_another_pass_is_not_pushed_aside(monkeypatch, lines):
    with pytest.raises(ValueError, match=rf"all_reduce_norm.* can't be combined with another {PASS_KEY} \('theirs'\)"):
        passes_of(monkeypatch, present="theirs")


@pytest.mark.parametrize("environ", [{}, {"ROSE_ALL_REDUCE": "off"}])
def test_the_setting_needs_our_all_reduce(environ):
    with pytest.raises(ValueError, match=r"'auto' is not allowed: .* set all_reduce to auto, p2p, nvls"):
        RoseConfig.load({"rose": {"all_reduce_norm": "auto"}}, environ)
    with pytest.raises(ValueError, match=r"ROSE_ALL_REDUCE_NORM: 'on' is not allowed: .*'auto' or 'off'"):
        RoseConfig.load(None, {"ROSE_ALL_REDUCE": "auto", "ROSE_ALL_REDUCE_NORM": "on"})
    assert RoseConfig.load(None, {"ROSE_ALL_REDUCE": "auto", "ROSE_ALL_REDUCE_NORM": "auto"}).all_reduce_norm == "auto"
    assert "all_reduce_norm" not in RoseConfig.load(None, {"ROSE_ALL_REDUCE": "auto"}).recorded()
