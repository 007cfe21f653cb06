"""The exchange between CPU processes of one host: the GPUs' layout and protocol, over a file that all have mapped.

For machines with no GPU, where it lets vLLM run data-parallel with expert parallelism, and for tests. It relies on
stores being seen in the order in which they were made, which x86-64 promises.
"""

import mmap
import os
import platform
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.dp_combine.reference import sum_slots
from vllm_rose_plugin.kernels.dp_dispatch.reference import as_payload, destinations, local_routing, slots_of
from vllm_rose_plugin.kernels.dp_exchange.base import BaseExchange
from vllm_rose_plugin.kernels.dp_exchange.interface import ReceivedTokens
from vllm_rose_plugin.kernels.dp_exchange.layout import PHASES, PLAN_BITS, ExchangeShape, Layout
from vllm_rose_plugin.kernels.peer_timeout import DEFAULT_SECONDS, PeerTimeoutError, check_seconds
from vllm_rose_plugin.memory.rendezvous import Group

_ORDERED = ("x86_64", "AMD64")
_SHARED_FOLDER = "/dev/shm"
_POLL_SECONDS = 50e-6


class SharedMemoryExchange(BaseExchange):
    """See :class:`~vllm_rose_plugin.kernels.dp_exchange.interface.Exchange`. Use it from one thread."""

    def __init__(
        self,
        *,
        group: Group,
        shape: ExchangeShape,
        timeout: float = DEFAULT_SECONDS,
        setting: str = "max_tokens",
        timeout_setting: str = "timeout",
    ):
        """Make the file and map it; collective.

        Args:
            group: the ranks, all on this host.
            shape: the same on all ranks.
            timeout: seconds to wait for a peer.
            setting: for messages: what a user changes to have another `shape.max_tokens`.
            timeout_setting: likewise for `timeout`.

        Raises:
            GroupError: some rank can't, or was given another shape. The same text on all ranks.
            MissingRankError: some rank didn't arrive.
            ValueError: a number that is out of range; the message names it.
        """
        check_seconds(timeout, timeout_setting)
        super().__init__(group=group, shape=shape, device=torch.device("cpu"), setting=setting)
        self.timeout, self._timeout_setting = timeout, timeout_setting
        self._epoch = 0
        self._error: PeerTimeoutError | None = None
        self._agree_on_shape()
        path = None
        try:
            path = group.agree("dp exchange: make the file", self._make)[0]
            self._map: mmap.mmap | None = None
            group.agree("dp exchange: map the file", lambda: self._attach(path))
        finally:
            if group.rank == 0 and path:
                Path(path).unlink(missing_ok=True)  # whoever has mapped it keeps it

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
        shape = self.shape
        self._check_sent(x, topk_ids, topk_weights, step_tokens)
        self._order.next("dispatch_send")
        self._epoch += 1
        values, scales = as_payload(x, shape)
        hits = destinations(topk_ids, shape)
        slots = slots_of(hits)
        for i in range(shape.group_size):
            peer = (self.rank + i) % shape.group_size
            part = self._parts[peer]
            tokens = hits[:, peer].nonzero().flatten()
            part.send_rows(
                self._epoch & 1,
                self.rank,
                tokens,
                values=values[tokens],
                scales=None if scales is None else scales[tokens],
                ids=topk_ids[tokens],
                weights=topk_weights[tokens],
                slots=slots[tokens, peer],
            )
            part.token_flags[self.rank, tokens] = self._epoch
            part.plans[self._epoch & 1, self.rank] = _packed(hits[:, peer], shape)
            part.plan_flags[self.rank] = self._epoch

    def dispatch_receive(self, *, step_tokens: int | None = None, out: ReceivedTokens | None = None) -> ReceivedTokens:
        """See the interface."""
        self.check()
        shape, part, parity = self.shape, self._parts[self.rank], self._epoch & 1
        most = shape.check_step(num_tokens=0, step_tokens=step_tokens, setting=self._setting)
        out = self._checked_received(most, out)
        total = len(out.topk_ids)
        self._order.next("dispatch_receive")
        for sender in range(shape.group_size):
            self._wait(part.plan_flags[sender : sender + 1], sender, 0)
        out.topk_ids.fill_(-1)
        out.topk_weights.zero_()
        out.row_sources.fill_(-1)
        first = 0
        for sender in range(shape.group_size):
            tokens = _unpacked(part.plans[parity, sender])
            tokens = tokens[: total - first]
            self._wait(part.token_flags[sender, tokens], sender, 1, lambda s=sender, t=tokens: part.token_flags[s, t])
            rows = slice(first, first + len(tokens))
            part.receive_rows(parity, sender, tokens, out, rows, rank=self.rank)
            first += len(tokens)
        out.num_rows.fill_(first)
        return out

    def combine_send(self, rows: torch.Tensor, *, received: ReceivedTokens) -> None:
        """See the interface."""
        self.check()
        shape = self.shape
        self._check_returned(rows, received)
        self._order.next("combine_send")
        span = shape.max_tokens * shape.slots
        count = int(received.num_rows)
        sources = received.row_sources[:count].long()
        for i in range(shape.group_size):
            peer = (self.rank + i) % shape.group_size
            mine = (sources // span) == peer
            places = sources[mine] % span
            self._parts[peer].combine_rows[places] = rows[:count][mine]
            self._parts[peer].row_flags[places] = self._epoch

    def combine_receive(self, *, topk_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """See the interface."""
        self.check()
        shape, part = self.shape, self._parts[self.rank]
        out = self._checked_out(topk_ids, out)
        self._order.next("combine_receive")
        hits = destinations(topk_ids, shape)
        slots = slots_of(hits)
        for peer in range(shape.group_size):
            tokens = hits[:, peer].nonzero().flatten()
            places = tokens * shape.slots + slots[tokens, peer]
            self._wait(part.row_flags[places], peer, 2, lambda p=places: part.row_flags[p])
        return out.copy_(sum_slots(part.combine_rows, hits.sum(1), shape))

    def check(self) -> None:
        """See the interface."""
        if self._error:
            raise self._error

    def gave_up(self) -> torch.Tensor:
        """See the interface."""
        return torch.tensor(self._error is not None)

    def close(self) -> None:
        """See the interface."""
        self._parts: list[_Part] = []
        self._map = None  # unmapped with the last tensor in it

    def _wait(self, flags: torch.Tensor, peer: int, phase: int, again: Any = None) -> None:
        """Until all flags have reached the epoch; `again` reads them anew where `flags` is a copy.

        Raises:
            PeerTimeoutError: they haven't in time.
        """
        start = time.monotonic()
        while not bool((flags >= self._epoch).all()):
            if time.monotonic() - start >= self.timeout:
                self._error = PeerTimeoutError(
                    name=self.group.name,
                    rank=self.rank,
                    peer=peer,
                    phase=PHASES[phase],
                    epoch=self._epoch,
                    seconds=self.timeout,
                    setting=self._timeout_setting,
                )
                raise self._error
            time.sleep(_POLL_SECONDS)
            flags = again() if again else flags

    def _make(self) -> str | None:
        """On rank 0: the file, whose space is reserved, since a full disk would be a signal at the first store."""
        if platform.machine() not in _ORDERED:
            raise RuntimeError(f"{platform.machine()} may reorder stores: only {' and '.join(_ORDERED)} can do this")
        if self.rank:
            return None
        folder = _SHARED_FOLDER if os.path.isdir(_SHARED_FOLDER) else None
        handle, path = tempfile.mkstemp(prefix="rose-dp-exchange-", dir=folder)
        try:
            os.posix_fallocate(handle, 0, self.layout.size * self.shape.group_size)
        except OSError as error:
            os.unlink(path)
            raise RuntimeError(
                f"no room for {self.layout.size * self.shape.group_size} bytes in {os.path.dirname(path)} "
                f"({error.strerror}): {self._setting} makes the exchange smaller; {self.layout.describe()}"
            ) from error
        finally:
            os.close(handle)
        return path

    def _attach(self, path: str) -> None:
        with open(path, "r+b") as file:
            self._map = mmap.mmap(file.fileno(), 0)
        whole = torch.frombuffer(self._map, dtype=torch.uint8)
        self._parts = [
            _Part(whole[rank * self.layout.size : (rank + 1) * self.layout.size], self.layout)
            for rank in range(self.shape.group_size)
        ]


def _packed(hits: torch.Tensor, shape: ExchangeShape) -> torch.Tensor:
    """Bits of a plan, as int32 words."""
    bits = torch.zeros(shape.plan_words, PLAN_BITS, dtype=torch.int64)
    bits.view(-1)[: len(hits)] = hits.long()
    words = (bits << torch.arange(PLAN_BITS)).sum(1)
    return torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)


def _unpacked(words: torch.Tensor) -> torch.Tensor:
    """Tokens of a plan, ascending."""
    bits = (words.long().unsqueeze(1) >> torch.arange(PLAN_BITS)) & 1
    return bits.flatten().nonzero().flatten()


class _Part:
    """One rank's part, as tensors."""

    def __init__(self, memory: torch.Tensor, layout: Layout):
        shape = layout.shape
        self.layout = layout

        def view(start: int, count: int, dtype: torch.dtype) -> torch.Tensor:
            return memory[start : start + count * dtype.itemsize].view(dtype)

        group, most, places = shape.group_size, shape.max_tokens, shape.max_tokens * shape.slots
        self.plan_flags = view(layout.plan_flags, group, torch.int64)
        self.token_flags = view(layout.token_flags, group * most, torch.int64).view(group, most)
        self.row_flags = view(layout.row_flags, places, torch.int64)
        self.plans = view(layout.plans, 2 * group * shape.plan_words, torch.int32).view(2, group, -1)
        rows = view(layout.dispatch_rows, 2 * group * most * layout.row_bytes, torch.uint8)
        self.rows = rows.view(2, group, most, layout.row_bytes)
        back = view(layout.combine_rows, places * layout.combine_row_bytes, torch.uint8).view(places, -1)
        self.combine_rows = back[:, : 2 * shape.hidden_size].view(torch.bfloat16)
        top_k = shape.top_k
        self.elements = slice(0, layout.code_bytes)
        self.scales = slice(layout.scales, layout.scales + shape.hidden_size // 32)
        self.ids = slice(layout.ids, layout.ids + 4 * top_k)
        self.weights = slice(layout.weights, layout.weights + 4 * top_k)
        self.slot = slice(layout.slot, layout.slot + 4)

    def send_rows(
        self,
        parity: int,
        sender: int,
        tokens: torch.Tensor,
        *,
        values: torch.Tensor,
        scales: torch.Tensor | None,
        ids: torch.Tensor,
        weights: torch.Tensor,
        slots: torch.Tensor,
    ) -> None:
        """Write the rows of some tokens."""
        rows = self.rows[parity, sender]
        for where, what in (
            (self.elements, values),
            (self.ids, ids),
            (self.weights, weights),
            (self.slot, slots.unsqueeze(1)),
        ):
            rows[tokens, where] = what.contiguous().view(torch.uint8)
        if scales is not None:
            rows[tokens, self.scales] = scales

    def receive_rows(
        self, parity: int, sender: int, tokens: torch.Tensor, out: ReceivedTokens, to: slice, *, rank: int
    ) -> None:
        """Read the rows of some tokens into the results' rows `to`."""
        shape = self.layout.shape
        rows = self.rows[parity, sender][tokens]
        if isinstance(out.tokens, Mxfp8Tensor):
            out.tokens.codes.view(torch.uint8)[to] = rows[:, self.elements]
            out.tokens.scales[to] = rows[:, self.scales]
        else:
            out.tokens[to] = rows[:, self.elements].contiguous().view(torch.bfloat16)
        ids = rows[:, self.ids].contiguous().view(torch.int32)
        weights = rows[:, self.weights].contiguous().view(torch.float32)
        out.topk_ids[to], out.topk_weights[to] = local_routing(ids, weights, shape=shape, rank=rank)
        slot = rows[:, self.slot].contiguous().view(torch.int32).flatten()
        out.row_sources[to] = ((sender * shape.max_tokens + tokens) * shape.slots + slot).to(torch.int32)
