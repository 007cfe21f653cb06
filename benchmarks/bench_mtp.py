"""Decode throughput with and without MTP drafting, at batch 1, 8 and 32, in the real vLLM.

    python benchmarks/bench_mtp.py --models example      # the trained example, one H200 or a CPU
    python benchmarks/bench_mtp.py --models qwen3_235b   # shapes of Qwen3-235B-A22B, one H200

| model | weights | accepted drafts |
|---|---|---|
| `example` | the trained tiny model in MXFP8 and its trained draft in BF16 | real, on held-out text |
| `qwen3_235b` | random: `--layers` of 94 in MXFP8, a draft of one layer in BF16 | given by `--acceptance` |

Neither is the speed-up of a real Qwen3-235B. The example is so small that a step is launches and vLLM's own work,
which drafting divides by the tokens that a step brings. `qwen3_235b` has the kernels and sizes of Qwen3-235B-A22B,
and its acceptance is an assumption (vLLM's synthetic rejection sampling: for each position a share of all drafts). With
fewer layers drafting looks worse than it is: the draft and the output head weigh more.

All engines of a model start together, each a process of its own with CUDA graphs, and wait until the last is ready;
then one after the other is measured while the rest stand still. Measured is what vLLM hands out from the step in which
the last request of the batch got its first token until the step before the first one ends: no prefill, and the batch is
whole all the time.

Rows go into benchmarks/results/mtp.csv as they come, beside those of earlier runs; `--draw` makes mtp.png of them,
without a GPU. `us` is the time for one token of one request, `yield` the tokens that a step brings each request;
provider `vllm` is the same engine without drafting.
"""

import argparse
import contextlib
import csv
import datetime
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from columns import COLUMNS
from engine_output import first_errors
from random_weights import RANDOM_WEIGHTS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
EXAMPLE = ROOT / "examples" / "tiny_moe"
BATCHES = (1, 8, 32)
DRAFTED = (0, 1, 3)
PROMPT_TOKENS = 256
READY, RESULT = "READY ", "RESULT "
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
            "engine": {"model": str(target), **rose, "kv_cache_memory_bytes": 1 << 30},
            "speculative": {"model": str(EXAMPLE / "mtp")},
        }
    if "qwen3_235b" in args.models:
        target, draft = directory / "target", directory / "draft"
        write_config(target, QWEN3_235B | {"num_hidden_layers": args.layers})
        changes = {"architectures": ["Qwen3MoeMTP"], "model_type": "qwen3_moe_mtp", "num_nextn_predict_layers": 1}
        write_config(draft, QWEN3_235B | {"num_hidden_layers": 1} | changes)
        engine = {**RANDOM_WEIGHTS, "quantization": "mxfp8", "skip_tokenizer_init": True}
        found["qwen3_235b"] = {
            "engine": {"model": str(target), **rose, **engine, "kv_cache_memory_bytes": 2 << 30},
            "speculative": {"model": str(draft), "rejection_sample_method": "synthetic"},
        }
    return found


def write_config(directory: Path, config: dict[str, Any]) -> None:
    """A checkpoint directory without weights."""
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(config))


# ---- in the process of an engine ----


def measure(plan: dict[str, Any]) -> None:
    """One engine: says when it is ready, waits for a line on its input, prints a JSON line for each batch size."""
    import torch
    from vllm import LLM
    from vllm.platforms import current_platform

    begin = time.perf_counter()
    engine = dict(plan["engine"])
    if current_platform.is_cuda():
        k = engine.get("speculative_config", {}).get("num_speculative_tokens", 0)
        requests = {1, 2, 4, *range(8, max(plan["batches"]) + 1, 8), *plan["batches"]}
        # The target's steps have k + 1 tokens for each request, those of the draft one.
        engine["cudagraph_capture_sizes"] = sorted({n * query for n in requests for query in (1, k + 1)})
        engine["gpu_memory_utilization"] = 0.02  # not what is taken, only what must be free beside the other engines
    else:
        del engine["kv_cache_memory_bytes"]
    llm = LLM(
        seed=0,
        max_model_len=PROMPT_TOKENS + plan["tokens"],
        max_num_seqs=max(plan["batches"]),
        max_num_batched_tokens=2048,
        **engine,
    )
    print(f"\n{READY}{time.perf_counter() - begin:.0f}", flush=True)  # vLLM's progress bars leave lines open
    sys.stdin.readline()
    device = torch.cuda.get_device_name() if current_platform.is_cuda() else "CPU"
    for batch in plan["batches"]:
        decode(llm, plan["prompts"][:batch], plan["tokens"])  # prompts are in the prefix cache from here on
        runs = [decode(llm, plan["prompts"][:batch], plan["tokens"]) for _ in range(plan["repeats"])]
        seconds, tokens, steps = sorted(runs, key=lambda run: run[0] / run[1])[len(runs) // 2]
        result = {"batch": batch, "us": seconds / tokens * batch * 1e6, "yield": tokens / steps, "device": device}
        print(f"\n{RESULT}{json.dumps(result)}", flush=True)


def decode(llm: Any, prompts: list[list[int]], tokens: int) -> tuple[float, int, int]:
    """Seconds, tokens and steps, summed over the requests, while all of them decode."""
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    sampling = SamplingParams(
        max_tokens=tokens, temperature=0.0, ignore_eos=True, detokenize=False, output_kind=RequestOutputKind.DELTA
    )
    engine = llm.llm_engine
    for number, prompt in enumerate(prompts):
        engine.add_request(str(number), {"prompt_token_ids": prompt}, sampling)
    begun: set[str] = set()
    first = last = (0.0, 0, 0)
    count = steps = 0
    ended = False
    while engine.has_unfinished_requests():
        outputs = [output for output in engine.step() if output.outputs[0].token_ids]
        now = time.perf_counter()
        was_whole = len(begun) == len(prompts)
        begun |= {output.request_id for output in outputs}
        count += sum(len(output.outputs[0].token_ids) for output in outputs)
        steps += len(outputs)
        ended |= any(output.finished for output in outputs)
        if not was_whole:
            first = (now, count, steps)
        if not ended:
            last = (now, count, steps)
    if last[1] <= first[1]:
        raise RuntimeError(f"{len(prompts)} requests of {tokens} tokens never decoded all at once: raise --tokens")
    return last[0] - first[0], last[1] - first[1], last[2] - first[2]


# ---- beside the engines ----


def prompts(model: str, count: int) -> list[list[int]]:
    """Pieces of the example's text, or counted-up token ids for made-up weights."""
    if model != "example":
        return [[(97 * i + 31 * j) % 150000 for j in range(PROMPT_TOKENS)] for i in range(count)]
    from transformers import AutoTokenizer

    text = (EXAMPLE / "validation.txt").read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(EXAMPLE / "target")(text, add_special_tokens=False, verbose=False)["input_ids"]
    return [ids[1000 * i :][:PROMPT_TOKENS] for i in range(count)]


class Engine:
    """A process with one engine, in a session of its own, and what it printed."""

    def __init__(self, plan: dict[str, Any], directory: Path, name: str) -> None:
        """Start it.

        Args:
            plan: of :func:`measure`.
            directory: for its plan, output and compile cache, which nobody else writes to at the same time.
            name: of the files.
        """
        path, self.log = directory / f"{name}.json", directory / f"{name}.out"
        path.write_text(json.dumps(plan))
        environment = os.environ | {
            "VLLM_CACHE_ROOT": str(directory / f"{name}.cache"),
            "VLLM_NO_USAGE_STATS": "1",
            "HF_HUB_OFFLINE": "1",
        }
        with self.log.open("w") as out:
            self.process = subprocess.Popen(
                [sys.executable, __file__, "--one", str(path)],
                stdin=subprocess.PIPE,
                stdout=out,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )

    def lines(self, mark: str) -> list[str]:
        """What followed a mark, of whole lines."""
        text = self.log.read_text(errors="replace")
        whole = text[: text.rfind("\n") + 1]
        return [line.removeprefix(mark) for line in whole.splitlines() if line.startswith(mark)]

    def wait_ready(self, until: float) -> bool:
        """Whether it is, by then."""
        while not self.lines(READY):
            if self.process.poll() is not None or time.monotonic() > until:
                return False
            time.sleep(0.2)
        return True

    def take_turn(self, until: float) -> Iterator[dict[str, Any]]:
        """Results of batch sizes, each as soon as it is measured, until then."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and its output says why
            self.process.stdin.write(b"\n")
            self.process.stdin.close()
        seen, over = 0, False
        while not over:
            over = self.process.poll() is not None or time.monotonic() > until
            found = self.lines(RESULT)
            yield from map(json.loads, found[seen:])
            seen = len(found)
            time.sleep(0 if over else 0.2)

    def end(self) -> None:
        """By force, with the processes that it started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()


def compare(args: argparse.Namespace, directory: Path) -> bool:
    """Measure and write every combination; whether all of them were."""
    until = time.monotonic() + args.deadline
    complete = True
    for model, plan in models(args, directory).items():
        engines: dict[int, Engine] = {}
        try:
            for k in args.drafted:
                engine = dict(plan["engine"])
                if k:
                    engine["speculative_config"] = {"method": "mtp", "num_speculative_tokens": k, **plan["speculative"]}
                    if model != "example":
                        engine["speculative_config"]["synthetic_acceptance_rates"] = args.acceptance[:k]
                work = {"engine": engine, "tokens": args.tokens, "batches": args.batches, "repeats": args.repeats}
                work["prompts"] = prompts(model, max(args.batches))
                engines[k] = Engine(work, directory, f"{model}_{k}")
            ready = {k for k, engine in engines.items() if engine.wait_ready(until - args.turn)}
            for k in set(engines) - ready:
                engines[k].end()  # one that still starts would disturb the others
            for k, engine in engines.items():
                print(f"{model} k={k}: started in {(*engine.lines(READY), '?')[0]} s", flush=True)
                measured = 0
                for result in engine.take_turn(until) if k in ready else ():
                    write(args.output, [row(args, model, k, result)])
                    measured += 1
                if measured < len(args.batches):
                    complete = False
                    output = engine.log.read_text(errors="replace")
                    print(f"left out: {model} k={k}; its output:\n{first_errors(output)}", file=sys.stderr, flush=True)
        finally:
            for engine in engines.values():
                engine.end()
    return complete


def row(args: argparse.Namespace, model: str, k: int, result: dict[str, Any]) -> dict[str, str]:
    """A line of the table, printed as well."""
    pairs = {"batch": result["batch"], "k": k, "yield": f"{result['yield']:.2f}"}
    if model != "example":
        pairs["layers"] = args.layers
    found = dict.fromkeys(COLUMNS, "") | {
        "area": "mtp",
        "case": f"{model} batch {result['batch']}",
        "provider": "rose" if k else "vllm",
        "shape": ";".join(f"{key}={value}" for key, value in pairs.items()),
        "us": f"{result['us']:.1f}",
        "device": result["device"],
        "versions": args.versions,
        "commit": os.environ.get("ROSE_COMMIT", "uncommitted"),
        "date": datetime.date.today().isoformat(),
    }
    rate = result["batch"] * 1e6 / result["us"]
    print(f"{found['case']:<22}{found['shape']:<34}{result['us']:9.1f} us {rate:9.0f} tokens/s", flush=True)
    return found


def drafted(row: dict[str, str]) -> int:
    """Speculative tokens of a line."""
    return int(row["shape"].split("k=")[1].split(";")[0])


def write(path: Path, found: list[dict[str, str]]) -> None:
    """Lines of earlier runs that these don't replace stay."""
    lines = {(line["case"], drafted(line)): line for line in read(path)} if path.exists() else {}
    lines |= {(line["case"], drafted(line)): line for line in found}
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(lines.values())


def read(path: Path) -> list[dict[str, str]]:
    """The lines of a table."""
    with path.open() as file:
        return list(csv.DictReader(file))


def plot(found: list[dict[str, str]], path: Path) -> None:
    """Throughput over that without drafting, where both were measured."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    times = {(line["case"], drafted(line)): float(line["us"]) for line in found}
    cases = [case for case, k in times if k == 0]
    numbers = sorted({k for _, k in times})
    figure, axes = pyplot.subplots(figsize=(1.6 * len(cases) + 2, 3.5))
    for place, k in enumerate(numbers):
        bars = [(i, times[case, 0] / times[case, k]) for i, case in enumerate(cases) if (case, k) in times]
        label = f"{k} draft token{'s' if k != 1 else ''}" if k else "without"
        axes.bar([i + 0.2 * place for i, _ in bars], [height for _, height in bars], 0.18, label=label)
    axes.set_xticks([i + 0.1 * (len(numbers) - 1) for i in range(len(cases))], cases)
    axes.set_ylabel("decode throughput, without drafting = 1")
    axes.set_title(f"MTP drafting, {found[0]['device']}")
    axes.legend()
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--models", nargs="+", choices=("example", "qwen3_235b"), default=["example", "qwen3_235b"])
    parser.add_argument(
        "--layers", type=int, default=8, help="of 94, 2.6 GB each in each engine, beside 12 GB (default: %(default)s)"
    )
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--drafted", nargs="+", type=int, default=list(DRAFTED), help="speculative tokens, 0: without")
    parser.add_argument("--tokens", type=int, default=128, help="generated for each request (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--acceptance", nargs="+", type=float, default=[0.8, 0.6, 0.45], help="of qwen3_235b")
    parser.add_argument("--moe-backend", default="rose_cutedsl")
    parser.add_argument("--linear-backend", default="rose_cutedsl")
    parser.add_argument("--deadline", type=float, default=float("inf"), help="seconds; what isn't measured is left out")
    parser.add_argument("--turn", type=float, default=30.0, help="of these, kept for measuring (default: %(default)s)")
    parser.add_argument("--draw", action="store_true", help="only draw the table that is there")
    parser.add_argument("--output", type=Path, default=RESULTS / "mtp.csv")
    args = parser.parse_args()
    if args.one:
        measure(json.loads(Path(args.one).read_text()))
        return
    if args.draw:
        plot(read(args.output), args.output.with_suffix(".png"))
        return
    args.versions = f"vllm {metadata.version('vllm')}; vllm_rose_plugin {metadata.version('vllm-rose-plugin')}"
    if len(args.acceptance) < max(args.drafted) and "qwen3_235b" in args.models:
        parser.error(f"--acceptance has {len(args.acceptance)} positions, --drafted asks for {max(args.drafted)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the engines on the way out
    with tempfile.TemporaryDirectory() as directory:
        if not compare(args, Path(directory)):
            raise SystemExit("some engines are left out")


if __name__ == "__main__":
    main()
