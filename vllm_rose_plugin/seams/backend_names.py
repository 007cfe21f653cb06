"""``--moe-backend``, ``--linear-backend`` and ``--all2all-backend``: closed Literals of vLLM, widened by our names.

Replaces: the type of ``KernelConfig.moe_backend``, ``KernelConfig.linear_backend``,
``KernelConfig.linear_backend_per_quant``, ``SpeculativeConfig.moe_backend`` and ``ParallelConfig.all2all_backend``.
Why: pydantic and argparse take their legal values from these types; vLLM has no call to add one.
Delete when: vllm-project/vllm#53897 (out-of-tree fp8 MoE backends) lands.
"""

import sys
from typing import Any, Literal, get_args

from vllm_rose_plugin.config import ALL2ALL, BACKEND
from vllm_rose_plugin.seams.seam import Seam, SeamError
from vllm_rose_plugin.seams.targets import find

_UPSTREAM = "https://github.com/vllm-project/vllm/pull/53897"
_LINEAR_UPSTREAM = "none known; the flag came with https://github.com/vllm-project/vllm/pull/39538"


def _widened(seam: str, module: str, name: str, *, ours: str = BACKEND, known: str = "auto") -> tuple[Any, Any]:
    """The Literal ``name`` of ``module`` before and after, set there and wherever it was imported by name."""
    literal = find(seam, module, name)
    values = get_args(literal)
    if known not in values:
        raise SeamError(seam, f"{module}.{name} is no Literal with {known!r} in it")
    if ours in values:
        return literal, literal
    widened = Literal[(*values, ours)]  # type: ignore[valid-type]
    for loaded in [m for n, m in list(sys.modules.items()) if n.startswith("vllm.")]:
        if loaded.__dict__.get(name) is literal:
            setattr(loaded, name, widened)
    return literal, widened


def _retype(seam: str, cls: type, field: str, old: Any, new: Any) -> None:
    """Give a pydantic dataclass field a new type that replaces ``old`` in its present one."""
    dataclass_field = getattr(cls, "__dataclass_fields__", {}).get(field)
    pydantic_field = getattr(cls, "__pydantic_fields__", {}).get(field)
    if dataclass_field is None or pydantic_field is None:
        raise SeamError(seam, f"{cls.__module__}.{cls.__name__}.{field} is no field of a pydantic dataclass")
    current = dataclass_field.type
    if current == old:
        replacement = new
    elif current == old | None:
        replacement = new | None
    elif current == dict[str, old] | None:
        replacement = dict[str, new] | None
    else:
        raise SeamError(seam, f"{cls.__module__}.{cls.__name__}.{field} has the type {current}")
    dataclass_field.type = cls.__annotations__[field] = replacement
    pydantic_field.annotation = replacement


def _rebuild() -> None:
    """Make pydantic and argparse see the new types, innermost class first."""
    from pydantic.dataclasses import rebuild_dataclass
    from vllm.config import KernelConfig, ParallelConfig, SpeculativeConfig, VllmConfig

    for cls in (KernelConfig, ParallelConfig, SpeculativeConfig, VllmConfig):
        rebuild_dataclass(cls, force=True)  # type: ignore[arg-type]
    # Its cache may hold the old choices; while the module is still being imported there is none.
    compute_kwargs = getattr(sys.modules.get("vllm.engine.arg_utils"), "_compute_kwargs", None)
    if compute_kwargs is not None:
        compute_kwargs.cache_clear()


def _apply_moe() -> None:
    from vllm.config import KernelConfig, SpeculativeConfig

    old, new = _widened("moe_backend_name", "vllm.config.kernel", "MoEBackend")
    if old is not new:
        _retype("moe_backend_name", KernelConfig, "moe_backend", old, new)
        _retype("moe_backend_name", SpeculativeConfig, "moe_backend", old, new)
        _rebuild()


def _apply_linear() -> None:
    from vllm.config import KernelConfig

    old, new = _widened("linear_backend_name", "vllm.config.kernel", "LinearBackend")
    if old is not new:
        _retype("linear_backend_name", KernelConfig, "linear_backend", old, new)
        _retype("linear_backend_name", KernelConfig, "linear_backend_per_quant", old, new)
        _rebuild()


def _apply_all2all() -> None:
    from vllm.config import ParallelConfig

    seam = "all2all_backend_name"
    old, new = _widened(seam, "vllm.config.parallel", "All2AllBackend", ours=ALL2ALL, known="allgather_reducescatter")
    if old is not new:
        _retype(seam, ParallelConfig, "all2all_backend", old, new)
        _rebuild()


SEAMS = (
    Seam(
        name="moe_backend_name",
        module="vllm.config",
        target="KernelConfig.moe_backend, SpeculativeConfig.moe_backend",
        kind="patch",
        why="the legal names of --moe-backend are a closed Literal",
        upstream=_UPSTREAM,
        apply=_apply_moe,
    ),
    Seam(
        name="linear_backend_name",
        module="vllm.config",
        target="KernelConfig.linear_backend, KernelConfig.linear_backend_per_quant",
        kind="patch",
        why="the legal names of --linear-backend are a closed Literal",
        upstream=_LINEAR_UPSTREAM,
        apply=_apply_linear,
    ),
    Seam(
        name="all2all_backend_name",
        module="vllm.config",
        target="ParallelConfig.all2all_backend",
        kind="patch",
        why="the legal names of --all2all-backend are a closed Literal",
        upstream="https://github.com/vllm-project/vllm/pull/50556",
        apply=_apply_all2all,
    ),
)
