"""The exchanges of one shape in the expert-parallel group: how they are made, and their deadlines."""

import functools
from collections.abc import Sequence
from typing import Any

import torch
from vllm.platforms import current_platform

from vllm_rose_plugin.config import ALL2ALL
from vllm_rose_plugin.kernels.dp_exchange.interface import Exchange
from vllm_rose_plugin.kernels.dp_exchange.layout import ExchangeShape
from vllm_rose_plugin.kernels.dp_exchange.shared_memory import SharedMemoryExchange
from vllm_rose_plugin.kernels.peer_timeout import PeerTimeoutError
from vllm_rose_plugin.layers.all_to_all_check import TOKENS_FLAG
from vllm_rose_plugin.layers.log import logger
from vllm_rose_plugin.memory.rendezvous import Group

STARTUP_SECONDS = 600.0
"""Until the model is warm, ranks may wait that long for one that loads or compiles more slowly."""
TIMEOUT_SETTING = '--additional-config {"rose": {"all_to_all_timeout": …}} or ROSE_ALL_TO_ALL_TIMEOUT'


class GroupExchange:
    """One exchange for each micro-batch that can be under way at once; all layers of a shape share them."""

    def __init__(self, exchanges: Sequence[Exchange], *, timeout: float):
        """For :func:`make`.

        Args:
            exchanges: by number of the micro-batch.
            timeout: seconds to wait for a rank while requests are served.
        """
        self._exchanges = tuple(exchanges)
        self._timeout = timeout
        self._starting = True
        self.shape: ExchangeShape = exchanges[0].shape
        self.rank: int = exchanges[0].rank

    def of(self, micro_batch: int) -> Exchange:
        """The exchange that a micro-batch's next step goes through."""
        exchange = self._exchanges[micro_batch]
        if self._starting:
            # A captured launch keeps its deadline, and is replayed for requests.
            capturing = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            exchange.timeout = self._timeout if capturing else max(self._timeout, STARTUP_SECONDS)
        return exchange

    def end_startup(self) -> None:
        """The model is warm here: from now on the deadline of the setting holds."""
        self._starting = False
        for exchange in self._exchanges:
            exchange.timeout = self._timeout

    def fault(self) -> PeerTimeoutError | None:
        """What went wrong in a launch that has ended; touches no stream."""
        for exchange in self._exchanges:
            try:
                exchange.check()
            except PeerTimeoutError as error:
                return error
        return None

    def gave_up(self) -> torch.Tensor:
        """Whether anything went wrong once the current stream gets here: a bool ``[]`` on the exchange's device."""
        return functools.reduce(torch.logical_or, (exchange.gave_up() for exchange in self._exchanges))

    def close(self) -> None:
        """Free everything; a second call does nothing. Not collective."""
        for exchange in self._exchanges:
            exchange.close()


def make(*, group: Group, shape: ExchangeShape, timeout: float, micro_batches: int) -> GroupExchange:
    """The exchanges of a shape; collective.

    Args:
        group: the expert-parallel ranks.
        shape: the same on all of them.
        timeout: as in :class:`GroupExchange`.
        micro_batches: how many can be under way at once.

    Raises:
        GroupError: some rank can't; the same text on all ranks. It names the flag that makes the buffers smaller.
        MissingRankError: some rank didn't arrive.
    """
    how: dict[str, Any] = {
        "group": group,
        "shape": shape,
        "timeout": max(timeout, STARTUP_SECONDS),
        "setting": TOKENS_FLAG,
        "timeout_setting": TIMEOUT_SETTING,
    }
    exchanges: list[Exchange] = []
    try:
        for _ in range(micro_batches):
            exchanges.append(_on_gpu(how, exchanges[:1]) if current_platform.is_cuda() else SharedMemoryExchange(**how))
    except BaseException:
        for exchange in exchanges:
            exchange.close()
        raise
    if group.rank == 0:
        logger.info(
            "All-to-all %s over %s: %s%s. It waits %g s for a rank; %s changes the size.",
            ALL2ALL,
            "NVLink" if current_platform.is_cuda() else "shared memory of this host, a stand-in for GPUs",
            exchanges[0].layout.describe(),
            f", {micro_batches} times" if micro_batches > 1 else "",
            timeout,
            TOKENS_FLAG,
        )
    return GroupExchange(exchanges, timeout=timeout)


def _on_gpu(how: dict[str, Any], first: Sequence[Exchange]) -> Exchange:
    """Warm, with the table of `first`, or where there is none yet with one of its own."""
    from vllm_rose_plugin.kernels.dp_exchange.nvlink import NvlinkExchange
    from vllm_rose_plugin.kernels.dp_exchange.tune import tune
    from vllm_rose_plugin.memory.driver import Driver

    exchange = NvlinkExchange(driver=Driver(device=torch.cuda.current_device()), **how)
    try:
        # Nobody launches before all have compiled: how long that takes differs with the ranks' caches.
        exchange.group.agree("dp exchange: compile", exchange.warm_up)
        if first:
            exchange.table = first[0].table  # type: ignore[attr-defined]
        else:
            tune(exchange)
            torch.cuda.empty_cache()  # vLLM measures what is free next
    except BaseException:
        exchange.close()
        raise
    return exchange
