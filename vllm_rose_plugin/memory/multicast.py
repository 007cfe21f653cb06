"""One address behind which the same bytes of all ranks lie: NVLink multicast, which NVLS instructions read and write.

A failed multicast set-up can disturb other users of the same NVSwitch, so nothing here runs unless a caller asks.
"""

from vllm_rose_plugin.memory.handles import share_handles
from vllm_rose_plugin.memory.rendezvous import Group
from vllm_rose_plugin.memory.symmetric import SymmetricBuffer
from vllm_rose_plugin.memory.undo import Undo


class MulticastUnsupportedError(RuntimeError):
    """A device without multicast, by its attribute."""


class MulticastMapping:
    """A buffer's multicast object, mapped on this rank; made by :func:`bind_multicast`, freed with the buffer."""

    def __init__(self, buffer: SymmetricBuffer):
        """For :func:`bind_multicast`."""
        self.size = buffer.size
        """Bytes, those of the buffer on one rank."""
        self.address = 0
        """Device address on this rank; only ``multimem`` instructions may use it. 0: freed."""
        self._buffer = buffer
        self._driver = buffer.driver
        self._handle = 0
        self._undo = Undo()

    def free(self) -> None:
        """Unmap it and take this rank's memory out of it; a second call does nothing.

        Local, like :meth:`~vllm_rose_plugin.memory.symmetric.SymmetricBuffer.free`, but no rank may use the object any
        more once a rank has left it.

        Raises:
            DriverError: the first call that failed; the others were made nonetheless.
        """
        self.address = 0
        self._undo.close()

    # The steps of bind_multicast, each the action of one phase on this rank.

    def _check(self) -> None:
        if not self._driver.attribute("MULTICAST_SUPPORTED"):
            raise MulticastUnsupportedError(
                f"GPU {self._driver.device} has no NVLink multicast, by its attribute. It needs GPUs behind an "
                "NVSwitch and a running nvidia-fabricmanager"
            )
        granularity = self._granularity()
        if self.size % granularity:
            raise ValueError(f"size={self.size} must be a multiple of {granularity}: allocate with for_multicast=True")

    def _granularity(self) -> int:
        devices, handle_type = self._buffer.group.size, self._buffer.handle_type
        return self._driver.multicast_granularity(devices=devices, handle_type=handle_type)

    def _create(self) -> None:
        group = self._buffer.group
        if group.rank == 0:
            self._own(
                self._driver.multicast_create(devices=group.size, size=self.size, handle_type=self._buffer.handle_type)
            )

    def _own(self, handle: int) -> None:
        self._undo.add(self._driver.release, handle=handle)
        self._handle = handle

    def _import(self, rank: int, shareable: int | bytes) -> None:
        self._own(self._driver.import_handle(shareable=shareable, handle_type=self._buffer.handle_type))

    def _bind(self) -> None:
        self._driver.multicast_bind(multicast=self._handle, memory=self._buffer.memory, size=self.size)
        self._undo.add(self._driver.multicast_unbind, multicast=self._handle, size=self.size)

    def _map(self) -> None:
        alignment = self._granularity()
        address = self._driver.reserve(size=self.size, alignment=alignment)
        self._undo.add(self._driver.free_addresses, address=address, size=self.size)
        self._driver.map(address=address, size=self.size, handle=self._handle)
        self._undo.add(self._driver.unmap, address=address, size=self.size)
        self.address = address


def bind_multicast(buffer: SymmetricBuffer) -> MulticastMapping:
    """Make a multicast object of all ranks' GPUs and put every rank's part of the buffer behind it; collective.

    Args:
        buffer: from ``allocate(…, for_multicast=True)``; every rank on a GPU of its own.

    Raises:
        GroupError: some step failed on some rank. The same text on all ranks; what was made here is freed, the buffer
            stays usable, and the call can be repeated.
        MissingRankError: some rank didn't arrive; likewise.
    """
    group: Group = buffer.group
    driver, handle_type = buffer.driver, buffer.handle_type
    mapping = MulticastMapping(buffer)
    try:
        group.agree("multicast: support", mapping._check, handle_type=handle_type)
        group.agree("multicast: create", mapping._create, handle_type=handle_type)
        share_handles(
            driver=driver, group=group, handle=mapping._handle, handle_type=handle_type, senders=[0],
            receive=mapping._import, subject="multicast",
        )  # fmt: skip
        # Bind and map block in the driver until all devices are in: each starts only when the step before it is agreed.
        group.agree("multicast: add device", lambda: driver.multicast_add_device(mapping._handle))
        group.agree("multicast: bind", mapping._bind)
        group.agree("multicast: map", mapping._map)
        group.agree("multicast: access", lambda: driver.set_access(address=mapping.address, size=mapping.size))
    except BaseException as error:
        mapping.address = 0
        mapping._undo.close_after(error)
        raise
    buffer.undo.add(mapping.free)
    return mapping
