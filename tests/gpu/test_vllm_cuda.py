"""The real vLLM CUDA build on one GPU: run with ``-m gpu`` on a GPU machine."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.gpu
ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples" / "tiny_moe"
sys.path.insert(0, str(ROOT / "tests" / "e2e"))
from vllm_server import gpu_environment, run_program  # noqa: E402

QUESTIONS = [line for line in (EXAMPLE / "prompts.txt").read_text().splitlines() if line]

PROGRAM = """
import json, sys
from vllm import LLM, SamplingParams

def main():
    keywords, questions = json.loads(sys.argv[1])
    llm = LLM(max_model_len=512, gpu_memory_utilization=0.1, kv_cache_memory_bytes=1 << 30, **keywords)
    chats = [[{"role": "user", "content": question}] for question in questions]
    outputs = llm.chat(chats, SamplingParams(max_tokens=64, temperature=0), use_tqdm=False)
    def kernels(model):
        found = {}
        for module in model.modules():
            method = getattr(module, "quant_method", None)
            moe = getattr(method, "moe_kernel", None)
            if moe is not None:
                found.setdefault("experts", type(moe.fused_experts).__name__)
            scheme = getattr(module, "scheme", None)
            kernel = getattr(method, "kernel", None) or getattr(scheme, "kernel", None)
            if kernel is not None:
                found.setdefault("linear", type(kernel).__name__)
        return found
    result = {"texts": [output.outputs[0].text for output in outputs], "kernels": llm.apply_model(kernels)[0]}
    if keywords.get("moe_backend") == "rose_cutedsl":
        result["stats"] = llm.collective_rpc("rose_stats")
    print("\\nRESULT " + json.dumps(result))

if __name__ == "__main__":
    main()
"""


def run(model: Path, cache: Path, questions: list[str], disable: bool = False, **keywords) -> dict:
    env = {**gpu_environment(cache / "vllm"), "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    if disable:
        env["VLLM_ROSE_DISABLE"] = "1"
    argument = json.dumps([{"model": str(model), **keywords}, questions])
    return run_program(PROGRAM, argument, environment=env, folder=cache)[0]


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def mxfp8(tmp_path_factory):
    destination = tmp_path_factory.mktemp("converted") / "tiny"
    subprocess.run(
        [sys.executable, "-m", "vllm_rose_plugin.cli", "quantize", str(EXAMPLE / "target"), str(destination)],
        cwd=ROOT,
        check=True,
    )
    return destination


@pytest.fixture(scope="module")
def bf16_texts(cache):
    return run(EXAMPLE / "target", cache, QUESTIONS, enforce_eager=True)["texts"]


@pytest.mark.parametrize("activation", ["mxfp8", "bf16"])
def test_served_text_equals_bf16_on_most_prompts(mxfp8, cache, bf16_texts, activation):
    result = run(
        mxfp8,
        cache,
        QUESTIONS,
        enforce_eager=True,
        moe_backend="rose_cutedsl",
        linear_backend="rose_cutedsl",
        additional_config={"rose": {"activation": activation}},
    )
    assert result["kernels"] == {"experts": "RoseCuteDslExperts", "linear": "RoseCuteDslMxfp8LinearKernel"}
    (worker,) = result["stats"]
    assert worker["layers"] == {
        "experts": {"RoseCuteDslExperts": 3},
        "linear": {"RoseCuteDslMxfp8LinearKernel": 6},
        "qk_norm": {"RoseQwen3MoeAttention": 3},
    }
    assert worker["providers"]["moe_experts"] == "rose" and set(worker["calls"]["moe_experts"]) == {"rose"}
    same = sum(a == b for a, b in zip(result["texts"], bf16_texts, strict=True))
    print(f"{activation}: {same} of {len(QUESTIONS)} answers equal BF16's")
    assert same >= 18


def test_without_our_flags_vllm_selects_what_it_selects_without_the_plugin(mxfp8, cache):
    """``auto``: the same experts class, the same linear kernel and the same text, plugin loaded or switched off."""
    loaded = run(mxfp8, cache, QUESTIONS[:4], enforce_eager=True)
    stock = run(mxfp8, cache, QUESTIONS[:4], disable=True, enforce_eager=True)
    print(f"auto selects {stock['kernels']}")
    assert loaded == stock
    assert "Rose" not in str(loaded["kernels"])


def test_loading_the_plugin_creates_no_cuda_context():
    """Every seam applied, and CUDA still untouched: vLLM forks and sets devices after this."""
    program = (
        "import importlib, torch, vllm, vllm_rose_plugin\n"
        "vllm_rose_plugin.register()\n"
        "from vllm_rose_plugin.seams.install import state\n"
        "from vllm_rose_plugin.seams.table import seams\n"
        "for seam in seams('0.33'):\n"
        "    importlib.import_module(seam.module)\n"
        "assert all(state(seam) == 'applied' for seam in seams('0.33'))\n"
        "assert not torch.cuda.is_initialized()\n"
        "torch.zeros(1, device='cuda')\n"
        "assert torch.cuda.is_initialized()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
