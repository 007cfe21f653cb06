"""Times an exchange on its own ranks and gives it the table that follows."""

import torch

from vllm_rose_plugin.kernels.dp_exchange.nvlink import NvlinkExchange
from vllm_rose_plugin.kernels.dp_exchange.table import KIND, Tuning, candidates, sizes
from vllm_rose_plugin.kernels.jit.compile import compiler_versions
from vllm_rose_plugin.kernels.jit.fingerprint import sources_of
from vllm_rose_plugin.kernels.jit.providers import this_machine
from vllm_rose_plugin.kernels.timed_table import replay_us

_CALLS = 10
_TURNS = 4


def tune(exchange: NvlinkExchange) -> None:
    """Set `exchange.table` from the disk or from a measurement; collective, a few seconds.

    Before the first request, and after `warm_up`, which has every kernel that the table can name.

    Raises:
        GroupError, MissingRankError: the ranks can't agree.
        PeerTimeoutError: a rank didn't come along.
    """
    from vllm_rose_plugin.kernels.dp_combine.fused import build_fused as combine  # imports cutlass
    from vllm_rose_plugin.kernels.dp_dispatch.fused import build_fused as dispatch

    machine, properties = this_machine(), torch.cuda.get_device_properties(exchange.device)
    situation = "; ".join(
        (
            f"{machine.device}, {properties.multi_processor_count} SMs, driver {machine.driver}, "
            f"CUDA {torch.version.cuda}",
            str(exchange.shape),
            compiler_versions(),
            sources_of(dispatch).digest,
            sources_of(combine).digest,
        )
    )

    def room() -> None:
        """A rank that has no memory for the largest step says so before anybody launches."""
        _Step(exchange, exchange.shape.max_tokens)

    exchange.group.agree("dp exchange: memory to time steps in", room)
    exchange.table = KIND.measured(
        group=exchange.group,
        name="dp exchange",
        situation=situation,
        sizes=sizes(exchange.shape.max_tokens),
        tunings=tuple(candidates()),
        time_us=lambda tuning, num_tokens: _time_us(exchange, tuning, num_tokens),
    )


class _Step:
    """All tensors of a step. vLLM may have made another dtype the default."""

    def __init__(self, exchange: NvlinkExchange, num_tokens: int):
        shape, device = exchange.shape, exchange.device
        generator = torch.Generator(device).manual_seed(exchange.rank)
        self.x = torch.zeros(num_tokens, shape.hidden_size, dtype=torch.bfloat16, device=device)
        scores = torch.rand(num_tokens, shape.num_experts, generator=generator, dtype=torch.float32, device=device)
        weights, ids = scores.topk(shape.top_k, dim=1)
        self.weights, self.ids = weights.contiguous(), ids.to(torch.int32).contiguous()
        self.received = exchange.new_received(step_tokens=num_tokens)
        most = len(self.received.row_sources)
        self.rows = torch.zeros(most, shape.hidden_size, dtype=torch.bfloat16, device=device)
        self.out = torch.empty_like(self.x)


def _time_us(exchange: NvlinkExchange, tuning: Tuning, num_tokens: int) -> float:
    """Microseconds of dispatch and combine; of :func:`~vllm_rose_plugin.kernels.timed_table.replay_us`."""
    of = _Step(exchange, num_tokens)

    def step() -> None:
        exchange.dispatch(of.x, topk_ids=of.ids, topk_weights=of.weights, step_tokens=num_tokens, out=of.received)
        exchange.combine(of.rows, received=of.received, topk_ids=of.ids, out=of.out)

    with exchange.forced(tuning):
        best = replay_us(step, calls=_CALLS, turns=_TURNS)
    exchange.check()
    return best
