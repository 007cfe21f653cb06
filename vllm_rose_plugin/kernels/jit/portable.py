"""The host half of an object file, for any CPU of its architecture: it launches the kernel, and has nothing to gain.

The compiler builds it for the CPU that it runs on. So a cache that was filled on one machine, as when an image is
built, would be of no use on a machine of another make: an AMD build host's objects name SSE4a, which no Intel has.
"""

import platform
from typing import Any

_BASELINE = {"x86_64": ("x86-64", "+sse2")}
"""Machine to (LLVM's name of a CPU, features): what every 64-bit x86 has. Other machines: as the compiler does it."""


def make_portable(made: Any) -> frozenset[str] | None:
    """Have the functions of a compiled kernel's host half built for any CPU when it's exported.

    Args:
        made: what ``cute.compile`` gave.

    Returns:
        The instruction sets that the exported object needs of a CPU, in /proc/cpuinfo's names; None: those of this one.
    """
    baseline = _BASELINE.get(platform.machine())
    module = getattr(made, "ir_module", None)
    if baseline is None or module is None:
        return None
    from cutlass._mlir import ir

    cpu, features = baseline
    with module.context:
        for operation in module.body.operations:
            if operation.operation.name == "llvm.func":
                attributes = operation.operation.attributes
                attributes["target_cpu"] = ir.StringAttr.get(cpu)
                attributes["target_features"] = ir.Attribute.parse(f'#llvm.target_features<["{features}"]>')
    return frozenset()
