"""Three processes, spawned as vLLM spawns its workers, each of which loads the plugin; prints what each then holds."""

import json
import multiprocessing
import sys
from typing import get_args


def load(queue):
    """As an engine process does: load the general plugins, then import what the seams wait for."""
    import vllm
    from vllm.plugins import load_general_plugins

    load_general_plugins()
    from vllm.config.kernel import LinearBackend, MoEBackend
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.layers.fused_moe.oracle import mxfp8

    queue.put(
        {
            "version": vllm.__version__,
            "moe": get_args(MoEBackend),
            "linear": get_args(LinearBackend),
            "names": sorted(mxfp8._BACKEND_NAME_MAP),
            "kernels": {p.name: [k.__name__ for k in ks] for p, ks in linear._POSSIBLE_MXFP8_KERNELS.items()},
        }
    )


def main():
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    processes = [context.Process(target=load, args=(queue,)) for _ in range(3)]
    for process in processes:
        process.start()
    answers = [queue.get(timeout=240) for _ in processes]
    for process in processes:
        process.join(timeout=60)
        assert process.exitcode == 0, process.exitcode
    json.dump({"answers": answers}, sys.stdout)


if __name__ == "__main__":
    main()
