"""Read machine code: what tests assert on and what a reader of a kernel wants to see."""

import functools
import re
import shutil
import subprocess
import tempfile
from pathlib import Path


@functools.lru_cache(maxsize=256)
def sass(cubin: bytes) -> str:
    """Disassembly of a cubin.

    Without nvdisasm's dataflow analysis, which takes a quarter of its time to label targets of indirect branches.

    Raises:
        FileNotFoundError: nvdisasm is missing.
    """
    return _run("nvdisasm", "-c", "-ndf", cubin=cubin)


def resource_usage(cubin: bytes) -> dict[str, int]:
    """Registers per thread, stack bytes per thread (spills live there) and static shared bytes per block.

    Returns:
        ``{"registers": …, "stack": …, "shared": …}``, the largest of each where a cubin holds several kernels.

    Raises:
        FileNotFoundError: cuobjdump is missing.
    """
    text = _run("cuobjdump", "--dump-resource-usage", cubin=cubin)
    found = {}
    for name, label in (("registers", "REG"), ("stack", "STACK"), ("shared", "SHARED")):
        found[name] = max(int(number) for number in re.findall(rf"\b{label}:(\d+)", text))
    return found


def _run(tool: str, *arguments: str, cubin: bytes) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "kernel.cubin")
        path.write_bytes(cubin)
        command = [find_tool(tool), *arguments, str(path)]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout


@functools.cache
def find_tool(tool: str) -> str:
    """Path of a CUDA binary utility: from its Python package, else from PATH.

    Raises:
        FileNotFoundError: names the package that brings it.
    """
    import importlib.util

    spec = importlib.util.find_spec("nvidia")
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        for path in sorted(Path(folder).glob(f"*/bin/{tool}")):
            return str(path)
    on_path = shutil.which(tool)
    if on_path is None:
        raise FileNotFoundError(f"{tool} is not installed; the package nvidia-cuda-{tool} brings it")
    return on_path
