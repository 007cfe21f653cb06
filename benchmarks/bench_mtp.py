"""Decode throughput with and without MTP drafting, at batch 1, 8 and 32, in the real vLLM.

    python benchmarks/bench_mtp.py                               # on one H200: both models
    python benchmarks/bench_mtp.py --models example --tokens 64  # the trained example alone; runs on a CPU too

Two models. `example` is the trained tiny model in MXFP8 with its BF16 draft: real acceptance, but so small that
launches count and not weights. `qwen3_235b` has the shapes of Qwen3-235B-A22B, `--layers` of its 94 layers, dummy
weights in MXFP8 and a BF16 draft; what the target accepts is given (`--acceptance`, one figure for each position,
vLLM's synthetic rejection sampling). With fewer layers drafting looks worse than it is: the draft and the output head
weigh more. Each engine is a process of its own, with CUDA graphs; its decode time is that of `--tokens` tokens less
that of one. Writes benchmarks/results/mtp.csv and mtp.png: `us` is the time for one token of one request, provider
`vllm` is the same engine without drafting, `yield` says how many tokens a step of the target brought.
"""

import argparse
import csv
import datetime
import json
import os
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from columns import COLUMNS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
EXAMPLE = ROOT / "examples" / "tiny_moe"
BATCHES = (1, 8, 32)
DRAFTED = (0, 1, 2, 3)
PROMPT_TOKENS = 256
QWEN3_235B = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "dtype": "bfloat16",
    "hidden_size": 4096,
    "head_dim": 128,
    "num_attention_heads": 64,
    "num_key_value_heads": 4,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "intermediate_size": 12288,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "mlp_only_layers": [],
    "max_position_embeddings": 40960,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}
"""config.json of Qwen/Qwen3-235B-A22B, but for the number of layers."""


def models(args: argparse.Namespace, directory: Path) -> dict[str, dict[str, Any]]:
    """Arguments of vllm.LLM for each model, and those of its drafting."""
    rose = {"moe_backend": args.moe_backend, "linear_backend": args.linear_backend}
    found: dict[str, dict[str, Any]] = {}
    if "example" in args.models:
        target = directory / "example"
        command = [sys.executable, "-m", "vllm_rose_plugin.cli", "quantize", str(EXAMPLE / "target"), str(target)]
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        found["example"] = {
            "engine": {"model": str(target), **rose, "max_model_len": 2048},
            "speculative": {"model": str(EXAMPLE / "mtp")},
        }
    if "qwen3_235b" in args.models:
        target, draft = directory / "target", directory / "draft"
        write_config(target, QWEN3_235B | {"num_hidden_layers": args.layers})
        changes = {"architectures": ["Qwen3MoeMTP"], "model_type": "qwen3_moe_mtp", "num_nextn_predict_layers": 1}
        write_config(draft, QWEN3_235B | {"num_hidden_layers": 1} | changes)
        engine = {"load_format": "dummy", "quantization": "mxfp8", "skip_tokenizer_init": True, "max_model_len": 4096}
        found["qwen3_235b"] = {
            "engine": {"model": str(target), **rose, **engine, "max_num_batched_tokens": 8192},
            "speculative": {"model": str(draft), "rejection_sample_method": "synthetic"},
        }
    return found


def write_config(directory: Path, config: dict[str, Any]) -> None:
    """A checkpoint directory without weights."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))


def measure(plan: dict[str, Any]) -> None:
    """One engine; prints a JSON line for each batch size."""
    import torch
    from vllm import LLM, SamplingParams

    llm = LLM(seed=0, max_num_seqs=max(BATCHES), disable_log_stats=False, **plan["engine"])
    tokens = plan["tokens"]

    def run(batch: int, count: int) -> float:
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
        prompts = [{"prompt_token_ids": prompt} for prompt in plan["prompts"][:batch]]
        start = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False)
        return time.perf_counter() - start

    def counters() -> tuple[float, float]:
        values = {metric.name: getattr(metric, "value", 0) for metric in llm.get_metrics()}
        return tuple(values.get(f"vllm:spec_decode_num_{name}", 0) for name in ("drafts", "accepted_tokens"))

    for batch in plan["batches"]:
        run(batch, tokens)  # warm: prefix cache, autotuning
        before = counters()
        seconds = sorted(run(batch, tokens) - run(batch, 1) for _ in range(plan["repeats"]))
        drafts, accepted = (b - a for a, b in zip(before, counters(), strict=True))
        result = {
            "batch": batch,
            "seconds": seconds[len(seconds) // 2],
            "tokens_per_step": 1 + accepted / drafts if drafts else 1.0,
            "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        }
        print("RESULT " + json.dumps(result), flush=True)


def prompts(model: str) -> list[list[int]]:
    """As many as the largest batch: pieces of the example's text, or counted-up token ids for dummy weights."""
    if model != "example":
        return [[(97 * i + 31 * j) % 150000 for j in range(PROMPT_TOKENS)] for i in range(max(BATCHES))]
    from transformers import AutoTokenizer

    text = (EXAMPLE / "validation.txt").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(EXAMPLE / "target")(text, add_special_tokens=False, verbose=False)["input_ids"]
    return [ids[1000 * i :][:PROMPT_TOKENS] for i in range(max(BATCHES))]


def start(plan: dict[str, Any]) -> list[dict[str, Any]]:
    """The results of one engine in a process of its own."""
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump(plan, file)
        file.flush()
        command = [sys.executable, __file__, "--one", file.name]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    lines = [line.removeprefix("RESULT ") for line in done.stdout.splitlines() if line.startswith("RESULT ")]
    if done.returncode:
        print(done.stdout[-3000:], file=sys.stderr)
        raise SystemExit(f"the engine {plan['engine']['model']} ended with {done.returncode}")
    return [json.loads(line) for line in lines]


def rows(args: argparse.Namespace) -> list[dict[str, str]]:
    """Every combination, as it is measured."""
    versions = f"vllm {metadata.version('vllm')}; vllm_rose_plugin {metadata.version('vllm-rose-plugin')}"
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for model, plan in models(args, Path(directory)).items():
            for k in args.drafted:
                engine = dict(plan["engine"])
                if k:
                    engine["speculative_config"] = {"method": "mtp", "num_speculative_tokens": k, **plan["speculative"]}
                    if model != "example":
                        engine["speculative_config"]["synthetic_acceptance_rates"] = args.acceptance[:k]
                work = {"engine": engine, "tokens": args.tokens, "batches": args.batches, "repeats": args.repeats}
                for result in start({**work, "prompts": prompts(model)}):
                    us = result["seconds"] / (args.tokens - 1) * 1e6
                    pairs = {"batch": result["batch"], "k": k, "yield": f"{result['tokens_per_step']:.2f}"}
                    if model != "example":
                        pairs["layers"] = args.layers
                    found.append(
                        dict.fromkeys(COLUMNS, "")
                        | {
                            "area": "mtp",
                            "case": f"{model} batch {result['batch']}",
                            "provider": "rose" if k else "vllm",
                            "shape": ";".join(f"{key}={value}" for key, value in pairs.items()),
                            "us": f"{us:.1f}",
                            "device": result["device"],
                            "versions": versions,
                            "commit": os.environ.get("ROSE_COMMIT", "uncommitted"),
                            "date": datetime.date.today().isoformat(),
                        }
                    )
                    rate = result["batch"] * 1e6 / us
                    print(
                        f"{found[-1]['case']:<22}{found[-1]['shape']:<34}{us:9.1f} us {rate:9.0f} tokens/s", flush=True
                    )
    return found


def plot(found: list[dict[str, str]], path: Path) -> None:
    """Throughput over that without drafting."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    cases = list(dict.fromkeys(row["case"] for row in found))
    figure, axes = pyplot.subplots(figsize=(1.6 * len(cases) + 2, 3.5))
    drafted = sorted({row["shape"].split("k=")[1].split(";")[0] for row in found})
    for place, k in enumerate(drafted):
        heights = []
        for case in cases:
            by_k = {row["shape"].split("k=")[1].split(";")[0]: float(row["us"]) for row in found if row["case"] == case}
            heights.append(by_k["0"] / by_k[k])
        label = "without" if k == "0" else f"{k} draft token{'s' if k != '1' else ''}"
        axes.bar([i + 0.2 * place for i in range(len(cases))], heights, 0.18, label=label)
    axes.set_xticks([i + 0.1 * (len(drafted) - 1) for i in range(len(cases))], cases)
    axes.set_ylabel("decode throughput, without drafting = 1")
    axes.set_title(f"MTP drafting, {found[0]['device']}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", choices=("example", "qwen3_235b"), default=["example", "qwen3_235b"])
    parser.add_argument("--layers", type=int, default=24, help="of 94; 24 take 60 GB (default: %(default)s)")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--drafted", nargs="+", type=int, default=list(DRAFTED), help="must hold 0, the comparison")
    parser.add_argument("--tokens", type=int, default=256, help="generated for each request (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--acceptance", nargs="+", type=float, default=[0.8, 0.6, 0.45], help="of qwen3_235b")
    parser.add_argument("--moe-backend", default="rose_cutedsl")
    parser.add_argument("--linear-backend", default="rose_cutedsl")
    parser.add_argument("--output", type=Path, default=RESULTS / "mtp.csv")
    args = parser.parse_args()
    if args.one:
        measure(json.loads(Path(args.one).read_text()))
        return
    if 0 not in args.drafted:
        parser.error("--drafted must hold 0: what drafting is compared with")
    found = rows(args)
    with args.output.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(found)
    plot(found, args.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
