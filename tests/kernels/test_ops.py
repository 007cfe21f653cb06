"""torch.ops.rose: schemas, fake implementations, torch.compile, call counts, registration."""

import importlib
import sys
import threading

import pytest
import torch
from moe_chain import moe_chain, random_moe

import vllm_rose_plugin.kernels.ops as ops
from vllm_rose_plugin.kernels import call_counts

rose = torch.ops.rose


def samples():
    """(op, positional arguments, keyword arguments) for opcheck, each variant of each op once."""
    x, ids, weights, w13, w2 = random_moe(1, tokens=5, dtype=torch.bfloat16)
    expert_map = torch.tensor([1, -1, 0, -1], dtype=torch.int32)
    for rounding in ("rceil", "floor"):
        yield rose.mxfp8_quantize, (x,), {"rounding": rounding}
    weight, weight_scales = w2[0][0], w2[1][0]
    codes, scales = rose.mxfp8_quantize(x)
    yield rose.mxfp8_linear, (x, weight, weight_scales), {}
    yield rose.mxfp8_linear, (x, weight, weight_scales), {"activation": "bf16", "bias": torch.ones(64)}
    yield rose.mxfp8_linear, (codes, weight, weight_scales), {"x_scales": scales, "out_dtype": torch.float16}
    yield rose.moe_route, (ids,), {"num_local_experts": 4, "alignment": 32}
    yield rose.moe_route, (ids.int(),), {"num_local_experts": 2, "expert_map": expert_map}
    counts, offsets, slots = rose.moe_route(ids, num_local_experts=4, alignment=32)
    for options in ({}, {"topk_weights": weights}, {"activation": "bf16"}):
        yield rose.moe_dispatch, (x, slots), {"num_local_experts": 4, "alignment": 32, **options}
    tokens, token_scales = rose.moe_dispatch(x, slots, num_local_experts=4, alignment=32)
    yield rose.grouped_gemm, (tokens, token_scales, offsets, counts, *w13), {"out_dtype": torch.bfloat16}
    plain, nothing = rose.moe_dispatch(x, slots, num_local_experts=4, alignment=32, activation="bf16")
    yield rose.grouped_gemm, (plain, nothing, offsets, counts, *w13), {}
    yield rose.grouped_gemm, (plain, None, offsets, counts, *w13), {"out_dtype": torch.float32}
    for options in ({}, {"activation": "bf16"}, {"limit": 7.0}):
        yield rose.swiglu_quantize, (torch.randn(6, 128),), options
    y = torch.randn(slots.max() + 1, 64)
    yield rose.moe_combine, (y, slots), {"topk_weights": weights, "out_dtype": torch.bfloat16}
    yield rose.moe_combine, (y, slots), {}


SAMPLES = list(samples())


def tensors(tree) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(tree) if isinstance(leaf, torch.Tensor)]


def tensor_bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("index", range(len(SAMPLES)), ids=[f"{i}-{op}" for i, (op, _, _) in enumerate(SAMPLES)])
def test_opcheck(index):
    op, args, kwargs = SAMPLES[index]
    checks = ["test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"]
    if any(tensor.dtype == torch.float8_e4m3fn for tensor in tensors((args, kwargs))):
        checks.remove("test_schema")  # it compares inputs by allclose, which torch lacks for float8
    results = torch.library.opcheck(op.default, args, kwargs, test_utils=checks)
    assert results == dict.fromkeys(checks, "SUCCESS")


@pytest.mark.parametrize("index", range(len(SAMPLES)), ids=[f"{i}-{op}" for i, (op, _, _) in enumerate(SAMPLES)])
def test_inputs_are_neither_changed_nor_returned(index):
    op, args, kwargs = SAMPLES[index]
    before = [tensor_bytes(tensor).clone() for tensor in tensors((args, kwargs))]
    results = tensors(op(*args, **kwargs))
    assert all(map(torch.equal, before, map(tensor_bytes, tensors((args, kwargs)))))
    given = {t.untyped_storage().data_ptr() for t in tensors((args, kwargs)) if t.numel()}
    returned = [t.untyped_storage().data_ptr() for t in results if t.numel()]
    assert len(set(returned)) == len(returned) and not given & set(returned)


def test_every_op_has_samples():
    assert {op._qualified_op_name.split("::")[1] for op, _, _ in SAMPLES} == set(ops.SCHEMAS)


@pytest.mark.parametrize("tokens", [0, 1])
def test_fakes_agree_for_few_tokens(tokens):
    x, ids, weights, w13, w2 = random_moe(2, tokens=tokens)
    for activation in ("mxfp8", "bf16"):
        with torch._subclasses.FakeTensorMode() as mode:
            fake = [mode.from_tensor(t) for t in (x, ids, weights, *w13, *w2)]
            out = moe_chain(*fake[:3], fake[3:5], fake[5:], alignment=32, activation=activation)
        real = moe_chain(x, ids, weights, w13, w2, alignment=32, activation=activation)
        assert (out.shape, out.dtype, out.stride()) == (real.shape, real.dtype, real.stride())


@pytest.mark.parametrize("alignment", [1, 32])
@pytest.mark.parametrize("activation", ["mxfp8", "bf16"])
def test_compiled_chain_equals_eager(activation, alignment):
    torch._dynamo.reset()

    def layer(x, ids, weights, w13, w2):
        return moe_chain(x * 2, ids, weights, w13, w2, alignment=alignment, activation=activation) + x

    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=backend)
    for tokens in (33, 2, 7, 64):  # fewer and more (token, k) pairs than experts
        arguments = random_moe(tokens, tokens=tokens, top_k=2, experts=8, dtype=torch.bfloat16)
        assert torch.equal(compiled(*arguments), layer(*arguments))
    assert len(graphs) == 1, "a size was specialized"
    targets = [str(node.target) for node in graphs[0].graph.nodes]
    assert targets.count("rose.grouped_gemm") == 2


@pytest.mark.parametrize("activation", ["mxfp8", "bf16"])
def test_compiled_linear_equals_eager(activation):
    torch._dynamo.reset()
    _, _, _, _, w2 = random_moe(3, tokens=1)
    weight = w2[0][0], w2[1][0]

    def layer(x):
        return rose.mxfp8_linear(x, *weight, activation=activation, bias=x[0])

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (4, 9):
        x = torch.randn(tokens, 64, generator=torch.Generator().manual_seed(tokens)).to(torch.bfloat16)
        assert torch.equal(compiled(x), layer(x))


@pytest.mark.slow
def test_chain_compiled_by_inductor_equals_eager():
    torch._dynamo.reset()
    arguments = random_moe(4, tokens=9, dtype=torch.bfloat16)
    compiled = torch.compile(moe_chain, fullgraph=True)
    assert torch.equal(compiled(*arguments, alignment=32), moe_chain(*arguments, alignment=32))


def test_codes_without_scales_are_refused():
    x, _, _, _, w2 = random_moe(5, tokens=3)
    codes, _ = rose.mxfp8_quantize(x)
    with pytest.raises(TypeError, match="pass their scales"):
        rose.mxfp8_linear(codes, w2[0][0], w2[1][0], out_dtype=torch.float32)


def test_limit_reaches_the_activation():
    x = torch.full((1, 64), 9.0)
    limited, _ = rose.swiglu_quantize(x, activation="bf16", limit=2.0)
    assert torch.allclose(limited, torch.nn.functional.silu(torch.tensor(2.0)) * 2)


def calls(before, after, op) -> int:
    return after[op]["reference"] - before.get(op, {}).get("reference", 0)


def test_calls_are_counted_in_compiled_graphs_too():
    torch._dynamo.reset()
    arguments = random_moe(6, tokens=4)
    compiled = torch.compile(moe_chain, fullgraph=True, backend="aot_eager")
    compiled(*arguments)
    before = call_counts.snapshot()
    compiled(*arguments)
    compiled(*arguments)
    after = call_counts.snapshot()
    expected = {"moe_route": 2, "moe_dispatch": 2, "grouped_gemm": 4, "swiglu_quantize": 2, "moe_combine": 2}
    assert {op: calls(before, after, op) for op in expected} == expected
    assert before["mxfp8_quantize"] == after["mxfp8_quantize"]


def test_counting_from_threads_loses_nothing():
    before = call_counts.snapshot()
    threads = [
        threading.Thread(target=lambda: [call_counts.count("test_op", "test") for _ in range(2000)]) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert "test_op" not in before and call_counts.snapshot()["test_op"] == {"test": 8000}
    call_counts.snapshot()["test_op"]["test"] = 0  # a copy
    assert call_counts.snapshot()["test_op"] == {"test": 8000}


def test_registering_again_changes_nothing():
    library, x = ops.register(), torch.ones(1, 32)
    schema = str(rose.mxfp8_quantize.default._schema)
    reloaded = importlib.reload(ops)
    del sys.modules[ops.__name__]
    fresh = importlib.import_module(ops.__name__)
    assert reloaded.register() is library and fresh.register() is library
    assert str(rose.mxfp8_quantize.default._schema) == schema
    assert rose.mxfp8_quantize(x)[1].item() == 119  # 1 / 448 <= 2**-8
