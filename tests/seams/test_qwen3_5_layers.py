"""What `rose cache warm` knows of Qwen3.5 is what vLLM's own layers ask for, in both versions of vLLM."""

import json
from pathlib import Path

import pytest
from vllm_probe import VERSIONS

from vllm_rose_plugin.kernels.rank_shapes import RankShapes

pytestmark = pytest.mark.slow
MODELS = Path(__file__).parents[2] / "recipes/models"


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("model", ["qwen3.5-122b-a10b", "qwen3.5-397b-a17b"])
@pytest.mark.parametrize("version", VERSIONS)
def test_sizes_on_a_rank(probe, version, model, ranks):
    path = MODELS / f"{model}.json"
    found = probe(version, "qwen3_5_layers", str(path), str(ranks))
    shapes = RankShapes.of(json.loads(path.read_text()), tensor_parallel_size=ranks)
    assert len(found["linears"]) == 6, "two of either attention, two of the shared expert"
    assert {tuple(linear) for linear in found["linears"].values()} == set(shapes.linears)
    experts = [shapes.hidden_size, shapes.expert_size, shapes.num_local_experts, shapes.top_k]
    assert found["experts"] == [experts]
    assert not shapes.qk_norm, "vLLM's attention of Qwen3.5 norms q and k in a kernel of its own"
    assert found["cuda_starts"] == 0
