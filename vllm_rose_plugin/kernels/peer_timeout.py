"""What a kernel leaves when it gave up waiting for a peer, and the error that a worker raises for it.

The kernel stores one 64-bit word into pinned host memory, when it gives up for the first time; a store that wide is
never seen in halves. Reading it is a look at the process's own memory, so the host can do that before every launch
without waiting for the stream.

A peer that is named may itself have given up, waiting for another: its own log says for whom.
"""

import ctypes
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

DEFAULT_SECONDS = 60.0
"""How long a kernel waits for a peer."""
MOST_SECONDS = 86400.0
"""The kernel adds nanoseconds to the GPU's clock, in 64 bits; what takes more than a day is a hang."""
PHASE_SHIFT, EPOCH_SHIFT = 8, 16
"""In the word: peer + 1 in the low 8 bits, then 8 bits of phase, then the epoch. 0: nobody gave up."""


def check_seconds(seconds: float, setting: str) -> None:
    """Refuse a time to wait that no kernel can be given.

    Args:
        setting: what a user changes to have another.

    Raises:
        ValueError: it isn't above 0 and up to MOST_SECONDS.
    """
    if not 0 < seconds <= MOST_SECONDS:  # NaN is neither
        raise ValueError(
            f"a timeout of {seconds:g} s; it must be above 0 and up to {MOST_SECONDS:g} s: {setting} sets it"
        )


class PeerTimeoutError(RuntimeError):
    """A peer didn't come in time; what the group computed since is undefined and the group must be made anew."""

    def __init__(self, *, name: str, rank: int, peer: int, phase: str, epoch: int, seconds: float, setting: str):
        self.rank = rank
        self.peer = peer
        self.phase = phase
        self.epoch = epoch
        """Number of the launch on this rank, from 1."""
        self.seconds = seconds
        super().__init__(
            f"{name}: rank {rank} waited {seconds:g} s for rank {peer} in phase {phase!r} of epoch {epoch} and gave "
            f"up: look at the log of rank {peer}; if it was only late, {setting} sets the time"
        )


class TimeoutWord:
    """The word of one group on one rank.

    Args:
        name: of the group, for the message.
        rank: of this process.
        phases: names of the kernel's phases.
        seconds: the deadline that the kernel is given.
        setting: what a user changes to have another deadline.
        memory: int64 ``[1]``, on the host, where a device can write; None: new pinned memory.
    """

    def __init__(
        self,
        *,
        name: str,
        rank: int,
        phases: tuple[str, ...],
        seconds: float,
        setting: str,
        memory: "torch.Tensor | None" = None,
    ):
        import torch

        self._memory = torch.zeros(1, dtype=torch.int64, pin_memory=True) if memory is None else memory
        self._word = ctypes.c_int64.from_address(self._memory.data_ptr())
        self.seconds = seconds
        """The deadline of the launches that follow; a user may change it between them."""
        self.setting = setting
        """What a user changes to have another one."""
        self._name, self._rank, self._phases = name, rank, phases

    @property
    def address(self) -> int:
        """For the kernel; the same on host and device, since addresses are unified."""
        return self._memory.data_ptr()

    def written(self, device: "torch.device") -> "torch.Tensor":
        """Whether a kernel has given up when the device's current stream gets here: a bool ``[]`` on the device."""
        return self._memory.to(device, non_blocking=True)[0] != 0

    def check(self) -> None:
        """Look whether a kernel gave up. Costs well under a microsecond and touches no stream.

        Raises:
            PeerTimeoutError: one did; every later check raises again.
        """
        word = self._word.value
        if word:
            raise PeerTimeoutError(
                name=self._name,
                rank=self._rank,
                peer=(word & 0xFF) - 1,
                phase=self._phases[word >> PHASE_SHIFT & 0xFF],
                epoch=word >> EPOCH_SHIFT,
                seconds=self.seconds,
                setting=self.setting,
            )
