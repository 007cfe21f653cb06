"""The exchange between GPUs, through memory that all ranks have mapped."""

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from types import TracebackType

import torch

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.dp_combine import launch as combine
from vllm_rose_plugin.kernels.dp_dispatch import launch as dispatch
from vllm_rose_plugin.kernels.dp_exchange.base import BaseExchange
from vllm_rose_plugin.kernels.dp_exchange.interface import ReceivedTokens
from vllm_rose_plugin.kernels.dp_exchange.layout import PHASES, ExchangeShape
from vllm_rose_plugin.kernels.dp_exchange.memory import Place, no_tokens
from vllm_rose_plugin.kernels.dp_exchange.table import Table, Tuning
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts
from vllm_rose_plugin.kernels.peer_timeout import DEFAULT_SECONDS, TimeoutWord, check_seconds
from vllm_rose_plugin.memory.driver import Driver, HandleType
from vllm_rose_plugin.memory.handles import settle_handle_type
from vllm_rose_plugin.memory.rendezvous import Group, GroupError
from vllm_rose_plugin.memory.symmetric import SymmetricBuffer, allocate

_OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"


class NvlinkExchange(BaseExchange):
    """See :class:`~vllm_rose_plugin.kernels.dp_exchange.interface.Exchange`.

    Launches run on torch's current stream; all calls of a step on the same one, or ordered by the caller. A peer that
    doesn't come makes the kernels give up after `timeout`; results are undefined from then on, no ids name an expert
    that isn't there, and the next call and :meth:`check` raise. Neither waits for the stream. Who only replays graphs
    calls :meth:`check` after having waited for their results, before using them.
    """

    def __init__(
        self,
        *,
        driver: Driver,
        group: Group,
        shape: ExchangeShape,
        handle_type: HandleType | None = None,
        timeout: float = DEFAULT_SECONDS,
        setting: str = "max_tokens",
        timeout_setting: str = "timeout",
    ):
        """Allocate and map the memory, and load the kernels; collective.

        Args:
            driver: of this rank's device, which is torch's current one.
            group: the ranks, each on a device of its own.
            shape: the same on all ranks.
            handle_type: how the memory is shared; None: what works on all ranks.
            timeout: seconds that a launch waits for its peers.
            setting: for messages: what a user changes to have another `shape.max_tokens`.
            timeout_setting: likewise for `timeout`.

        Raises:
            GroupError: some rank can't, or was given another shape. The same text on all ranks; all is freed again.
            MissingRankError: some rank didn't arrive; all is freed likewise.
            ValueError: a number that is out of range; the message names it.
        """
        check_seconds(timeout, timeout_setting)
        super().__init__(group=group, shape=shape, device=_device_of(driver), setting=setting)
        self.table: Table | None = None
        """How launches are made by the size of a step; None: by a heuristic. See tune.py."""
        self._forced: Tuning | None = None
        facts = device_facts(driver.device)
        self._agree_on_shape(facts.target)
        if handle_type is None:
            handle_type = settle_handle_type(driver=driver, group=group).handle_type
        self._buffer = self._allocate(driver, handle_type)
        try:
            # No rank may signal before all have cleared: it would be lost.
            group.agree("dp exchange: clear", self._clear)
            self._timeout = TimeoutWord(
                name=group.name, rank=group.rank, phases=PHASES, seconds=timeout, setting=timeout_setting
            )
        except BaseException:
            self._buffer.free()
            raise
        self._place = Place(
            shape=shape,
            rank=group.rank,
            base=self._buffer.addresses[0],
            stride=self._buffer.size,
            nanoseconds=int(timeout * 1e9),
            report=self._timeout.address,
            device=self.device,
            facts=facts,
            nothing=no_tokens(shape, self.device),
        )

    @property
    def timeout(self) -> float:
        """See the interface."""
        return self._timeout.seconds

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        if seconds != self._timeout.seconds:
            self._timeout.seconds = seconds
            self._place = replace(self._place, nanoseconds=int(seconds * 1e9))

    @contextlib.contextmanager
    def forced(self, tuning: Tuning) -> Iterator[None]:
        """Steps inside are made so, whatever the table says."""
        self._forced = tuning
        try:
            yield
        finally:
            self._forced = None

    def warm_up(self, *, step_tokens: tuple[int, ...] | None = None, input: str = "bfloat16") -> None:
        """Compile, or load, every kernel of all steps; or of steps of exactly so many tokens and of full ones.

        Before the first step: a rank that loads a kernel lets the others wait.

        Args:
            step_tokens: where calls give no others, their ranks have as many tokens or one, and there is no table;
                None: any.
            input: "bfloat16", or "mxfp8" for tokens that come quantized.
        """
        sizes = None if step_tokens is None else tuple(dict.fromkeys((*step_tokens, self.shape.max_tokens)))
        with torch.cuda.device(self.device):
            dispatch.warm_up(self._place, step_tokens=sizes, input=input)
            combine.warm_up(self._place, step_tokens=sizes)

    def dispatch_send(
        self,
        x: torch.Tensor | Mxfp8Tensor,
        *,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        step_tokens: int | None = None,
    ) -> None:
        """See the interface."""
        self.check()
        self._check_sent(x, topk_ids, topk_weights, step_tokens)
        self._order.next("dispatch_send")
        self._begin(step_tokens)
        with torch.cuda.device(self.device):
            dispatch.send(self._place, x, topk_ids=topk_ids, topk_weights=topk_weights)

    def dispatch_receive(self, *, step_tokens: int | None = None, out: ReceivedTokens | None = None) -> ReceivedTokens:
        """See the interface."""
        self.check()
        out = self._checked_received(step_tokens, out)
        self._order.next("dispatch_receive")
        with torch.cuda.device(self.device):
            dispatch.receive(self._place, out)
        return out

    def combine_send(self, rows: torch.Tensor, *, received: ReceivedTokens) -> None:
        """See the interface."""
        self.check()
        self._check_returned(rows, received)
        self._order.next("combine_send")
        with torch.cuda.device(self.device):
            combine.send(self._place, rows, received=received)

    def combine_receive(self, *, topk_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See the interface."""
        self.check()
        out = self._checked_out(topk_ids, out)
        self._order.next("combine_receive")
        with torch.cuda.device(self.device):
            combine.receive(self._place, topk_ids=topk_ids, out=out)
        return out

    def dispatch(
        self,
        x: torch.Tensor | Mxfp8Tensor,
        *,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        step_tokens: int | None = None,
        out: ReceivedTokens | None = None,
    ) -> ReceivedTokens:
        """See the interface."""
        self.check()
        self._check_sent(x, topk_ids, topk_weights, step_tokens)
        out = self._checked_received(step_tokens, out)
        self._order.next("dispatch_send")
        self._order.next("dispatch_receive")
        self._begin(step_tokens)
        with torch.cuda.device(self.device):
            dispatch.send_and_receive(self._place, x, topk_ids=topk_ids, topk_weights=topk_weights, out=out)
        return out

    def combine(
        self,
        rows: torch.Tensor,
        *,
        received: ReceivedTokens,
        topk_ids: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the interface."""
        self.check()
        self._check_returned(rows, received)
        out = self._checked_out(topk_ids, out)
        self._order.next("combine_send")
        self._order.next("combine_receive")
        with torch.cuda.device(self.device):
            combine.send_and_receive(self._place, rows, received=received, topk_ids=topk_ids, out=out)
        return out

    def check(self) -> None:
        """See the interface."""
        self._timeout.check()

    def gave_up(self) -> torch.Tensor:
        """See the interface."""
        return self._timeout.written(self.device)

    def close(self) -> None:
        """See the interface."""
        torch.cuda.synchronize(self.device)
        self._buffer.free()

    def __enter__(self) -> "NvlinkExchange":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def _begin(self, step_tokens: int | None) -> None:
        """How the launches of this step are made."""
        most = self.shape.max_tokens if step_tokens is None else step_tokens
        tuning = self._forced or (self.table.lookup(most) if self.table else None)
        if tuning != self._place.tuning:
            self._place = replace(self._place, tuning=tuning)

    def _allocate(self, driver: Driver, handle_type: HandleType) -> SymmetricBuffer:
        """Where a GPU is full, the setting that makes the exchange smaller is named too, with its size."""
        try:
            return allocate(driver=driver, group=self.group, size=self.layout.size, handle_type=handle_type)
        except GroupError as error:
            full = {rank: text for rank, text in error.reasons.items() if _OUT_OF_MEMORY in text}
            if not full:
                raise
            cure = f"; a lower {self._setting} makes the exchange smaller, which takes {self.layout.describe()}"
            reasons = error.reasons | {rank: text + cure for rank, text in full.items()}
            raise GroupError(name=self.group.name, size=self.group.size, phase=error.phase, reasons=reasons) from error

    def _clear(self) -> None:
        self._buffer.tensor(shape=(self.layout.plans,), dtype=torch.uint8).zero_()
        torch.cuda.synchronize(self.device)


def _device_of(driver: Driver) -> torch.device:
    return torch.device("cuda", driver.device)
