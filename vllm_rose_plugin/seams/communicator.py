"""Our all-reduce in vLLM's tensor-parallel groups, when the setting ``all_reduce`` asks for it; ranks that don't come.

Replaces: nothing that isn't asked for. After ``CudaCommunicator.__init__`` the new communicator may be given a subclass
with our ``all_reduce``; before and after a worker's step it, and our all-to-all, are asked whether a peer didn't come,
and before a batch without requests, which ranks that have none run with the others.
Why: the class of the communicator can only be named by a platform, of which one can be active, and vLLM's coordinator
for elastic groups asserts that it is ``CudaCommunicator`` itself. vLLM looks at collectives only with results that it
fetches asynchronously, and only at the all-to-all: not on a pipeline's earlier stages nor with synchronous scheduling.
Delete when: vLLM takes an all-reduce from outside (no issue known).

Only the group ``tp`` is served: in both versions models all-reduce over no other. With expert parallelism the experts'
partial results are summed over it too; over ``ep`` tokens are only dispatched, gathered and scattered.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

from vllm_rose_plugin.seams.seam import Seam
from vllm_rose_plugin.seams.targets import wrap

_MODULE = "vllm.distributed.device_communicators.cuda_communicator"
_TARGET = "CudaCommunicator.__init__"
_PARAMETERS = (
    *("self", "cpu_group", "device", "device_group", "unique_name"),
    *("global_ranks", "global_world_size", "tcp_store_group"),
)
_WORKER = "vllm.v1.worker.gpu_worker"


def _asked(additional: Any) -> bool:
    """Whether the configuration check has recorded that we are to reduce."""
    recorded = additional.get("rose") if isinstance(additional, dict) else None
    return isinstance(recorded, dict) and "version" in recorded and recorded.get("all_reduce", "off") != "off"


def _wrap_init(original: Callable[..., None]) -> Callable[..., None]:
    signature = inspect.signature(original)

    def __init__(self: Any, *args: Any, **keywords: Any) -> None:
        original(self, *args, **keywords)
        given = signature.bind(self, *args, **keywords).arguments
        # The exact name, as in vLLM: "etp" is another group.
        if self.unique_name.split(":")[0] != "tp" or self.world_size == 1:
            return
        from vllm.config import get_current_vllm_config_or_none

        vllm_config = get_current_vllm_config_or_none()
        if vllm_config is None or not _asked(vllm_config.additional_config):
            return
        from vllm_rose_plugin.layers.communicator import adopt

        adopt(self, vllm_config=vllm_config, store_group=given.get("tcp_store_group"))

    return __init__


def _wrap_step(original: Callable[..., Any]) -> Callable[..., Any]:
    """Around a step: look before it, and once its results are there."""

    def step(self: Any, *args: Any, **keywords: Any) -> Any:
        from vllm_rose_plugin.layers import live_groups

        if not live_groups.any_alive():
            return original(self, *args, **keywords)
        live_groups.begin_step()
        output = original(self, *args, **keywords)
        if hasattr(output, "get_output"):
            output.__class__ = _checked(output.__class__)
        else:  # nothing yet, or results that have been waited for
            live_groups.check()
        return output

    return step


@functools.cache
def _checked(cls: type) -> type:
    """A class of results whose get_output, which waits for them on whatever thread, looks afterwards.

    A subclass, since an attribute of the object would be a cycle that keeps its tensors until the garbage collector
    comes: ranks that don't answer vLLM drop their results unread.
    """

    def get_output(self: Any) -> Any:
        from vllm_rose_plugin.layers import live_groups

        result = cls.get_output(self)  # type: ignore[attr-defined]
        live_groups.check()
        return result

    return type(cls.__name__, (cls,), {"get_output": get_output, "__module__": cls.__module__})


def _wrap_dummy(original: Callable[..., Any]) -> Callable[..., Any]:
    """Before a batch without requests, whose results nobody takes: looks at the ones that have ended."""

    def execute_dummy_batch(self: Any, *args: Any, **keywords: Any) -> Any:
        from vllm_rose_plugin.layers import live_groups

        live_groups.check()
        return original(self, *args, **keywords)

    return execute_dummy_batch


def _worker_seam(method: str, *parameters: str, make: Callable[[Any], Any] = _wrap_step) -> Seam:
    name, target = f"peer_timeout_{method}", f"Worker.{method}"
    return Seam(
        name=name,
        module=_WORKER,
        target=target,
        kind="patch",
        why="a rank that our collectives waited for in vain is an error in the worker, not a wrong token or a hang",
        upstream="none known",
        apply=lambda: wrap(name, _WORKER, target, ("self", *parameters), make),
    )


SEAMS = (
    Seam(
        name="communicator",
        module=_MODULE,
        target=_TARGET,
        kind="patch",
        why="gives tensor-parallel groups our all-reduce when the setting all_reduce asks for it",
        upstream="none known",
        apply=lambda: wrap("communicator", _MODULE, _TARGET, _PARAMETERS, _wrap_init),
    ),
    _worker_seam("execute_model", "scheduler_output"),
    _worker_seam("sample_tokens", "grammar_output"),
    _worker_seam("execute_dummy_batch", make=_wrap_dummy),
)
