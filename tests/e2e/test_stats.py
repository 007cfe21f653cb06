"""`GET /rose/stats` tells what served: the workers' own classes and kernel calls."""

from collections import Counter

import pytest
from e2e_setup import SERVERS, Served
from vllm_server import Server

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("served", SERVERS, indirect=True)]

LAYERS = 3
# In one forward pass of one layer.
CALLS = {
    "mxfp8_linear": 2,  # QKV and output projection
    "moe_route": 1,
    "moe_dispatch": 1,
    "grouped_gemm": 2,  # w13 and w2
    "swiglu_quantize": 1,
    "moe_combine": 1,
}


def calls_by_rank(server: Server) -> dict[int, Counter[str]]:
    """Calls of the reference provider; there is no other on a CPU."""
    out = {}
    for worker in server.get("/rose/stats")["workers"]:
        assert all(set(providers) == {"reference"} for providers in worker["calls"].values())
        out[worker["rank"]] = Counter({op: providers["reference"] for op, providers in worker["calls"].items()})
    return out


def test_our_classes_serve_on_every_rank(served: Served) -> None:
    workers = served.server.get("/rose/stats")["workers"]
    assert [worker["rank"] for worker in workers] == list(range(served.configuration.ranks))
    assert len({worker["pid"] for worker in workers}) == served.configuration.ranks
    for worker in workers:
        assert worker["layers"] == {
            "experts": {"RoseCuteDslExperts": LAYERS},
            "linear": {"RoseCuteDslMxfp8LinearKernel": 2 * LAYERS},
            "qk_norm": {},  # vLLM's own norms where there is no GPU
        }
        assert worker["providers"] == {}


@pytest.mark.parametrize("tokens", [1, 9])
def test_calls_grow_with_the_forward_passes(served: Served, tokens: int) -> None:
    """One pass for the prompt and one for each further token; vLLM may run one more that it throws away."""
    before = calls_by_rank(served.server)
    served.server.post("/v1/completions", prompt=[1, 2, 3], max_tokens=tokens, ignore_eos=True)
    after = calls_by_rank(served.server)
    assert set(after) == set(range(served.configuration.ranks))
    for rank, calls in after.items():
        grown = calls - before[rank]
        passes, rest = divmod(grown["moe_route"], LAYERS)
        assert rest == 0 and tokens <= passes <= tokens + 1, grown
        quantized = {"mxfp8_quantize": CALLS["mxfp8_linear"]} if served.configuration.activation == "mxfp8" else {}
        assert grown == {op: passes * LAYERS * calls for op, calls in (CALLS | quantized).items()}


def test_expert_parallel_ranks_share_the_experts(served: Served) -> None:
    """vLLM says itself how many experts a rank holds; without expert parallelism it says nothing."""
    said = "number of experts: 8/16" in served.server.log.read_text()
    assert said == ("--enable-expert-parallel" in served.configuration.arguments)
