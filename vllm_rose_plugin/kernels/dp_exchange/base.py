"""What exchanges do alike, wherever their memory is."""

import torch

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.dp_exchange.checks import check_received, check_routing, check_rows, check_x
from vllm_rose_plugin.kernels.dp_exchange.interface import Exchange, ReceivedTokens
from vllm_rose_plugin.kernels.dp_exchange.layout import ExchangeShape, Layout
from vllm_rose_plugin.kernels.dp_exchange.memory import new_received
from vllm_rose_plugin.kernels.dp_exchange.steps import StepOrder
from vllm_rose_plugin.memory.rendezvous import Group, GroupError


class BaseExchange(Exchange):
    """An exchange of a group that has agreed on the shape; refuses what doesn't fit."""

    def __init__(self, *, group: Group, shape: ExchangeShape, device: torch.device, setting: str):
        """Nothing is exchanged yet.

        Args:
            group: the ranks.
            shape: the same on all ranks.
            device: of all tensors.
            setting: for messages: what a user changes to have another `shape.max_tokens`.

        Raises:
            ValueError: a number that is out of range; the message names it.
        """
        if group.size != shape.group_size:
            raise ValueError(f"a group of {group.size} ranks, and a shape for {shape.group_size}")
        shape.check(setting=setting)
        self.shape, self.layout, self.rank = shape, Layout(shape), group.rank
        self.group, self.device = group, device
        self._setting = setting
        self._order = StepOrder()

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
        out = self._checked_received(step_tokens, out)  # before anything is sent
        self.dispatch_send(x, topk_ids=topk_ids, topk_weights=topk_weights, step_tokens=step_tokens)
        return self.dispatch_receive(step_tokens=step_tokens, out=out)

    def combine(
        self,
        rows: torch.Tensor,
        *,
        received: ReceivedTokens,
        topk_ids: torch.Tensor,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See the interface."""
        self.combine_send(rows, received=received)
        return self.combine_receive(topk_ids=topk_ids, out=out)

    def new_received(self, *, step_tokens: int | None = None) -> ReceivedTokens:
        """See the interface."""
        most = self.shape.check_step(num_tokens=0, step_tokens=step_tokens, setting=self._setting)
        return new_received(self.shape, most, self.device)

    def _agree_on_shape(self, *further: str) -> None:
        """Ranks that were given other shapes would write beside what the others read; collective.

        Args:
            further: what else must be the same on all ranks.

        Raises:
            GroupError, MissingRankError: it isn't, or a rank didn't arrive.
        """
        name, size = self.group.name, self.group.size
        answers = self.group.agree("dp exchange: shape", lambda: ", ".join((str(self.shape), *further)))
        if any(answer != answers[0] for answer in answers):
            reasons = {rank: f"{text}: give all the same" for rank, text in enumerate(answers)}
            raise GroupError(name=name, size=size, phase="dp exchange: shape", reasons=reasons)

    def _check_sent(
        self,
        x: torch.Tensor | Mxfp8Tensor,
        topk_ids: torch.Tensor,
        topk_weights: torch.Tensor,
        step_tokens: int | None,
    ) -> None:
        check_x(x, self.shape, self.device)
        num_tokens = len(x.codes if isinstance(x, Mxfp8Tensor) else x)
        check_routing(topk_ids, topk_weights, num_tokens, self.shape, self.device)
        self.shape.check_step(num_tokens=num_tokens, step_tokens=step_tokens, setting=self._setting)

    def _checked_received(self, step_tokens: int | None, out: ReceivedTokens | None) -> ReceivedTokens:
        """Where what comes goes."""
        if out is None:
            return self.new_received(step_tokens=step_tokens)
        check_received(out, self.shape, self.device)
        most = self.shape.check_step(num_tokens=0, step_tokens=step_tokens, setting=self._setting)
        if len(out.row_sources) != most * self.shape.group_size:  # what doesn't fit would never be sent back
            raise ValueError(
                f"out has {len(out.row_sources)} rows; a step of step_tokens={most} needs {most} of each of the "
                f"{self.shape.group_size} ranks: new_received(step_tokens={most}) makes them"
            )
        return out

    def _check_returned(self, rows: torch.Tensor, received: ReceivedTokens) -> None:
        check_received(received, self.shape, self.device)
        check_rows("rows", rows, (len(received.row_sources), self.shape.hidden_size), self.device)

    def _checked_out(self, topk_ids: torch.Tensor, out: torch.Tensor | None) -> torch.Tensor:
        """Where the result goes."""
        size = (len(topk_ids), self.shape.hidden_size)
        check_routing(topk_ids, None, size[0], self.shape, self.device)
        self.shape.check_step(num_tokens=size[0], step_tokens=None, setting=self._setting)
        out = torch.empty(size, dtype=torch.bfloat16, device=self.device) if out is None else out
        check_rows("out", out, size, self.device)
        return out
