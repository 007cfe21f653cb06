"""What an exchange of tokens between data-parallel ranks offers; whoever calls one need not know which it has.

:class:`~vllm_rose_plugin.kernels.dp_exchange.nvlink.NvlinkExchange` runs on GPUs,
:class:`~vllm_rose_plugin.kernels.dp_exchange.shared_memory.SharedMemoryExchange` on CPU processes of one host. Both
keep the same layout and protocol, and are made with `group`, `shape`, `timeout`, `setting` and `timeout_setting`; on
GPUs with `driver` and `handle_type` too, as :class:`~vllm_rose_plugin.kernels.all_reduce.launch.AllReduce` is.

One step, on every rank of the group, in this order and on one stream::

    exchange.dispatch_send(x, topk_ids=topk_ids, topk_weights=topk_weights)
    ...                                        # whatever overlaps: shared experts, another micro-batch's exchange
    received = exchange.dispatch_receive()
    rows = experts(received.tokens, received.topk_ids, received.topk_weights)  # router weights are applied here
    exchange.combine_send(rows, received=received)
    ...
    out = exchange.combine_receive(topk_ids=topk_ids)

Where nothing runs between two halves, :meth:`Exchange.dispatch` and :meth:`Exchange.combine` do both, in one launch if
the step is small. Ranks need not choose alike.

Every rank takes part in every step, with no tokens too. Two micro-batches under way at once (DBO) need two exchanges,
made in the same order on all ranks, and called in the same order on one stream, as vLLM calls them: a launch that waits
may fill the device, so on two streams two ranks could each wait for what can't start on the other. A step can be
captured into a CUDA graph and replayed, with eager steps between.

Protocol. Launches are counted on the device; nothing is reset. In epoch e a rank

1. stores each token's row into the half of e's parity at every destination, then e into that token's flag there
   (release); and the plan, one bit for each of its tokens, with a flag, to every peer, without any token too;
2. waits for all plans (acquire), and for the flag of each token that they name, before it reads a row;
3. stores each combined row into the source's memory, then e into its flag (release);
4. waits for the flags of its tokens' rows, and adds them.

Why nothing is overwritten that is still read: who has all plans of e knows that every rank has begun step 1 of e, and
so has ended all of e-1. Dispatch rows and plans of e+1 may be stored while a peer still reads those of e, which lie in
the other half; those of e+2 come after all plans of e+1. A combined row of e is stored after its token has come, when
the source has ended e-1: it needs no second half. A flag may already be that of a later epoch, never of an earlier one.

Router weights are applied exactly once, by the experts that run on the receiving rank: their rows are weighted sums
over the token's experts there, formed in fp32 and rounded to bf16. The source adds those rows without any weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.dp_exchange.layout import ExchangeShape, Layout

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class ReceivedTokens:
    """What one rank got in one step, R = group_size * step_tokens rows of which `num_rows` are used.

    Used rows come first: those of rank 0 in the order of its tokens, then those of rank 1, and so on. Unused rows have
    ids -1, weights 0 and sources -1; their codes and scales are whatever was in the memory.
    """

    tokens: Mxfp8Tensor | torch.Tensor  # [R, H] MXFP8 with row-major scales, or bf16
    topk_ids: torch.Tensor  # [R, top_k] int32: the experts' numbers on this rank, -1 where the expert is elsewhere
    topk_weights: torch.Tensor  # [R, top_k] float32: 0 where the id is -1
    row_sources: torch.Tensor  # [R] int32: (source rank * max_tokens + its token) * slots + slot; for combine_send
    num_rows: torch.Tensor  # [1] int32, on the device


class Exchange(Protocol):
    """Tokens to the ranks that hold their experts, and results back."""

    shape: ExchangeShape
    layout: Layout
    rank: int
    timeout: float
    """Seconds to wait for a peer, of the launches that follow. A captured one keeps what it has."""

    def dispatch_send(
        self,
        x: torch.Tensor | Mxfp8Tensor,
        *,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        step_tokens: int | None = None,
    ) -> None:
        """Send every token to each rank that holds one of its experts, and this rank's plan to all. Never waits.

        Args:
            x: ``[T, H]`` bf16; or, where the payload is MXFP8, codes with row-major scales.
            topk_ids: ``[T, top_k]`` int32, contiguous: numbers of experts over all ranks. -1, and whatever else names
                no expert, is skipped; a token without any goes nowhere.
            topk_weights: ``[T, top_k]`` float32, contiguous.
            step_tokens: most tokens of any rank in this step, the same on all ranks; None: `shape.max_tokens`. It
                bounds the rows of `dispatch_receive` and so the work of what follows.

        Raises:
            PeerTimeoutError: an earlier launch gave up.
            RuntimeError: the calls of a step are out of order.
            TypeError, ValueError: what doesn't fit, more than step_tokens tokens among it; the message names the
                setting that makes room.
        """

    def dispatch_receive(self, *, step_tokens: int | None = None, out: ReceivedTokens | None = None) -> ReceivedTokens:
        """Wait for all ranks' plans and for the tokens that they name.

        Args:
            step_tokens: as `dispatch_send` was given.
            out: where to write, of `new_received`; None: new tensors.

        Raises:
            PeerTimeoutError: an earlier launch gave up, or (CPU) a peer didn't come in time.
        """

    def combine_send(self, rows: torch.Tensor, *, received: ReceivedTokens) -> None:
        """Send the experts' weighted sums back, each row to the rank that its token came from. Never waits.

        Args:
            rows: ``[R, H]`` bf16, contiguous; unused rows are not read.
            received: of this step.
        """

    def combine_receive(self, *, topk_ids: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """Wait for the rows of this rank's tokens and add them, in the order of ranks, in fp32, rounded once.

        Args:
            topk_ids: as `dispatch_send` was given.
            out: ``[T, H]`` bf16, contiguous; None: a new tensor.

        Returns:
            out; zero where a token has no expert.
        """

    def dispatch(
        self,
        x: torch.Tensor | Mxfp8Tensor,
        *,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        step_tokens: int | None = None,
        out: ReceivedTokens | None = None,
    ) -> ReceivedTokens:
        """`dispatch_send`, then `dispatch_receive`."""

    def combine(
        self,
        rows: torch.Tensor,
        *,
        received: ReceivedTokens,
        topk_ids: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`combine_send`, then `combine_receive`."""

    def new_received(self, *, step_tokens: int | None = None) -> ReceivedTokens:
        """Tensors for `dispatch_receive`, not cleared."""

    def check(self) -> None:
        """Raise if a launch that has ended gave up waiting for a peer. Doesn't wait for launches that haven't.

        Raises:
            PeerTimeoutError: with peer, phase and epoch.
        """

    def gave_up(self) -> torch.Tensor:
        """What :meth:`check` will find once the current stream gets here: a bool ``[]`` on the exchange's device."""

    def close(self) -> None:
        """Give the memory back, once this rank's launches have ended; a second call does nothing. Not collective."""
