"""vLLM's own passes and ours over functions of two ranks, with the groups and the fakes of communicator.py.

Arguments: those of communicator.py, a model's directory and ``auto``.
"""

import json
import os
import pickle
import subprocess
import sys
import tempfile
from pathlib import Path

import communicator as base
import torch
from vllm.compilation.passes.inductor_pass import InductorPass, pass_context
from vllm.compilation.passes.ir.inplace_functionalization import VllmIRInplaceFunctionalizationPass
from vllm.compilation.passes.pass_manager import PostGradPassManager
from vllm.config import CompilationMode, set_current_vllm_config
from vllm.config.utils import Range
from vllm.distributed import parallel_state
from vllm.distributed.communication_op import tensor_model_parallel_all_reduce
from vllm.engine.arg_utils import EngineArgs
from vllm.model_executor.layers.layernorm import GemmaRMSNorm, RMSNorm
from vllm.usage.usage_lib import UsageContext

from vllm_rose_plugin.layers import all_reduce_check, live_groups, report

RANK, HIDDEN, TOKENS = base.RANK, base.HIDDEN, base.TOKENS
FUSED_ROWS = 8


class FakeNorm:
    """One launch up to FUSED_ROWS rows; `mark` is added to its result, so that it is known from what isn't fused."""

    mark = 0

    why = f"in one launch with residual and norm for 1 to {FUSED_ROWS} tokens"

    def __init__(self, reduce, **shape):
        self.reduce = reduce
        reduce.norm_shape = {name: str(value) for name, value in shape.items()}

    def takes(self, x, residual, weight):
        return "a tuning" if len(x) <= FUSED_ROWS else None

    def __call__(self, x, *, residual, weight, eps, tuning):
        rows, kept = reference(self.reduce(x), residual, weight, eps)
        return rows + FakeNorm.mark, kept


def reference(rows, residual, weight, eps):
    z = rows.float() + residual.float()
    scaled = z * torch.rsqrt(z.pow(2).mean(-1, keepdim=True) + eps)
    return scaled.to(weight.dtype) * weight, z.to(residual.dtype)


def config():
    """As it is where there are GPUs: for a CPU the check says that ``auto`` has nothing to do, and leaves."""
    made = EngineArgs(
        model=base.MODEL,
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        max_num_batched_tokens=TOKENS,
        max_model_len=TOKENS,
        additional_config={"rose": {"all_reduce": "auto", "all_reduce_norm": "auto"}},
    ).create_engine_config(UsageContext.ENGINE_CONTEXT)
    made.parallel_config.rank = RANK
    made.compilation_config.mode = CompilationMode.VLLM_COMPILE
    for _ in range(2):  # vLLM may check a configuration again
        all_reduce_check._add_norm_pass(made)
    return made


def norm_of(dtype=torch.bfloat16):
    norm = RMSNorm(HIDDEN, eps=1e-5, dtype=dtype)
    norm.weight.data.copy_(torch.linspace(0.5, 2, HIDDEN))
    return norm


def rows_of(count, seed, dtype=torch.bfloat16):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, HIDDEN, generator=generator).to(dtype)


def compiled(function, vllm_config):
    """The function, compiled as vLLM's backend does; and the ops of its graph behind all passes but the lowering."""
    manager, seen = PostGradPassManager(), []
    manager.configure(vllm_config)
    manager.fix_functionalization = lambda graph: (
        None
    )  # asks for ops that vLLM has compiled, whether they are used or not
    manager.add(vllm_config.compilation_config.inductor_compile_config["post_grad_custom_post_pass"])

    class Look(InductorPass):
        def __call__(self, graph):
            seen[:] = sorted(str(n.target) for n in graph.nodes if "norm" in str(n.target) or "reduce" in str(n.target))

    manager.add(Look())
    options = {
        "post_grad_custom_post_pass": manager,
        "pre_grad_custom_pass": VllmIRInplaceFunctionalizationPass(vllm_config),
    }
    return torch.compile(function, fullgraph=True, dynamic=True, options=options), seen


def functions():
    norm, other, wide, gemma = norm_of(), norm_of(), norm_of(torch.float32), GemmaRMSNorm(HIDDEN).bfloat16()
    reduce = tensor_model_parallel_all_reduce

    def twice(x, residual):
        x, residual = norm(reduce(x * 2), residual)
        return other(reduce(x + 1), residual)

    def behind_no_ops(x, residual):
        """As a MoE layer gives its sum: sliced to what it is, and viewed as what it was."""
        return norm(reduce(x * 2)[..., :HIDDEN].view(x.shape), residual)

    def used_elsewhere(x, residual):
        total = reduce(x * 2)
        return *norm(total.clone(), residual), total + 1

    def without_residual(x, residual):
        return norm(reduce(x * 2)), residual

    def float32(x, residual):
        return wide(reduce(x.float() * 2), residual.float())

    def one_added_to_the_weight(x, residual):
        return gemma(reduce(x * 2), residual)

    def three_dimensions(x, residual):
        return norm(reduce((x * 2).view(-1, 2, HIDDEN)), residual.view(-1, 2, HIDDEN))

    def no_sum(x, residual):
        return norm(x * 2, residual)

    added = one_added_to_the_weight
    return [twice, behind_no_ops, used_elsewhere, without_residual, float32, added, three_dimensions, no_sum]


def counts():
    from vllm_rose_plugin.kernels import call_counts

    return {op: call_counts.snapshot().get(op, {}) for op in ("all_reduce", "all_reduce_norm")}


def fused(vllm_config):
    """For each function, with few rows and with many: the ops of its one graph, results beside eager ones, calls."""
    found, FakeNorm.mark = {}, 0
    for function in functions():
        torch._dynamo.reset()
        made, ops = compiled(function, vllm_config)
        entry = found[function.__name__] = {"ops": ops, "same": [], "calls": []}
        for count in (4, 2 * FUSED_ROWS):
            x, residual = rows_of(count, RANK), rows_of(count, 7)
            expected = function(x.clone(), residual.clone())
            before = counts()["all_reduce_norm"]
            with pass_context(Range(1, TOKENS)):
                results = made(x.clone(), residual.clone())
            after = counts()["all_reduce_norm"]
            entry["calls"].append({path: n for path in after if (n := after[path] - before.get(path, 0))})
            entry["same"] += [
                torch.allclose(a.float(), b.float(), rtol=0.02, atol=0.02)
                for a, b in zip(results, expected, strict=True)
            ]
    return found


def sizes(vllm_config):
    """Calls of the op with few rows and with many: paths, results against the reference, inputs left alone."""
    found, FakeNorm.mark = {}, 1000
    for count in (1, FUSED_ROWS, FUSED_ROWS + 1, TOKENS, TOKENS + 1):
        given = rows_of(count, RANK), rows_of(count, 7), norm_of().weight.data
        kept = [tensor.clone() for tensor in given]
        before = counts()
        rows, new = torch.ops.rose.all_reduce_norm(*given, 1e-5, "tp:0")
        after = counts()
        total = (rows_of(count, 0).float() + rows_of(count, 1).float()).bfloat16()
        right, right_new = reference(total, *kept[1:], 1e-5)
        found[count] = {
            "paths": {op: [path for path in after[op] if after[op][path] != before[op].get(path, 0)] for op in after},
            "rows": bool(torch.equal(rows, right + (FakeNorm.mark if count <= FUSED_ROWS else 0))),
            "new": bool(torch.equal(new, right_new)),
            "inputs": all(torch.equal(a, b) for a, b in zip(given, kept, strict=True)),
            "new memory": len({t.untyped_storage().data_ptr() for t in (rows, new, *given)}) == 5,
        }
    return found


def result_of(vllm_config):
    passes = vllm_config.compilation_config.inductor_compile_config
    added = passes["post_grad_custom_post_pass"]
    travelled = pickle.loads(pickle.dumps(vllm_config))
    there = travelled.compilation_config.inductor_compile_config["post_grad_custom_post_pass"]
    result = {
        "pass": type(added).__name__,
        "travels": type(there) is type(added) and there.uuid() == added.uuid(),
        "hash": vllm_config.compute_hash() == travelled.compute_hash(),
        "shape": base.MADE[0].norm_shape,
        "recorded": vllm_config.additional_config["rose"],
        "stats": report.snapshot(rank=RANK)["all_reduce"],
        "sizes": sizes(vllm_config),
        "fused": fused(vllm_config),
    }
    # As where `auto` finds nothing of ours to work: the graphs have the op all the same.
    live_groups.discard("tp:0")
    parallel_state.get_tp_group().device_communicator.rose = None
    before = counts()
    given = rows_of(2, RANK), rows_of(2, 7), norm_of().weight.data
    found = torch.ops.rose.all_reduce_norm(*given, 1e-5, "tp:0")
    total = (rows_of(2, 0).float() + rows_of(2, 1).float()).bfloat16()
    right = reference(total, *given[1:], 1e-5)
    result["without a group"] = {
        "same": [torch.allclose(a.float(), b.float(), rtol=0.02, atol=0.02) for a, b in zip(found, right, strict=True)],
        "grown": [op for op in before if counts()[op] != before[op]],
    }
    return result


def main():
    torch._inductor.config.force_disable_caches = True
    base.fake_kernels()
    from vllm_rose_plugin.layers import group_all_reduce

    group_all_reduce.make_norm = lambda reduce, **shape: FakeNorm(reduce, **shape)
    vllm_config = config()
    with set_current_vllm_config(vllm_config), tempfile.TemporaryDirectory() as directory:
        directory = os.environ.get("PROBE_DIRECTORY", directory)
        os.environ["VLLM_DIST_IDENT"] = Path(directory).name
        if RANK == 0:
            environment = {**os.environ, "PROBE_DIRECTORY": directory, "PROBE_RANK": "1"}
            command = [sys.executable, *sys.argv]
            other = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
        parallel_state.init_distributed_environment(2, RANK, f"file://{directory}/rendezvous", RANK, "gloo")
        parallel_state.initialize_model_parallel(2, 1)
        result = result_of(vllm_config)
        path = Path(directory, "other.json")
        if RANK == 1:
            path.write_text(json.dumps(result))
        elif other.wait(timeout=200) == 0:
            result["other"] = json.loads(path.read_text())
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
