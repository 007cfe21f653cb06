"""A buffer on every rank of a group that all ranks can read and write."""

import math
from types import TracebackType
from typing import TYPE_CHECKING

from vllm_rose_plugin.memory.driver import Driver, HandleType, round_up
from vllm_rose_plugin.memory.handles import share_handles
from vllm_rose_plugin.memory.rendezvous import Group, GroupError
from vllm_rose_plugin.memory.undo import Undo
from vllm_rose_plugin.memory.windows import Windows

if TYPE_CHECKING:
    import torch


class SymmetricBuffer:
    """Memory of the same size on every rank, mapped on this rank at ``addresses``; made by :func:`allocate`.

    The ranks' parts lie behind each other in one range of addresses, so the part of rank r starts at
    ``addresses[0] + r * size``. Use it as a context manager, or call :meth:`free`.
    """

    def __init__(self, *, driver: Driver, group: Group, size: int, granularity: int, handle_type: HandleType):
        """For :func:`allocate`."""
        self.driver = driver
        self.group = group
        self._granularity = granularity
        self.size = round_up(size, granularity)
        """Bytes on each rank: what was asked for, rounded up to the granularity."""
        self.handle_type = handle_type
        self.memory = 0
        """Driver handle of this rank's own part."""
        self.addresses: tuple[int, ...] = ()
        """Device address of every rank's part, by rank."""
        self.suspended = False
        """Whether the memory is given back and only the addresses are held."""
        self._handles: dict[int, int] = {}
        self._contents, self._range = Undo(), Undo()
        self.undo = Undo()
        """What :meth:`free` does, last in, first out; for objects that are built on the buffer."""
        self.undo.add(self._range.close)
        self.undo.add(self._contents.close)
        self._windows = Windows()

    @property
    def address(self) -> int:
        """Device address of this rank's own part.

        Raises:
            ValueError: there is no memory behind it.
        """
        if not self.addresses or self.suspended:
            raise ValueError(f"the buffer is {'suspended: resume it first' if self.addresses else 'freed'}")
        return self.addresses[self.group.rank]

    def tensor(self, *, shape: tuple[int, ...], dtype: "torch.dtype", offset: int = 0) -> "torch.Tensor":
        """A tensor in this rank's own part; the memory isn't cleared.

        Args:
            shape: any.
            dtype: any.
            offset: where it starts, bytes; a multiple of the element's size.

        Raises:
            ValueError: it doesn't fit, isn't aligned, or there is no memory.
        """
        return self._windows.tensor(
            address=self.address, size=self.size, device=self.driver.device, shape=shape, dtype=dtype, offset=offset
        )

    def free(self) -> None:
        """Unmap all parts and give this rank's memory back; a second call does nothing.

        Local: peers keep what they have mapped until they free it themselves. Kernels of this rank that use the buffer
        must have ended.

        Raises:
            BufferInUseError: tensors in it are alive; nothing is freed.
            DriverError: the first call that failed; the others were made nonetheless.
        """
        self._windows.check_none("free")
        self.addresses = ()
        self.undo.close()

    def suspend(self) -> None:
        """Give the memory back and keep the addresses, which are known to captured graphs; a second call does nothing.

        Local, like :meth:`free`. Not for a buffer with a multicast mapping, whose memory it would take away.

        Raises:
            BufferInUseError: tensors in it are alive; nothing is given back.
            DriverError: the first call that failed; the others were made nonetheless.
        """
        self._windows.check_none("suspend")
        self.suspended = True
        self._handles.clear()
        self._contents.close()

    def resume(self) -> None:
        """New memory, with any contents, at the addresses of before; collective. Does nothing if not suspended.

        Raises:
            GroupError: some step failed on some rank; all stay suspended, and the call can be repeated.
            MissingRankError: some rank didn't arrive; likewise.
        """
        if self.suspended:
            self._fill()
            self.suspended = False

    def __enter__(self) -> "SymmetricBuffer":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.free()

    def _fill(self) -> None:
        """Memory on every rank, everyone's mapped everywhere, or nothing anywhere."""
        driver, group, handle_type = self.driver, self.group, self.handle_type
        try:
            group.agree("create", self._create, handle_type=handle_type)
            share_handles(
                driver=driver, group=group, handle=self.memory, handle_type=handle_type, senders=range(group.size),
                receive=self._import, subject="memory",
            )  # fmt: skip
            group.agree("map", self._map, handle_type=handle_type)
            group.agree("access", self._set_access, handle_type=handle_type)
        except BaseException as error:
            self._handles.clear()
            self._contents.close_after(error)
            raise

    # The steps of _fill, each the action of one phase on this rank.

    def _create(self) -> None:
        self.memory = self.driver.create(size=self.size, handle_type=self.handle_type)
        self._own(self.group.rank, self.memory)

    def _own(self, rank: int, handle: int) -> None:
        self._contents.add(self.driver.release, handle=handle)
        self._handles[rank] = handle

    def _import(self, rank: int, shareable: int | bytes) -> None:
        self._own(rank, self.driver.import_handle(shareable=shareable, handle_type=self.handle_type))

    def _map(self) -> None:
        driver, size, total = self.driver, self.size, self.size * self.group.size
        if not self.addresses:
            base = driver.reserve(size=total, alignment=self._granularity)
            self._range.add(driver.free_addresses, address=base, size=total)
            self.addresses = tuple(base + rank * size for rank in range(self.group.size))
        for rank, handle in sorted(self._handles.items()):
            driver.map(address=self.addresses[rank], size=size, handle=handle)
            self._contents.add(driver.unmap, address=self.addresses[rank], size=size)

    def _set_access(self) -> None:
        self.driver.set_access(address=self.addresses[0], size=self.size * self.group.size)


def allocate(
    *, driver: Driver, group: Group, size: int, handle_type: HandleType, for_multicast: bool = False
) -> SymmetricBuffer:
    """Allocate on every rank and map everyone's memory everywhere; collective.

    Args:
        driver: this rank's device.
        group: the ranks, of one host unless ``handle_type`` is FABRIC.
        size: bytes on each rank, the same on all; rounded up to the devices' granularity.
        handle_type: what :func:`~vllm_rose_plugin.memory.handles.settle_handle_type` chose.
        for_multicast: round up so that :func:`~vllm_rose_plugin.memory.multicast.bind_multicast` can take the buffer.

    Raises:
        GroupError: some step failed on some rank. The same text on all ranks; all that was made is freed again, and the
            call can be repeated.
        MissingRankError: some rank didn't arrive; all is freed likewise.
    """

    def request() -> list[int]:
        if size <= 0:
            raise ValueError(f"size={size} must be above 0 bytes")
        granularity = driver.granularity(handle_type)
        if for_multicast:
            multicast = driver.multicast_granularity(devices=group.size, handle_type=handle_type)
            granularity = math.lcm(granularity, multicast)
        return [size, granularity]

    requests = group.agree("size", request, handle_type=handle_type)

    if len({asked for asked, _ in requests}) > 1:
        reasons = {rank: f"it asks for {asked} bytes: ask for the same" for rank, (asked, _) in enumerate(requests)}
        raise GroupError(name=group.name, size=group.size, phase="size", reasons=reasons)
    granularity = math.lcm(*(granularity for _, granularity in requests))
    buffer = SymmetricBuffer(driver=driver, group=group, size=size, granularity=granularity, handle_type=handle_type)
    try:
        buffer._fill()
    except BaseException as error:
        buffer.addresses = ()
        buffer.undo.close_after(error)
        raise
    return buffer
