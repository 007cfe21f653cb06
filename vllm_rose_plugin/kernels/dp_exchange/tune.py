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
        _inputs(exchange, exchange.shape.max_tokens)

    exchange.group.agree("dp exchange: memory to time steps in", room)
    exchange.table = KIND.measured(
        group=exchange.group,
        name="dp exchange",
        situation=situation,
        sizes=sizes(exchange.shape.max_tokens),
        tunings=tuple(candidates()),
        time_us=lambda tuning, num_tokens: _time_us(exchange, tuning, num_tokens),
    )


def _inputs(exchange: NvlinkExchange, num_tokens: int) -> tuple[torch.Tensor, ...]:
    """(x, ids, weights, rows of experts) of a step. vLLM may have made another dtype the default."""
    shape, device = exchange.shape, exchange.device
    generator = torch.Generator(device).manual_seed(exchange.rank)
    x = torch.zeros(num_tokens, shape.hidden_size, dtype=torch.bfloat16, device=device)
    scores = torch.rand(num_tokens, shape.num_experts, generator=generator, dtype=torch.float32, device=device)
    weights, ids = scores.topk(shape.top_k, dim=1)
    most = len(exchange.new_received(step_tokens=num_tokens).topk_ids)
    rows = torch.zeros(most, shape.hidden_size, dtype=torch.bfloat16, device=device)
    return x, ids.to(torch.int32).contiguous(), weights.contiguous(), rows


def _time_us(exchange: NvlinkExchange, tuning: Tuning, num_tokens: int) -> float:
    """Microseconds of dispatch and combine; of :func:`~vllm_rose_plugin.kernels.timed_table.replay_us`."""
    x, ids, weights, rows = _inputs(exchange, num_tokens)
    received, out = exchange.new_received(step_tokens=num_tokens), torch.empty_like(x)

    def step() -> None:
        exchange.dispatch(x, topk_ids=ids, topk_weights=weights, step_tokens=num_tokens, out=received)
        exchange.combine(rows, received=received, topk_ids=ids, out=out)

    with exchange.forced(tuning):
        best = replay_us(step, calls=_CALLS, turns=_TURNS)
    exchange.check()
    return best
