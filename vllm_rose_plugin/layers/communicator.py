"""vLLM's communicator of a group whose all-reduce is ours.

vLLM builds its own communicator, with everything that it falls back to; :func:`adopt` then gives it a subclass with
another ``all_reduce``. So it is still a ``CudaCommunicator`` for every check of vLLM's, and one that is not adopted is
vLLM's, method for method. Compiled graphs and captures get here through ``torch.ops.vllm.all_reduce``.
"""

from typing import Any

import torch
from torch.distributed import ProcessGroup
from vllm.distributed.device_communicators.cuda_communicator import CudaCommunicator

from vllm_rose_plugin.config import AllReduceChoice, AllReduceNorm, RoseConfig
from vllm_rose_plugin.kernels import call_counts
from vllm_rose_plugin.layers import live_groups
from vllm_rose_plugin.layers.all_reduce_check import norm_obstacle
from vllm_rose_plugin.layers.group_all_reduce import OP, STARTUP_SECONDS, GroupAllReduce, Wish, make
from vllm_rose_plugin.memory.rendezvous import Group, group_from_process_group


class RoseCommunicator(CudaCommunicator):
    """Never built, only adopted."""

    rose: GroupAllReduce | None

    def all_reduce(self, input_: torch.Tensor) -> torch.Tensor:
        """The sum over ranks, as a new tensor: ours, or vLLM's for what ours doesn't take."""
        if self.rose is not None and self.rose.takes(input_):
            return self.rose(input_)
        call_counts.count(OP, "vllm")
        return super().all_reduce(input_)

    def suspend(self) -> None:
        """Sleep mode: free the buffer."""
        if self.rose is not None:
            self.rose.suspend()
        super().suspend()

    def resume(self) -> None:
        """Take it again, at the addresses of before; collective."""
        super().resume()
        if self.rose is not None:
            self.rose.resume()

    def checkpoint_prepare(self) -> None:
        """Free the buffer, which can't be in a checkpoint."""
        if self.rose is not None:
            self.rose.suspend(for_checkpoint=True)
        super().checkpoint_prepare()

    def checkpoint_restore(self) -> None:
        """Share memory again; collective."""
        super().checkpoint_restore()
        if self.rose is not None:
            self.rose.resume()

    def destroy(self) -> None:
        """Free everything; vLLM makes new communicators for new groups."""
        live_groups.discard(self.unique_name)
        ours, self.rose = self.rose, None
        try:
            if ours is not None:
                ours.close()
        finally:
            super().destroy()


def adopt(communicator: Any, *, vllm_config: Any, store_group: Any) -> None:
    """Give a communicator of vLLM's our all-reduce, if all its ranks can; collective.

    Args:
        communicator: as vLLM built it, of the tensor-parallel group.
        vllm_config: the configuration that is being built.
        store_group: the ``StatelessProcessGroup`` of an elastic group; None for others.

    Raises:
        ValueError: the setting names a way that can't be had.
        MissingRankError: some rank didn't arrive.
    """
    from vllm.utils.network_utils import get_ip

    name = communicator.unique_name
    group = _group(communicator.cpu_group, store_group, f"all-reduce of {name}", get_ip())
    made = make(group=group, name=name, device=communicator.device.index, wish=wish_of(vllm_config))
    if made is None:
        return
    communicator.rose = made
    communicator.__class__ = RoseCommunicator
    live_groups.add(name, made)


def wish_of(vllm_config: Any) -> Wish:
    """What a configuration whose settings were recorded asks for."""
    import vllm.envs as envs

    settings = RoseConfig.load(vllm_config.additional_config)
    model_config = vllm_config.model_config
    return Wish(
        choice=AllReduceChoice(settings.all_reduce),
        timeout=settings.all_reduce_timeout,
        hidden_size=model_config.get_hidden_size(),
        dtype=model_config.dtype,
        most_tokens=vllm_config.scheduler_config.max_num_batched_tokens,
        norm=settings.all_reduce_norm != AllReduceNorm.OFF and not norm_obstacle(vllm_config),
        batch_invariant=bool(envs.VLLM_BATCH_INVARIANT),
    )


def _group(cpu_group: ProcessGroup, store_group: Any, name: str, address: str) -> Group:
    if store_group is None:
        return group_from_process_group(cpu_group, address=address, name=name, timeout=STARTUP_SECONDS)
    return Group(
        store=store_group.store,
        rank=store_group.rank,
        size=store_group.world_size,
        name=name,
        timeout=STARTUP_SECONDS,
        hosts_store=store_group.rank == 0,
    )
