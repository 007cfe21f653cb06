"""vLLM's manager of the expert-parallel group with ``--all2all-backend rose_nvlink``: buffers, deadlines, faults."""

import contextlib
import functools
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from vllm.config import get_current_vllm_config
from vllm.distributed.device_communicators.base_device_communicator import All2AllManagerBase
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_ip

from vllm_rose_plugin.config import ALL2ALL
from vllm_rose_plugin.kernels.dp_exchange.layout import ExchangeShape
from vllm_rose_plugin.kernels.peer_timeout import PeerTimeoutError
from vllm_rose_plugin.layers import live_groups, settings
from vllm_rose_plugin.layers.group_exchange import STARTUP_SECONDS, GroupExchange, make
from vllm_rose_plugin.layers.log import logger
from vllm_rose_plugin.memory.rendezvous import Group, group_from_process_group

_live: "weakref.WeakSet[RoseAll2AllManager]" = weakref.WeakSet()


class RoseAll2AllManager(All2AllManagerBase):
    """Made with the group's communicator; exchanges are made once a layer knows its experts."""

    def __init__(self, cpu_group, tcp_store_group=None):
        """No memory is made yet.

        Raises:
            ValueError: ranks on several hosts have no GPUs; models are loaded later.
        """
        super().__init__(cpu_group, tcp_store_group)
        if self.internode and not current_platform.is_cuda():
            raise ValueError(
                f"--all2all-backend {ALL2ALL} without a GPU is for processes of one host, and the {self.world_size} "
                "ranks are on several: set --data-parallel-size-local to --data-parallel-size and --nnodes to 1, or "
                "leave the backend out"
            )
        # vLLM then asks query_fault with results that it fetches asynchronously, and throws wrong ones away. For all
        # others, since graphs that are replayed ask nothing, the worker looks: see seams/communicator.py.
        self.support_fault_tolerance = True
        self._timeout = settings.current().all_to_all_timeout
        self._micro_batches = _micro_batches(get_current_vllm_config().parallel_config)
        self._group: Group | None = None
        self._exchanges: dict[ExchangeShape, GroupExchange] = {}
        _live.add(self)
        live_groups.watch(self)

    def get_handle(self, kwargs: dict) -> GroupExchange:
        """The exchanges of a shape, made at its first call; collective then.

        Args:
            kwargs: ``shape``, an :class:`ExchangeShape`.

        Raises:
            GroupError, MissingRankError: see :func:`~vllm_rose_plugin.layers.group_exchange.make`.
        """
        shape: ExchangeShape = kwargs["shape"]
        if shape not in self._exchanges:
            if self._group is None:
                self._group = group_from_process_group(
                    self.cpu_group, address=get_ip(), name="all-to-all", timeout=STARTUP_SECONDS
                )
            self._exchanges[shape] = make(
                group=self._group, shape=shape, timeout=self._timeout, micro_batches=self._micro_batches
            )
        return self._exchanges[shape]

    def dispatch_router_logits(self, *args: Any, **keywords: Any) -> Any:
        """What vLLM calls for a quantization method that doesn't go through its modular kernels.

        Raises:
            ValueError: always; the first forward pass is part of start-up.
        """
        raise ValueError(
            f"--all2all-backend {ALL2ALL} can't serve this model: its quantization method brings experts that take "
            "router logits and no routing; leave the flag out, or name another --moe-backend"
        )

    def max_sms_used(self) -> int:
        """With micro-batches vLLM keeps so many SMs from DeepGEMM: none, since all launches are on one stream."""
        return 0

    def end_startup(self) -> None:
        """See :meth:`GroupExchange.end_startup`."""
        for exchange in self._exchanges.values():
            exchange.end_startup()

    def fault(self) -> PeerTimeoutError | None:
        """What went wrong so far, if anything did."""
        faults = (exchange.fault() for exchange in self._exchanges.values())
        return next((fault for fault in faults if fault is not None), None)

    def check(self) -> None:
        """Raise if a launch that has ended gave up waiting for a rank; touches no stream.

        Raises:
            PeerTimeoutError: names rank, phase and setting.
        """
        fault = self.fault()
        if fault is not None:
            raise fault

    # ---- vLLM's fault hooks ----

    def query_fault(self) -> torch.Tensor:
        """Whether a rank didn't come, as a bool ``[]`` on the group's device; waits for no launch."""
        found = [exchange.gave_up() for exchange in self._exchanges.values()]
        if not found:
            return torch.zeros((), dtype=torch.bool, device=self._device())
        return functools.reduce(torch.logical_or, found)

    def query_active_mask(self) -> torch.Tensor:
        """int32 ``[world_size]``: 1 for the rank that was waited for in vain. The log then has the whole story."""
        mask = torch.zeros(self.world_size, dtype=torch.int32)
        fault = self.fault()
        if fault is not None:
            logger.error("%s", fault)
            mask[fault.peer] = 1
        return mask.to(self._device())

    def clean_buffers(self) -> None:
        """Nothing to clean while all ranks answer: epochs tell old rows from new ones.

        Raises:
            PeerTimeoutError: a rank is missing; a group without it can't be had from this one.
        """
        self.check()

    @contextlib.contextmanager
    def mask_remote_ranks(self) -> Iterator[None]:
        """Steps of this rank alone, which vLLM has while a group of elastic expert parallelism grows.

        Raises:
            ValueError: always; with the base class's empty one, such a step would wait for ranks that don't come.
        """
        raise ValueError(
            f"--all2all-backend {ALL2ALL} can't leave ranks out of a step: its buffers are for a fixed group; start "
            "without --enable-elastic-ep"
        )
        yield

    def _device(self) -> torch.device:
        return torch.device("cuda", torch.cuda.current_device()) if current_platform.is_cuda() else torch.device("cpu")

    def destroy(self) -> None:
        """Free everything."""
        for exchange in self._exchanges.values():
            exchange.close()
        self._exchanges.clear()


def end_startup() -> None:
    """For all managers of this process: the model is warm."""
    for manager in list(_live):
        manager.end_startup()


def _micro_batches(parallel_config) -> int:
    return parallel_config.num_ubatches if parallel_config.use_ubatching else 1
