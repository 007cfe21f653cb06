"""Times an exchange on its own ranks and gives it the table that follows."""

import torch

from vllm_rose_plugin.kernels.dp_exchange.nvlink import NvlinkExchange
from vllm_rose_plugin.kernels.dp_exchange.table import KIND, Tuning, candidates, sizes
from vllm_rose_plugin.kernels.jit.compile import compiler_versions
from vllm_rose_plugin.kernels.jit.fingerprint import sources_of
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

    properties = torch.cuda.get_device_properties(exchange.device)
    situation = "; ".join(
        (
            f"{properties.name}, {properties.multi_processor_count} SMs, CUDA {torch.version.cuda}",
            str(exchange.shape),
            compiler_versions(),
            sources_of(dispatch).digest,
            sources_of(combine).digest,
        )
    )
    exchange.table = KIND.measured(
        group=exchange.group,
        name="dp exchange",
        situation=situation,
        sizes=sizes(exchange.shape.max_tokens),
        tunings=tuple(candidates()),
        time_us=lambda tuning, num_tokens: _time_us(exchange, tuning, num_tokens),
    )


def _time_us(exchange: NvlinkExchange, tuning: Tuning, num_tokens: int) -> float:
    """Microseconds of dispatch and combine; of :func:`~vllm_rose_plugin.kernels.timed_table.replay_us`."""
    shape = exchange.shape
    generator = torch.Generator(exchange.device).manual_seed(exchange.rank)
    x = torch.zeros(num_tokens, shape.hidden_size, dtype=torch.bfloat16, device=exchange.device)
    scores = torch.rand(num_tokens, shape.num_experts, generator=generator, device=exchange.device)
    weights, ids = scores.topk(shape.top_k, dim=1)
    ids, weights = ids.to(torch.int32).contiguous(), weights.contiguous()
    received, out = exchange.new_received(step_tokens=num_tokens), torch.empty_like(x)
    rows = torch.zeros(len(received.topk_ids), shape.hidden_size, dtype=torch.bfloat16, device=exchange.device)

    def step() -> None:
        exchange.dispatch(x, topk_ids=ids, topk_weights=weights, step_tokens=num_tokens, out=received)
        exchange.combine(rows, received=received, topk_ids=ids, out=out)

    with exchange.forced(tuning):
        best = replay_us(step, calls=_CALLS, turns=_TURNS)
    exchange.check()
    return best
