"""Processes that share a kernel cache."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent


class Workers:
    """Start processes that compile the tiny kernel with one cache folder."""

    def __init__(self, cache, source_folder):
        self.cache = cache
        self.source_folder = source_folder
        self._running = []

    def start(self, *, environment=None, **job):
        job = {"module": "tiny_kernel", "target": "sm_90a", "factors": [3.0], **job}
        paths = [str(self.source_folder), str(HERE.parents[1])]
        # -P: the worker's own folder, where the original kernel lies, stays off sys.path.
        process = subprocess.Popen(
            [sys.executable, "-P", HERE / "jit_worker.py", json.dumps(job)],
            env={
                **os.environ,
                "ROSE_CACHE_DIR": str(self.cache),
                "PYTHONPATH": os.pathsep.join(paths),
                **(environment or {}),
            },
            cwd=self.source_folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._running.append(process)
        return process

    def finish(self, process):
        out, errors = process.communicate(timeout=240)
        assert process.returncode == 0, errors
        return json.loads(out.splitlines()[-1])

    def run(self, **job):
        return self.finish(self.start(**job))

    def objects(self):
        return sorted(self.cache.glob("kernels/tiny/*.o"))

    def stop(self):
        for process in self._running:
            process.kill()
            process.communicate()


@pytest.fixture
def workers(tmp_path):
    """Workers with an empty cache and their own copy of the kernel's source."""
    source = tmp_path / "source"
    source.mkdir()
    (source / "tiny_kernel.py").write_text((HERE / "tiny_kernel.py").read_text())
    started = Workers(tmp_path / "cache", source)
    yield started
    started.stop()
