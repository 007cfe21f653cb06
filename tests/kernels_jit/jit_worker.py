"""A process that wants kernels: ``jit_worker.py '<job as JSON>'`` prints what it took to get them, as JSON.

A job has ``module`` (with ``build`` and ``TinyConfig``), ``factors`` (one kernel each), ``target``; with ``ready`` and
``go`` it makes the first file once everything is imported, then waits for the second.
"""

import importlib
import json
import logging
import sys
import time
from dataclasses import asdict
from pathlib import Path


class Warnings(logging.Handler):
    def __init__(self):
        super().__init__(logging.WARNING)
        self.texts = []

    def emit(self, record):
        self.texts.append(record.getMessage())


def main(job):
    warnings = Warnings()
    logging.getLogger("vllm_rose_plugin").addHandler(warnings)
    from vllm_rose_plugin.kernels.jit import compile as jit

    cutlass_at_import = "cutlass" in sys.modules
    kernels = importlib.import_module(job["module"])
    if "ready" in job:
        importlib.import_module("tvm_ffi")  # with torch: seconds that would hide whether a process waits
        Path(job["ready"]).touch()
        while not Path(job["go"]).exists():
            time.sleep(0.01)
    for factor in job["factors"]:
        config = kernels.TinyConfig(factor=factor)
        for _ in range(2):  # the second comes from memory
            kernel = jit.compile(family="tiny", config=config, build=kernels.build, target=job["target"])
            assert callable(kernel)
    print(json.dumps({**asdict(jit.counts), "warnings": warnings.texts, "cutlass_at_import": cutlass_at_import}))


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
