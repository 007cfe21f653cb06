"""A pass of ours in vLLM's compiled graphs, when the setting ``all_reduce_norm`` asks for it.

Official: ``compilation_config.inductor_compile_config`` takes one pass from outside, which vLLM runs behind its own and
before its own ops are lowered. ``layers/all_reduce_check.py`` puts it there.
"""

from vllm_rose_plugin.seams.seam import Seam
from vllm_rose_plugin.seams.targets import find

_MODULE = "vllm.compilation.passes.inductor_pass"
_TARGET = "InductorPass"


def _apply() -> None:
    for name in (_TARGET, f"{_TARGET}.hash_source"):
        find("all_reduce_norm", _MODULE, name)


SEAMS = (
    Seam(
        name="all_reduce_norm",
        module=_MODULE,
        target=_TARGET,
        kind="official",
        why="residual and norm go into the launch of our all-reduce when the setting all_reduce_norm asks for it",
        upstream="https://docs.vllm.ai/en/latest/api/vllm/config/compilation/",
        apply=_apply,
    ),
)
