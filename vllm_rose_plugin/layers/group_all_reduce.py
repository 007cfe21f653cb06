"""Our all-reduce for one group of vLLM's: how it is made, what it takes, and its life between sleep and destruction.

All ranks of a group decide alike. What serves the group is settled once, by a verdict over all ranks; whether a tensor
is taken follows from its dtype and size, which are the same on all ranks, and never from where a rank happens to have
it: a tensor that is not contiguous or aligned is copied on the rank where it isn't.
"""

from dataclasses import dataclass

import torch

from vllm_rose_plugin.config import AllReduceChoice
from vllm_rose_plugin.kernels import call_counts
from vllm_rose_plugin.kernels.all_reduce.config import Access
from vllm_rose_plugin.kernels.all_reduce.launch import DTYPE_NAMES, AllReduce
from vllm_rose_plugin.kernels.all_reduce.layout import MAX_RANKS
from vllm_rose_plugin.kernels.all_reduce.tune import tune
from vllm_rose_plugin.kernels.all_reduce.warm import warm
from vllm_rose_plugin.layers import gpu
from vllm_rose_plugin.layers.group_norm import GroupNorm, make_norm
from vllm_rose_plugin.layers.log import logger
from vllm_rose_plugin.memory.driver import Driver
from vllm_rose_plugin.memory.rendezvous import Group, GroupError, MissingRankError

OP, NORM_OP = "all_reduce", "all_reduce_norm"
"""In the counts of calls; providers are ``rose_p2p``, ``rose_nvls`` and ``vllm``."""
NVLS_FROM = 4
"""Ranks from which ``auto`` prefers NVLS: two have nothing to gain, three nobody has."""
STARTUP_SECONDS = 600.0
"""Until the first request, ranks may wait that long for one that loads or compiles more slowly."""

_ALIGNMENT = 32
_NAMES = {Access.PEERS: "p2p", Access.MULTIMEM: "nvls"}
_TIMEOUT = '--additional-config {"rose": {"all_reduce_timeout": …}} or ROSE_ALL_REDUCE_TIMEOUT'


@dataclass(frozen=True)
class Wish:
    """What the configuration asks for; the same on all ranks."""

    choice: AllReduceChoice
    timeout: float
    """Seconds that a kernel waits for a rank while requests are served."""
    hidden_size: int
    dtype: torch.dtype
    most_tokens: int
    """Of a step."""
    norm: bool
    """Whether residual and RMS norm may go into the launch."""
    batch_invariant: bool
    """vLLM's VLLM_BATCH_INVARIANT: sums must not depend on the size of the batch."""

    @property
    def max_bytes(self) -> int:
        """Largest tensor that is taken: the hidden states of the largest step."""
        return self.most_tokens * self.hidden_size * self.dtype.itemsize


class GroupAllReduce:
    """Made by :func:`make`."""

    def __init__(self, *, reduce: AllReduce, norm: GroupNorm | None, wish: Wish, why: str):
        """For :func:`make`."""
        self.why = why
        """What serves the group and why, in words."""
        self._reduce: AllReduce | None = reduce
        self._norm = norm
        self._wish = wish
        self._provider = f"rose_{_NAMES[reduce.access]}"
        self._starting = True

    def takes(self, x: torch.Tensor) -> bool:
        """Whether x is ours to reduce: rows of hidden states in the model's dtype, whose kernels are ready.

        Looks at nothing that can differ between ranks.
        """
        wish, count = self._wish, x.numel()
        return (
            x.dtype == wish.dtype
            and count % wish.hidden_size == 0
            and 0 < count * wish.dtype.itemsize <= wish.max_bytes
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """The sum over ranks of a tensor that :meth:`takes` takes, as a new tensor with x's strides.

        Raises:
            PeerTimeoutError: an earlier launch gave up.
        """
        if not x.is_contiguous():
            return torch.empty_like(x).copy_(self(x.contiguous()))
        reduce = self._ready()
        call_counts.count(OP, self._provider)
        # Other kernels than those that were warmed up serve what isn't aligned.
        return reduce(x if x.data_ptr() % _ALIGNMENT == 0 else x.clone())

    def normalized(
        self, x: torch.Tensor, *, residual: torch.Tensor, weight: torch.Tensor, eps: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The sum over ranks, the residual and the RMS norm in one launch: (rows, new residual), as new tensors.

        Returns:
            None where the group has no such launch, or it isn't faster for so many rows: on all ranks or on none.

        Raises:
            PeerTimeoutError: an earlier launch gave up.
        """
        tuning = self._norm.takes(x, residual, weight) if self._norm is not None else None
        if self._norm is None or tuning is None:
            return None
        self._ready()
        call_counts.count(NORM_OP, self._provider)
        return self._norm(x, residual=residual, weight=weight, eps=eps, tuning=tuning)

    def _ready(self) -> AllReduce:
        """With the deadline that the next launch is to have."""
        assert self._reduce is not None, "the group is destroyed"
        if self._starting:
            # A captured launch keeps its deadline, and is replayed for requests.
            capturing = torch.cuda.is_current_stream_capturing()
            self._reduce.timeout = self._wish.timeout if capturing else max(self._wish.timeout, STARTUP_SECONDS)
        return self._reduce

    def begin_step(self) -> None:
        """Called before every step with requests: the first one ends start-up.

        Raises:
            PeerTimeoutError: see :meth:`check`.
        """
        self.check()  # first: what gave up during start-up is reported with the deadline that it had
        if self._starting and self._reduce is not None:
            self._starting, self._reduce.timeout = False, self._wish.timeout

    def check(self) -> None:
        """Raise if a launch that has ended gave up waiting for a peer; touches no stream.

        Raises:
            PeerTimeoutError: names group, peer and setting.
        """
        if self._reduce is not None:
            self._reduce.check()

    def suspend(self, *, for_checkpoint: bool = False) -> None:
        """Give the buffer's memory back; captured graphs stay valid. NVLS keeps it, which is said.

        Args:
            for_checkpoint: memory that other processes have mapped can't be in a checkpoint of this one.

        Raises:
            ValueError: for a checkpoint, over NVLS.
        """
        if self._reduce is None:
            return
        if self._reduce.access is Access.MULTIMEM:
            if for_checkpoint:
                raise ValueError(
                    "a checkpoint can't hold the multicast object of all-reduce over NVLS: start with "
                    f"{AllReduceChoice.P2P.setting}"
                )
            logger.info("All-reduce over NVLS keeps its buffer while asleep.")
        else:
            self._reduce.suspend()

    def resume(self) -> None:
        """Take memory again where :meth:`suspend` gave it back; collective.

        Raises:
            GroupError, MissingRankError: some rank can't, or didn't arrive; it can be repeated.
        """
        if self._reduce is not None and self._reduce.access is not Access.MULTIMEM:
            self._reduce.resume()

    def close(self) -> None:
        """Free everything; a second call does nothing. Not collective."""
        reduce, self._reduce, self._norm = self._reduce, None, None
        if reduce is not None:
            reduce.close()


def make(*, group: Group, name: str, device: int, wish: Wish) -> GroupAllReduce | None:
    """What serves a group, ready for the first call; collective, with the same end on all ranks.

    Args:
        group: its ranks, each on a device of its own.
        name: vLLM's name of the group.
        device: this rank's, which is torch's current one.
        wish: what is asked for.

    Returns:
        None where ``auto`` finds nothing of ours to work: vLLM's own then serves, which is logged with the reason.

    Raises:
        ValueError: ``p2p`` or ``nvls`` was asked for and can't be had; names the setting and the reason.
        MissingRankError: some rank didn't arrive.
    """
    refused = ""
    accesses: list[tuple[Access, str]] = []
    try:
        accesses = _accesses(group, device, wish)
    except MissingRankError:
        raise
    except GroupError as error:
        refused = str(error)
    for access, why in accesses:
        try:
            reduce = _made(group, device, wish, access)
        except MissingRankError:
            raise
        except GroupError as error:
            refused = f"{refused}{'; ' if refused else ''}{_NAMES[access]}: {error}"
            continue
        why = f"{_NAMES[access]}, since {why}" + (f" and nvls was refused ({refused})" if refused else "")
        try:
            norm = _norm_of(name, reduce, wish)
        except BaseException:
            reduce.close()
            raise
        why += f"; {norm.why}" if norm is not None and norm.why else ""
        _log(name, why, wish)
        return GroupAllReduce(reduce=reduce, norm=norm, wish=wish, why=why)
    if wish.choice != AllReduceChoice.AUTO:
        raise ValueError(f"{wish.choice.setting} can't serve group {name}: {refused}")
    logger.warning("All-reduce of group %s: vLLM's own, since ours can't serve it: %s", name, refused)
    return None


def _accesses(group: Group, device: int, wish: Wish) -> list[tuple[Access, str]]:
    """The ways to try, in order, each with its reason; agreed on by all ranks.

    Raises:
        GroupError: some rank can't run our kernels, or the ranks were asked for different things.
    """
    asked = f"{wish.choice}, {wish.most_tokens} x {wish.hidden_size} {wish.dtype}, {wish.timeout:g} s"
    asked += ", with norms" if wish.norm else ""

    def able() -> list:
        if gpu.obstacle():
            raise RuntimeError(gpu.obstacle())
        if wish.dtype not in DTYPE_NAMES:
            raise ValueError(f"the model's dtype is {wish.dtype}; ours are {', '.join(map(str, DTYPE_NAMES))}")
        if not 2 <= group.size <= MAX_RANKS:
            raise ValueError(f"it has {group.size} ranks; ours takes 2 to {MAX_RANKS}")
        return [asked, bool(Driver(device=device).attribute("MULTICAST_SUPPORTED")), wish.batch_invariant]

    phase = "all-reduce: what the ranks can"
    answers = group.agree(phase, able)
    if any(each[0] != asked for each in answers):
        reasons = {rank: f"asked for {each[0]}: set the same on all ranks" for rank, each in enumerate(answers)}
        raise GroupError(name=group.name, size=group.size, phase=phase, reasons=reasons)
    if wish.choice != AllReduceChoice.AUTO:
        return [(Access.PEERS if wish.choice == AllReduceChoice.P2P else Access.MULTIMEM, "it is asked for")]
    if group.size < NVLS_FROM:
        return [(Access.PEERS, f"there are {group.size} ranks and NVLS is taken from {NVLS_FROM}")]
    if any(each[2] for each in answers):
        return [(Access.PEERS, "VLLM_BATCH_INVARIANT wants a fixed order of sums")]
    if not all(each[1] for each in answers):
        return [(Access.PEERS, "a GPU has no NVLink multicast")]
    several = f"there are {group.size} ranks"
    return [(Access.MULTIMEM, f"{several} with NVLink multicast"), (Access.PEERS, several)]


def _made(group: Group, device: int, wish: Wish, access: Access) -> AllReduce:
    """Buffers, tuned and with its kernels loaded; or an error, and nothing is left."""
    reduce = AllReduce(
        driver=Driver(device=device),
        group=group,
        max_bytes=wish.max_bytes,
        access=access,
        same_bits=True,  # ranks route tokens to experts each for itself: a last bit could give a token to two, or none
        timeout=max(wish.timeout, STARTUP_SECONDS),
        setting=_TIMEOUT,
    )
    try:
        tune(reduce)
        warm(reduce, hidden_size=wish.hidden_size, dtype=wish.dtype, most_rows=wish.most_tokens)
        torch.cuda.empty_cache()  # vLLM measures what is free next
    except BaseException:
        reduce.close()
        raise
    return reduce


def _norm_of(name: str, reduce: AllReduce, wish: Wish) -> GroupNorm | None:
    """The fused launch, where it is asked for and some number of rows gains by it; collective.

    Raises:
        MissingRankError: some rank didn't arrive.
    """
    if not wish.norm:
        return None
    try:
        norm = make_norm(reduce, hidden_size=wish.hidden_size, dtype=wish.dtype, most_rows=wish.most_tokens)
    except MissingRankError:
        raise
    except GroupError as error:
        reduce.group.agree("all-reduce: is it still alive", reduce.check)  # a launch that gave up ends it for good
        logger.warning("All-reduce of group %s: residual and norm stay launches of their own: %s", name, error)
        return None
    if not norm.why:
        logger.info("All-reduce of group %s: one launch with residual and norm is faster for no size.", name)
    torch.cuda.empty_cache()
    return norm


def _log(name: str, why: str, wish: Wish) -> None:
    logger.info(
        "All-reduce of group %s: %s; it takes %s up to %d tokens of %d, in two buffers of %.1f MiB, and waits %g s for "
        "a rank. The rest is vLLM's.",
        name, why, DTYPE_NAMES[wish.dtype], wish.most_tokens, wish.hidden_size, wish.max_bytes / 2**20, wish.timeout,
    )  # fmt: skip
