"""vLLM's groups of two ranks with its CUDA communicator on a CPU: gloo under it, a fake in place of our kernels.

Arguments: a model's directory, the value of all_reduce ("" for none). What CUDA lacks here falls back to gloo in vLLM
itself; the platform's answers that lead to the CUDA communicator and to custom ops are set.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import torch
from vllm.config import set_current_vllm_config
from vllm.distributed import parallel_state
from vllm.distributed.communication_op import tensor_model_parallel_all_reduce
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.outputs import AsyncModelRunnerOutput

MODEL, CHOICE = sys.argv[1:3]
RANK = int(os.environ.get("PROBE_RANK", 0))
HIDDEN, TOKENS = 256, 64
CUDA_STARTS = []
torch.cuda._lazy_init = lambda: CUDA_STARTS.append(1)

type(current_platform).get_device_communicator_cls = classmethod(
    lambda cls: "vllm.distributed.device_communicators.cuda_communicator.CudaCommunicator"
)
type(current_platform).use_custom_op_collectives = classmethod(lambda cls: True)
MADE = []


class FakeAllReduce:
    """Sums over gloo, and remembers."""

    def __init__(self, *, driver, group, max_bytes, access, same_bits, timeout, setting):
        self.group, self.access, self.timeout = group, access, timeout
        self.log, self.fault, self.max_bytes = [], None, max_bytes
        group.agree("fake", lambda: None)
        MADE.append(self)

    def __call__(self, x):
        self.check()
        self.log.append(list(x.shape))
        y = x.float()
        torch.distributed.all_reduce(y, group=parallel_state.get_tp_group().cpu_group)
        return y.to(x.dtype)

    def check(self):
        if self.fault:
            raise self.fault

    def suspend(self):
        self.log.append("suspend")

    def resume(self):
        self.log.append("resume")

    def close(self):
        self.log.append("close")


def fake_kernels():
    from vllm_rose_plugin.layers import group_all_reduce

    group_all_reduce.AllReduce = FakeAllReduce
    group_all_reduce.Driver = lambda device: SimpleNamespace(attribute=lambda name: 0)
    group_all_reduce.tune = lambda reduce: None
    group_all_reduce.warm = lambda reduce, **shapes: None
    group_all_reduce.gpu.obstacle = lambda: ""
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.empty_cache = lambda: None


def config():
    rose = {"additional_config": {"rose": {"all_reduce": CHOICE}}} if CHOICE else {}
    made = EngineArgs(
        model=MODEL,
        skip_tokenizer_init=True,
        tensor_parallel_size=2,
        enable_expert_parallel=True,
        max_num_batched_tokens=TOKENS,
        max_model_len=TOKENS,
        **rose,
    ).create_engine_config(UsageContext.ENGINE_CONTEXT)
    made.parallel_config.rank = RANK
    return made


def communicators():
    groups = {"tp": parallel_state.get_tp_group(), "ep": parallel_state.get_ep_group()}
    groups["world"] = parallel_state.get_world_group()
    return {name: type(group.device_communicator).__name__ for name, group in groups.items()}


def tensors():
    return {
        "rows": torch.full((3, HIDDEN), RANK + 1.0).bfloat16(),
        "all": torch.full((TOKENS, HIDDEN), RANK + 1.0).bfloat16(),
        "too many": torch.full((TOKENS + 1, HIDDEN), RANK + 1.0).bfloat16(),
        "float32": torch.full((3, HIDDEN), RANK + 1.0),
        "int8": torch.full((3, HIDDEN), RANK + 1, dtype=torch.int8),
        "columns": torch.full((HIDDEN, 3), RANK + 1.0).bfloat16().t(),
        # Only one rank has it at an odd place.
        "odd": torch.full((HIDDEN + 1,), RANK + 1.0).bfloat16()[RANK : HIDDEN + RANK],
    }


def wrong(result, x):
    return int((result != 3).sum()) + (result.shape != x.shape) + (result.stride() != torch.empty_like(x).stride())


def counts():
    from vllm_rose_plugin.kernels import call_counts

    return call_counts.snapshot().get("all_reduce", {})


def reduce_everything():
    found = {}
    for name, x in tensors().items():
        before, given = counts(), x.clone()
        result = tensor_model_parallel_all_reduce(x)
        after = counts()
        paths = [path for path in after if after[path] != before.get(path)]
        found[name] = [*paths, wrong(result, x) + int((x != given).sum())]
    return found


def compiled():
    """A function with an all-reduce, compiled whole; which ops its graph has."""
    graphs = []

    def backend(graph, inputs):
        graphs.append([str(node.target) for node in graph.graph.nodes if node.op == "call_function"])
        return graph.forward

    x = tensors()["rows"]
    function = torch.compile(lambda x: tensor_model_parallel_all_reduce(x * 1) + 1, backend=backend, fullgraph=True)
    before = counts()
    result = function(x)
    after = counts()
    ops = [op for op in graphs[0] if "all_reduce" in op]
    return {"ops": ops, "wrong": int((result != 4).sum()), "grown": {k: after[k] - before.get(k, 0) for k in after}}


class Later(AsyncModelRunnerOutput):
    """Results that are waited for."""

    get_kv_connector_output = None  # abstract in 0.33

    def get_output(self):
        return "tokens"


def steps():
    """vLLM's worker, with a model runner of ours: what a group that gave up does to its steps."""
    from vllm.v1.worker.gpu_worker import Worker

    from vllm_rose_plugin.kernels.peer_timeout import PeerTimeoutError

    worker = SimpleNamespace(model_runner=SimpleNamespace(sample_tokens=lambda grammar_output: Later()))
    later = Worker.sample_tokens(worker, None)
    found = {"kind": isinstance(later, AsyncModelRunnerOutput), "before": later.get_output(), "errors": []}
    MADE[0].fault = PeerTimeoutError(
        name="all-reduce of tp:0", rank=0, peer=1, phase="input", epoch=2, seconds=60.0, setting="all_reduce_timeout"
    )
    for ask in (
        later.get_output,
        lambda: Worker.sample_tokens(worker, grammar_output=None),
        lambda: Worker.execute_model(worker, None),
        lambda: tensor_model_parallel_all_reduce(tensors()["rows"]),
    ):
        try:
            ask()
        except PeerTimeoutError as error:
            found["errors"].append(str(error))
    MADE[0].fault = None
    found["timeout"] = MADE[0].timeout
    return found


def adoptable():
    """Whether vLLM's own results can be given the class that looks at them."""
    from vllm.v1.worker import gpu_model_runner
    from vllm.v1.worker.gpu import async_utils

    from vllm_rose_plugin.seams.communicator import _checked

    found = {}
    for module in (gpu_model_runner, async_utils):
        for name, cls in vars(module).items():
            if isinstance(cls, type) and issubclass(cls, AsyncModelRunnerOutput) and cls is not AsyncModelRunnerOutput:
                result = cls.__new__(cls)
                result.__class__ = _checked(cls)
                found[name] = isinstance(result, cls) and type(result).get_output is not cls.get_output
    return found


def on():
    from vllm_rose_plugin.layers import live_groups
    from vllm_rose_plugin.layers.communicator import CudaCommunicator
    from vllm_rose_plugin.layers.report import snapshot

    tp = parallel_state.get_tp_group()
    result = {
        "is_cuda_communicator": isinstance(tp.device_communicator, CudaCommunicator),
        "max_bytes": [each.max_bytes for each in MADE],
        "reduced": reduce_everything(),
        "compiled": compiled(),
        "adoptable": adoptable(),
        "stats": snapshot(rank=RANK)["all_reduce"],
    }
    # Only one rank has a peer that didn't come; the other one must not wait for it.
    result["steps"] = steps() if RANK == 0 else None
    torch.distributed.barrier()
    second = parallel_state.GroupCoordinator([[0, 1]], RANK, "gloo", use_device_communicator=True, group_name="tp")
    result["two"] = sorted(live_groups.snapshot())
    result["second"] = wrong(second.all_reduce(x := tensors()["rows"]), x)
    second.destroy()
    result["one"] = sorted(live_groups.snapshot())
    before = len(MADE[0].log)
    comm = tp.device_communicator
    if comm.pynccl_comm is not None:
        comm.pynccl_comm.suspend = comm.pynccl_comm.resume = lambda: None
    comm.suspend()
    comm.resume()
    result["still"] = reduce_everything()["rows"]
    parallel_state.destroy_model_parallel()
    result["slept"] = [entry for entry in MADE[0].log[before:] if isinstance(entry, str)]
    result["second_log"] = [entry for entry in MADE[1].log if isinstance(entry, str)]
    result["left"] = sorted(live_groups.snapshot())
    parallel_state.initialize_model_parallel(2, 1)
    result["anew"] = [sorted(live_groups.snapshot()), reduce_everything()["rows"], len(MADE)]
    return result


def main():
    if CHOICE:
        fake_kernels()
    vllm_config = config()
    with set_current_vllm_config(vllm_config), tempfile.TemporaryDirectory() as directory:
        directory = os.environ.get("PROBE_DIRECTORY", directory)
        os.environ["VLLM_DIST_IDENT"] = Path(directory).name
        if RANK == 0:
            environment = {**os.environ, "PROBE_DIRECTORY": directory, "PROBE_RANK": "1"}
            other = subprocess.Popen([sys.executable, *sys.argv], env=environment, stdout=subprocess.DEVNULL)
        parallel_state.init_distributed_environment(2, RANK, f"file://{directory}/rendezvous", RANK, "gloo")
        parallel_state.initialize_model_parallel(2, 1)
        result = {"communicators": communicators(), "recorded": vllm_config.additional_config.get("rose")}
        if CHOICE:
            result |= on()
        else:
            x = tensors()["rows"]
            result["wrong"] = wrong(tensor_model_parallel_all_reduce(x), x)
            ours = (
                "vllm_rose_plugin.kernels.all_reduce",
                "vllm_rose_plugin.layers.communicator",
                "vllm_rose_plugin.memory",
            )
            result["imported"] = sorted(name for name in sys.modules if name.startswith(ours))
            comm = parallel_state.get_tp_group().device_communicator
            result["method"] = f"{type(comm).all_reduce.__module__}.{type(comm).all_reduce.__qualname__}"
        result["cuda_starts"] = len(CUDA_STARTS)
        path = Path(directory, "other.json")
        if RANK == 1:
            path.write_text(json.dumps(result))
        elif other.wait(timeout=120) == 0:
            result["other"] = json.loads(path.read_text())
    json.dump(result, sys.stdout)


if __name__ == "__main__":
    main()
