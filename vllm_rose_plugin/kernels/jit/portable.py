"""The host half of an object file, for any CPU of its architecture: it launches the kernel, and has nothing to gain.

The compiler builds it for the CPU that it runs on. So a cache that was filled on one machine, as when an image is
built, would be of no use on a machine of another make: an AMD build host's objects name SSE4a, which no Intel has.
"""

import logging
import platform
from typing import Any

logger = logging.getLogger(__name__)

_BASELINE = {"x86_64": ("x86-64", "+sse2"), "aarch64": ("generic", "+neon")}
"""Machine to (LLVM's name of a CPU, features): what every one of its kind has. The second has not been run."""

_ENTRY = "__tvm_ffi_"
"""How the name of the function begins that a loaded object is called by."""


def make_portable(made: Any) -> frozenset[str] | None:
    """Have the functions of a compiled kernel's host half built for any CPU when it's exported.

    Args:
        made: what ``cute.compile`` gave.

    Returns:
        The instruction sets that the exported object needs of a CPU, in /proc/cpuinfo's names: none. None where the
        functions could not be reached, so that it needs this CPU's.
    """
    baseline = _BASELINE.get(platform.machine())
    if baseline is None:
        return None
    try:
        marked = _mark(made.ir_module, *baseline)
    except Exception as error:
        logger.warning("cached kernels will serve this kind of CPU only: %s: %s", type(error).__name__, error)
        return None
    if not any(name.startswith(_ENTRY) for name in marked):
        logger.warning("cached kernels will serve this kind of CPU only: no function %s… in the host code", _ENTRY)
        return None
    return frozenset()


def _mark(module: Any, cpu: str, features: str) -> list[str]:
    """Names of the functions, all of which have the attributes now."""
    from cutlass._mlir import ir

    marked = []
    with module.context:
        for each in module.body.operations:
            operation = each.operation
            if operation.name == "llvm.func":
                operation.attributes["target_cpu"] = ir.StringAttr.get(cpu)
                operation.attributes["target_features"] = ir.Attribute.parse(f'#llvm.target_features<["{features}"]>')
                marked.append(ir.StringAttr(operation.attributes["sym_name"]).value)
    return marked
