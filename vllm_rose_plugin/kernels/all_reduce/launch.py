"""All-reduce of tensors on the GPUs of a group, through a buffer that all of them have mapped."""

import functools
import math
from collections.abc import Callable
from types import TracebackType

import torch

from vllm_rose_plugin.kernels.all_reduce.config import (
    ITEM_BYTES,
    Access,
    AllReduceConfig,
    Plan,
    Tuning,
    choose_plan,
)
from vllm_rose_plugin.kernels.all_reduce.layout import MAX_RANKS, PHASES, VECTOR, Heap, Layout
from vllm_rose_plugin.kernels.all_reduce.table import Table
from vllm_rose_plugin.kernels.gemm.checks import check_on_gpu
from vllm_rose_plugin.kernels.jit.compile import compile
from vllm_rose_plugin.kernels.mxfp8_quantize.config import alignment_of
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts
from vllm_rose_plugin.kernels.peer_timeout import DEFAULT_SECONDS, TimeoutWord, check_seconds
from vllm_rose_plugin.memory.driver import Driver, HandleType
from vllm_rose_plugin.memory.handles import settle_handle_type
from vllm_rose_plugin.memory.multicast import bind_multicast
from vllm_rose_plugin.memory.rendezvous import Group, GroupError
from vllm_rose_plugin.memory.symmetric import allocate

DTYPE_NAMES = {getattr(torch, name): name for name in ITEM_BYTES}
_ALIGNMENT = 32


class AllReduce:
    """The sum of every rank's tensor, on every rank.

    All ranks make the same calls in the same order, on one stream at a time, with tensors of the same dtype and number
    of elements; where one rank gives tensors of :meth:`empty`, all give the same ones. Eager calls and graph replays
    may be mixed, in the same order on all ranks. Use it as a context manager, or call :meth:`close`.

    A peer that doesn't come makes the kernels give up after `timeout`; results are undefined from then on, and
    :class:`~vllm_rose_plugin.kernels.peer_timeout.PeerTimeoutError` is raised by the next call and by :meth:`check`.
    Neither waits for the stream. Who only replays graphs calls :meth:`check` after having waited for their results,
    before using them.
    """

    def __init__(
        self,
        *,
        driver: Driver,
        group: Group,
        max_bytes: int,
        heap_bytes: int = 0,
        handle_type: HandleType | None = None,
        access: Access = Access.PEERS,
        same_bits: bool = False,
        timeout: float = DEFAULT_SECONDS,
        setting: str = "AllReduce(timeout=…)",
    ):
        """Allocate and map the buffer; collective.

        Args:
            driver: of this rank's device, which is torch's current one.
            group: the ranks, 2 to 72, each on a device of its own.
            max_bytes: largest tensor that is taken where input or output don't lie in the heap. It is allocated twice,
                for even and odd launches.
            heap_bytes: for tensors of :meth:`empty`.
            handle_type: how the memory is shared; None: what works on all ranks.
            access: PEERS loops over the ranks' memory. MULTIMEM makes a multicast object, for NVLS.
            same_bits: all ranks get the same bits, with MULTIMEM too: one-shot then loops over the ranks' memory.
            timeout: seconds that a kernel waits for a peer.
            setting: for the message of a timeout: what a user changes to have another one.

        Raises:
            GroupError: some rank can't, or was given other sizes. The same text on all ranks; all is freed again.
            MissingRankError: some rank didn't arrive; all is freed likewise.
            ValueError: a number that is out of range; the message names it.
        """
        if not 2 <= group.size <= MAX_RANKS:
            raise ValueError(f"all-reduce over {group.size} ranks; it must be 2 to {MAX_RANKS}")
        for name, size in (("max_bytes", max_bytes), ("heap_bytes", heap_bytes)):
            if size < 0:
                raise ValueError(f"{name}={size}; it must be 0 or more")
        check_seconds(timeout, setting)
        self.group = group
        self.access = access
        self.same_bits = same_bits
        self.layout = Layout(group.size, max_bytes, heap_bytes)
        self.table: Table | None = None
        """What was measured, the same on all ranks; None: the heuristic decides."""
        self._device = driver.device
        self._facts = device_facts(driver.device)
        self._heap = Heap(self.layout)
        self._plans: dict[tuple, Plan] = {}
        self._agree()
        if handle_type is None:
            handle_type = settle_handle_type(driver=driver, group=group).handle_type
        multimem = access is Access.MULTIMEM
        self._buffer = allocate(
            driver=driver, group=group, size=self.layout.size, handle_type=handle_type, for_multicast=multimem
        )
        try:
            self._multicast = bind_multicast(self._buffer) if multimem else None

            def clear() -> None:
                self._timeout = TimeoutWord(
                    name=group.name, rank=group.rank, phases=PHASES, seconds=timeout, setting=setting
                )
                self._clear()

            # No rank may signal before all have cleared: it would be lost.
            group.agree("all-reduce: clear", clear)
        except BaseException:
            self._buffer.free()
            raise

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """The sum over ranks, in float32 and, with Access.PEERS, in the order of ranks, rounded once.

        Args:
            x: bf16, fp16 or fp32, contiguous, any shape and alignment, on this rank's device.
            out: where to write, like x; x itself for in place, otherwise without overlap. None: a new tensor.

        Returns:
            out. Tensors of :meth:`empty`, or parts of them, whose place and size are multiples of 16 bytes are not
            copied where the algorithm can do without; all others are copied by the kernel.

        Raises:
            PeerTimeoutError: an earlier launch gave up.
            TypeError, ValueError: what doesn't fit; the message names it.
        """
        self._timeout.check()
        return self.launch(x, torch.empty_like(x) if out is None else out, self.tuning(x))

    def takes(self, x: torch.Tensor) -> bool:
        """Whether x can be reduced in place; the same on all ranks that have tensors alike, strides included."""
        return (
            x.dtype in DTYPE_NAMES
            and x.is_cuda
            and x.is_contiguous()
            and (x.nbytes <= self.layout.capacity or self.heap_offset(x) is not None)
        )

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """A tensor in the buffer, not cleared; its space is not used again.

        All ranks ask for the same tensors in the same order. They must be gone before :meth:`close`.

        Raises:
            MemoryError: heap_bytes is used up; the message says how many are needed.
        """
        offset = self._heap.take(math.prod(shape) * dtype.itemsize)
        return self._buffer.tensor(shape=shape, dtype=dtype, offset=offset)

    @property
    def target(self) -> str:
        """Compile target of the device."""
        return self._facts.target

    @property
    def sm_count(self) -> int:
        """Of the device."""
        return self._facts.sm_count

    @property
    def timeout(self) -> float:
        """Seconds that a kernel waits for a peer; for the launches that follow. A captured one keeps what it has."""
        return self._timeout.seconds

    @timeout.setter
    def timeout(self, seconds: float) -> None:
        check_seconds(seconds, self._timeout.setting)
        self._timeout.seconds = seconds

    def check(self) -> None:
        """Raise if a launch that has ended gave up waiting for a peer. Doesn't wait for launches that haven't.

        Raises:
            PeerTimeoutError: with peer, phase and epoch.
        """
        self._timeout.check()

    def suspend(self) -> None:
        """Wait for this rank's launches and give the memory back; the addresses stay, so captured graphs stay valid.

        Not collective. No call and no replay may come before :meth:`resume`.

        Raises:
            BufferInUseError: tensors of :meth:`empty` are alive; nothing is given back.
            ValueError: with MULTIMEM, whose multicast object holds the memory.
        """
        if self._multicast:
            raise ValueError("an all-reduce over NVLS can't be suspended: its multicast object holds the memory")
        torch.cuda.synchronize(self._device)
        self._buffer.suspend()

    def resume(self) -> None:
        """Make calls and replays possible again; collective.

        Raises:
            GroupError: some rank can't; all stay suspended, and the call can be repeated.
            MissingRankError: some rank didn't arrive; likewise.
        """
        self._buffer.resume()
        # Epochs start anew, on all ranks.
        self.group.agree("all-reduce: clear", self._clear)

    def close(self) -> None:
        """Wait for this rank's launches and free the buffer; a second call does nothing.

        Not collective; but with MULTIMEM and without `same_bits` the launches of all ranks must have ended, since a
        one-shot launch of a peer may still read through the multicast object that this rank leaves.

        Raises:
            BufferInUseError: tensors of :meth:`empty` are alive; nothing is freed.
        """
        torch.cuda.synchronize(self._device)
        self._buffer.free()

    def __enter__(self) -> "AllReduce":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def launch(self, x: torch.Tensor, out: torch.Tensor, tuning: Tuning | None) -> torch.Tensor:
        """As a call, with what a measurement is to try; None: the heuristic. Doesn't look for timeouts."""
        _check(x, out, self._device)
        if not x.numel():
            return out
        plan = self.plan(x, out, tuning)
        source, target, config = self.heap_offset(x), self.heap_offset(out), plan.config
        with torch.cuda.device(self._device):
            kernel(config, self.target)(
                x.view(-1),
                out.view(-1),
                plan.blocks,
                *self.numbers(None if config.copy_in else source, None if config.copy_out else target),
            )
        return out

    def numbers(self, source: int | None, target: int | None) -> tuple[int, ...]:
        """What every kernel over this buffer takes, from `rank` to `report`; see `kernel.AllReduce.__call__`.

        Args:
            source, target: byte offsets in a part; None: the staging buffer of the launch.
        """
        staged = (self.layout.staging, self.layout.capacity)
        return (
            self.group.rank,
            self._buffer.address - self.group.rank * self._buffer.size,  # an error where there is no memory
            self._buffer.size,
            self._multicast.address if self._multicast else 0,
            *(staged if source is None else (source, 0)),
            *(staged if target is None else (target, 0)),
            int(self._timeout.seconds * 1e9),
            self._timeout.address,
        )

    def plan(self, x: torch.Tensor, out: torch.Tensor, tuning: Tuning | None) -> Plan:
        """The kernel and the blocks of a launch.

        Raises:
            ValueError: no kernel takes it, or it is too large.
        """
        source, target = self.heap_offset(x) is not None, self.heap_offset(out) is not None
        places = (x.data_ptr() | out.data_ptr()) % _ALIGNMENT
        key = (x.nbytes, x.dtype, source, target, places, tuning)
        found = self._plans.get(key)
        if found is None:
            found = self._plans[key] = self._choose(x, source, target, places, tuning)
        return found

    def _choose(self, x: torch.Tensor, source: bool, target: bool, places: int, tuning: Tuning | None) -> Plan:
        plan = choose_plan(
            num_bytes=x.nbytes,
            dtype=DTYPE_NAMES[x.dtype],
            group_size=self.group.size,
            access=self.access,
            zero_copy_in=source,
            zero_copy_out=target,
            alignment=alignment_of(pointer=places, row_bytes=0, limit=_ALIGNMENT),
            same_bits=self.same_bits,
            tuning=tuning,
            **self._facts._asdict(),
        )
        if x.nbytes > self.layout.capacity and (plan.config.copy_in or plan.config.copy_out):
            raise ValueError(
                f"{x.nbytes} bytes of {tuple(x.shape)} {x.dtype} are more than max_bytes={self.layout.max_bytes}: make "
                "it larger, or give tensors of empty() for input and output"
            )
        return plan

    def tuning(self, x: torch.Tensor) -> Tuning | None:
        """What was measured for tensors of this size; None: the heuristic decides."""
        return self.table.lookup(x.nbytes) if self.table else None

    def heap_offset(self, x: torch.Tensor) -> int | None:
        """Where in a part of the buffer a zero-copy tensor starts; None for any other.

        Raises:
            ValueError: the buffer is suspended or freed.
        """
        offset = x.data_ptr() - self._buffer.address
        inside = self.layout.heap <= offset and offset + x.nbytes <= self.layout.size
        return offset if inside and offset % VECTOR == 0 and x.nbytes % VECTOR == 0 else None

    def _agree(self) -> None:
        """Ranks that were given other numbers would wait for each other at other places."""
        layout = self.layout
        mine = (
            f"max_bytes={layout.max_bytes}, heap_bytes={layout.heap_bytes}, {self.access.value}, {self._facts.target}"
            + (", same bits" if self.same_bits else "")
        )
        answers = self.group.agree("all-reduce: settings", lambda: [mine, self._facts.sm_count])
        if any(answer != answers[0] for answer in answers):
            reasons = {rank: f"{text} on {sms} SMs: give all the same" for rank, (text, sms) in enumerate(answers)}
            raise GroupError(name=self.group.name, size=self.group.size, phase="all-reduce: settings", reasons=reasons)

    def _clear(self) -> None:
        self._buffer.tensor(shape=(self.layout.staging,), dtype=torch.uint8).zero_()
        torch.cuda.synchronize(self._device)


def _check(x: torch.Tensor, out: torch.Tensor, device: int) -> None:
    check_on_gpu("x", x)
    if x.dtype not in DTYPE_NAMES:
        raise TypeError(f"x must be {' or '.join(map(str, DTYPE_NAMES))}, got {x.dtype}")
    if x.device.index != device or not x.is_contiguous():
        raise ValueError(f"x must be contiguous on cuda:{device}, got strides {x.stride()} on {x.device}")
    if out.dtype != x.dtype or out.shape != x.shape or out.device != x.device or not out.is_contiguous():
        raise ValueError(
            f"out must be contiguous {tuple(x.shape)} {x.dtype} on {x.device}, "
            f"got {tuple(out.shape)} {out.dtype} with strides {out.stride()} on {out.device}"
        )
    if x.data_ptr() != out.data_ptr() and abs(x.data_ptr() - out.data_ptr()) < x.nbytes:
        raise ValueError("x and out overlap without being the same")


@functools.cache
def kernel(config: AllReduceConfig, target: str) -> Callable:
    """The compiled kernel of a config."""
    from vllm_rose_plugin.kernels.all_reduce.kernel import build  # imports cutlass

    return compile(family="all_reduce", config=config, build=build, target=target)
