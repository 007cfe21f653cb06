"""The PTX of dispatch and combine on the CPU, for all ranks of a group, step after step."""

import functools
import struct
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "moe_cutedsl"))
from exchange_cases import expert_rows
from rank_streams import Launch, Streams

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.dp_combine import config as combine_config
from vllm_rose_plugin.kernels.dp_combine import fused as combine_fused
from vllm_rose_plugin.kernels.dp_combine import kernel as combine_kernel
from vllm_rose_plugin.kernels.dp_dispatch import config as dispatch_config
from vllm_rose_plugin.kernels.dp_dispatch import fused as dispatch_fused
from vllm_rose_plugin.kernels.dp_dispatch import kernel as dispatch_kernel
from vllm_rose_plugin.kernels.dp_exchange.interface import ReceivedTokens
from vllm_rose_plugin.kernels.dp_exchange.layout import ExchangeShape, Layout
from vllm_rose_plugin.kernels.dp_exchange.memory import new_received, no_tokens
from vllm_rose_plugin.kernels.jit.compile import Artifacts, compile_to_artifacts

POISON = -1  # 0xFF everywhere
PATIENCE = 2_000_000
"""Nanoseconds until a wait counts as lost: hundreds of thousands of looks at a flag."""
THREADS = 64
"""Of a block, here: what matters is that a team has several warps, or a block several teams."""
SM_COUNT = 132
KINDS = ("dispatch_send", "dispatch_receive", "combine_send", "combine_receive")
FUSED = ("dispatch", "combine")
_ONE_ROW = {"dispatch_receive": -1, "combine_send": 2, "dispatch": -1, "combine": 2}
"""Which of a kernel's tensors is num_rows, all of whose sizes are known."""
_BUILDS = {
    dispatch_config.SendConfig: dispatch_kernel.build_send,
    dispatch_config.ReceiveConfig: dispatch_kernel.build_receive,
    combine_config.SendConfig: combine_kernel.build_send,
    combine_config.ReceiveConfig: combine_kernel.build_receive,
    dispatch_config.FusedConfig: dispatch_fused.build_fused,
    combine_config.FusedConfig: combine_fused.build_fused,
}


@functools.cache
def artifacts(config, target: str) -> Artifacts:
    build = _BUILDS[type(config)]
    return compile_to_artifacts(family=build.__module__.split(".")[-2], config=config, build=build, target=target)


def pack_numbers(*numbers) -> list[bytes]:
    """The parameters behind the tensors: rank, then 64-bit numbers."""
    return [struct.pack("<i", numbers[0]), *(struct.pack("<q", number) for number in numbers[1:])]


def pack_tensor(tensor: torch.Tensor, *, fixed: bool = False) -> bytes:
    """Address and first size; only the address where all sizes are known."""
    return struct.pack("<Q", tensor.data_ptr()) if fixed else struct.pack("<QQ", tensor.data_ptr(), len(tensor))


def parameters(kind: str, tensors: list[torch.Tensor | None], numbers: tuple) -> list[bytes]:
    """Of one launch; tensors as the kernel's host function takes them."""
    given = [t for t in tensors if t is not None]
    fixed = _ONE_ROW[kind] % len(given) if kind in _ONE_ROW else None
    return [pack_tensor(t, fixed=i == fixed) for i, t in enumerate(given)] + pack_numbers(*numbers)


@dataclass
class Step:
    """What one rank does in one step, and what came of it."""

    inputs: tuple
    step_tokens: int
    received: ReceivedTokens
    rows: torch.Tensor
    out: torch.Tensor
    launches: list[Launch] = field(default_factory=list)
    fused: bool = False


class Ranks(Streams):
    """A group of ranks with an exchange between them."""

    def __init__(
        self, shape: ExchangeShape, *, seed: int = 0, target: str = "sm_90a", team: int | None = None, **how: bool
    ):
        """Args:
        team: threads of a team; None: all of a block.
        how: further ones of Streams.
        """
        self.shape, self.layout, self.target, self.team = shape, Layout(shape), target, team
        super().__init__(shape.group_size, -(-self.layout.size // 256) * 256, seed=seed, poison=POISON, **how)
        for rank in range(self.size):
            self.part(rank)[: self.layout.plans] = 0
        self.steps: list[list[Step]] = [[] for _ in range(self.size)]
        self.blocks = 3
        """Most of a launch, so that every block has several rows."""

    def configs(self, step_tokens: int, num_tokens: int, codes: bool) -> list:
        """(kernel, blocks) of the four launches."""
        shape, total = self.shape, self.size * step_tokens
        made = [
            dispatch_config.choose_send(
                num_tokens=num_tokens, shape=shape, input="mxfp8" if codes else "bfloat16", sm_count=SM_COUNT
            ),
            dispatch_config.choose_receive(total_rows=total, shape=shape, sm_count=SM_COUNT),
            combine_config.choose_send(total_rows=total, shape=shape, sm_count=SM_COUNT),
            combine_config.choose_receive(num_tokens=num_tokens, shape=shape, sm_count=SM_COUNT),
        ]
        team = self.team or THREADS
        return [(replace(config, team=team, threads=THREADS), min(blocks, self.blocks)) for config, blocks in made]

    def fused_configs(self, step_tokens: int, num_tokens: int, codes: bool) -> list:
        """(kernel, blocks) of the two launches of a step whose halves are in one launch each."""
        (send, _), (receive, _), (back, _), (add, _) = self.configs(step_tokens, num_tokens, codes)
        blocks = self.size + self.blocks  # the first ones send plans
        return [
            (dispatch_config.FusedConfig(send, receive), blocks),
            (combine_config.FusedConfig(back, add), self.blocks),
        ]

    def add(
        self,
        rank: int,
        inputs: tuple,
        *,
        step_tokens: int | None = None,
        nanoseconds: int = PATIENCE,
        fused: bool = False,
    ) -> Step:
        """Put a step into a rank's stream."""
        shape = self.shape
        most = step_tokens or shape.max_tokens
        x, ids, weights = inputs
        num_tokens, codes = len(ids), isinstance(x, Mxfp8Tensor)
        received = new_received(shape, most, torch.device("cpu"))
        received.topk_ids.fill_(-(2**31))
        received.topk_weights.fill_(float("nan"))
        received.num_rows.fill_(-1)
        step = Step(
            inputs,
            most,
            received,
            torch.full((self.size * most, shape.hidden_size), float("nan"), dtype=torch.bfloat16),
            torch.full((num_tokens, shape.hidden_size), float("nan"), dtype=torch.bfloat16),
            fused=fused,
        )
        routing = [ids, weights]
        if not num_tokens:  # as dispatch/launch.py does
            x, *routing = no_tokens(shape, torch.device("cpu"))
            codes = False
        sent = [x.codes.view(torch.uint8), x.scales.view(-1)] if codes else [x]
        came = received.tokens
        came = [came.codes.view(torch.uint8), came.scales.view(-1)] if isinstance(came, Mxfp8Tensor) else [came]
        memory = (rank, self.memory.data_ptr(), self.stride)
        waits = (nanoseconds, self.report[rank].data_ptr())
        tensors = {
            "dispatch_send": (*sent, *(t.view(-1) for t in routing)),
            "dispatch_receive": (
                *came,
                received.topk_ids.view(-1),
                received.topk_weights.view(-1),
                received.row_sources,
                received.num_rows,
            ),
            "combine_send": (step.rows, received.row_sources, received.num_rows),
            "combine_receive": (ids.view(-1), step.out),
        }
        tensors["dispatch"] = (*tensors["dispatch_send"], *tensors["dispatch_receive"])
        tensors["combine"] = (*tensors["combine_send"], *tensors["combine_receive"])
        arguments = most, max(num_tokens, 1), codes
        launched = list(zip(KINDS, self.configs(*arguments), strict=True))
        if fused:
            one = list(zip(FUSED, self.fused_configs(*arguments), strict=True))
            launched = one if num_tokens else [one[0], launched[2]]  # as combine/launch.py does
        for kind, (config, blocks) in launched:
            if kind == "combine_receive" and not num_tokens:
                continue
            for i, tensor in enumerate(tensors[kind]):
                self.tensors[f"{kind} {i} of {rank}, {tensor.data_ptr()}"] = tensor
            numbers = memory + (() if kind.endswith("send") else waits)
            launch = Launch(
                artifacts(config, self.target).ptx,
                parameters(kind, list(tensors[kind]), numbers),
                blocks + (self.size if kind == "dispatch_send" else 0),
                shared=4096,
                early=kind.endswith("receive"),
            )
            step.launches.append(launch)
        self.steps[rank].append(step)
        self.queues[rank].extend(step.launches)
        return step

    def run_steps(self, *, pace=None) -> None:
        """All steps, with the experts' stand-in where a rank combines."""
        of = [[(step, i) for step in steps for i in range(len(step.launches))] for steps in self.steps]

        def before(rank, number):
            step, launch = of[rank][number]
            if launch == (1 if step.fused else 2):
                step.rows.copy_(expert_rows(step.received))

        self.run(pace=pace, before=before)
