"""What our kernels add to the start of a server: compiling and self-check for Qwen3-235B-A22B, cold and warm.

    python benchmarks/bench_startup.py

Needs a GPU. Each start is a process of its own: the first finds an empty cache, the second what the first left, the
third the kernels but no verdicts (another driver, or new shapes). QK-norm, quantize and SwiGLU at three token counts;
the GEMM of the linear layers, which has more kernels, is not in it yet. Writes benchmarks/results/startup.csv; a row's
`case` is the start, its `shape` the phase, its `us` the phase's time. There is no peer: nothing else does this work.
"""

import argparse
import csv
import datetime
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

from columns import COLUMNS

import vllm_rose_plugin

RESULTS = Path(__file__).parent / "results"
MAX_TOKENS = 2048
TOKENS = (1, 64, MAX_TOKENS)


def needed() -> list:
    """(family, shapes) as the layers of Qwen3-235B-A22B ask for them with tensor parallel size 1."""
    from vllm_rose_plugin.kernels.contracts import Activation, Rounding
    from vllm_rose_plugin.kernels.mxfp8_quantize import family as quantize
    from vllm_rose_plugin.kernels.qk_norm import family as qk_norm
    from vllm_rose_plugin.kernels.swiglu_quantize import family as swiglu

    rounding = Rounding.RCEIL
    linear = [
        quantize.QuantizeShape(num_tokens=tokens, hidden_size=k, dtype="bfloat16", rounding=rounding)
        for k in (4096, 8192)
        for tokens in TOKENS
    ]
    experts = [
        swiglu.SwigluShape(
            num_tokens=8 * tokens,
            intermediate_size=1536,
            dtype="float32",
            activation=Activation.MXFP8,
            rounding=rounding,
        )
        for tokens in TOKENS
    ]
    norms = [
        qk_norm.QkNormShape(
            num_tokens=tokens,
            num_q_heads=64,
            num_kv_heads=4,
            head_dim=128,
            dtype="bfloat16",
            eps=1e-6,
            rotary_dim=128,
            interleaved=False,
        )
        for tokens in TOKENS
    ]
    return [(quantize.FAMILY, linear), (swiglu.FAMILY, experts), (qk_norm.FAMILY, norms)]


def one_start() -> dict:
    """Times of one start, in seconds."""
    begin = time.perf_counter()
    import torch

    torch.zeros(1, device="cuda")
    imported_torch = time.perf_counter()
    families = needed()
    import cutlass.cute  # noqa: F401  counted apart: vLLM imports it for its own kernels too

    from vllm_rose_plugin.kernels.jit.compile import counts
    from vllm_rose_plugin.kernels.jit.providers import choose

    imported = time.perf_counter()
    for family, shapes in families:
        choose(family=family, shapes=shapes)
    done = time.perf_counter()
    print(counts.line(), file=sys.stderr)
    return {
        "torch_and_context": imported_torch - begin,
        "import": imported - imported_torch,
        "compile": counts.compile_seconds,
        "load": counts.load_seconds,
        "self_check": done - imported,
        "compiled": counts.compiled,
        "loaded": counts.loaded,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    if parser.parse_args().one:
        print(json.dumps(one_start()))
        return
    rows = []
    with tempfile.TemporaryDirectory() as cache:
        env = {**os.environ, "ROSE_CACHE_DIR": cache}
        for case in ("cold", "warm", "warm_without_verdicts"):
            if case == "warm_without_verdicts":
                shutil.rmtree(Path(cache) / "verdicts")
            done = subprocess.run([sys.executable, __file__, "--one"], env=env, stdout=subprocess.PIPE, check=True)
            found = json.loads(done.stdout)
            for phase in ("torch_and_context", "import", "compile", "load", "self_check"):
                kernels = {"compile": found["compiled"], "load": found["loaded"]}.get(phase)
                rows.append(
                    {
                        "area": "startup",
                        "case": case,
                        "provider": "rose",
                        "shape": f"phase={phase}" + (f";kernels={kernels}" if kernels is not None else ""),
                        "us": f"{found[phase] * 1e6:.0f}",
                        "gb_per_s": "",
                        "tflop_per_s": "",
                        "share_of_limit": "",
                        "device": found["device"],
                        "versions": f"torch {found['torch']}; cutlass-dsl {metadata.version('nvidia-cutlass-dsl')}; "
                        f"vllm_rose_plugin {vllm_rose_plugin.__version__}",
                        "commit": os.environ.get("ROSE_COMMIT", "uncommitted"),
                        "date": datetime.date.today().isoformat(),
                    }
                )
                print(f"{case:<24}{rows[-1]['shape']:<32}{found[phase]:8.3f} s", flush=True)
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "startup.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
