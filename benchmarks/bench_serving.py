"""The real vLLM with one backend or another: decode and prefill times, agreement of answers, memory while loading.

    python benchmarks/bench_serving.py                                           # shapes of Qwen3-235B, random weights
    python benchmarks/bench_serving.py --model DIR --cases agreement,memory      # any MXFP8 checkpoint
    python benchmarks/bench_serving.py --model DIR --cases agreement --bf16 SRC --engines bf16 auto rose

Every engine is a process of its own with the same settings, CUDA graphs on.

| engine | `--moe-backend` | `--linear-backend` | activations |
|---|---|---|---|
| `auto` | vLLM's choice | vLLM's choice | as vLLM's kernels have them |
| `marlin` | marlin | marlin | bf16 |
| `rose` | rose_cutedsl | rose_cutedsl | mxfp8 |
| `rose_bf16` | rose_cutedsl | rose_cutedsl | bf16 |
| `rose_linear`, `rose_linear_bf16` | marlin | rose_cutedsl | mxfp8, bf16 |
| `bf16` | vLLM's choice | vLLM's choice | the checkpoint of `--bf16`, which isn't quantized |
| `rose_triton` | as `rose`, with `--attention-backend TRITON_ATTN` | | mxfp8 |
| `rose_invariant` | as `rose_triton`, with `VLLM_BATCH_INVARIANT=1` | | mxfp8 |

| case | what is measured | file in benchmarks/results |
|---|---|---|
| `speed` | time of one decode step at each batch size, and of one prefill | serving.csv |
| `agreement` | KL divergence from the next-token distribution of `marlin`, or of `bf16` with `--bf16`, for the same \
tokens | serving_agreement.csv, case `… from bf16` |
| `memory` | most memory allocated while the model was loaded, and what it holds then | serving_agreement.csv |

Agreement is measured in decode steps of `--agreement-batch` requests, as CUDA graphs replay them: what is sampled is
replaced by the token that comes next in the given text, so that every engine sees the same. With `agreement` or
`memory` alone the engines run beside each other.

With --together engines start at once, which takes the time of one start; then one after the other is measured while the
rest stand still. The memory of the GPU must hold all of them.

Tables are written whenever an engine has measured something, and rows that a run doesn't measure again stay: engines
may be measured by calls of their own with the same --out, and a run that is cut off leaves what it has. From --deadline
on nothing new begins, and what still runs is stopped after a minute. plot_serving.py draws serving.csv.

With few layers the engine's own work between steps bounds small and large batches: the default is 16.
Without --model, weights are those of random_weights.py, prompts differ, and experts get tokens as if drawn at random.

Bars for `rose` beside `auto` (`verdicts`): 1.25 times the decode throughput at batch 32 to 256, never below 1.
"""

import argparse
import contextlib
import csv
import datetime
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from bench_mtp import QWEN3_235B, write_config
from columns import COLUMNS
from engine_output import first_errors
from random_weights import RANDOM_WEIGHTS

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(__file__).parent / "results"
TEXT = ROOT / "examples" / "tiny_moe" / "validation.txt"
BATCHES = (1, 8, 32, 64, 128, 256)
PROMPT_TOKENS, PREFILL_TOKENS = 64, 8192
STEPS = 64
PROFILED_STEPS, PROFILED_KERNELS = 16, 14
DECODE_BAR, BAR_BATCHES = 1.25, (32, 256)
GRACE_S, LOOK_EVERY_S = 60.0, 2.0
"""What an engine gets behind the deadline to end what it began; how often its output is looked at."""
SPEED_KEY, AGREEMENT_KEY = ("case", "provider", "shape"), ("case", "engine")
AGREEMENT_COLUMNS = (
    "case", "engine", "positions", "mean_kl", "p99_kl", "max_kl", "same_first_token", "load_peak_gib", "held_gib",
    "device", "versions", "commit", "date",
)  # fmt: skip


def _engine(moe: str | None, linear: str | None, activation: str | None = None) -> dict[str, Any]:
    chosen = {"moe_backend": moe, "linear_backend": linear}
    keywords: dict[str, Any] = {key: value for key, value in chosen.items() if value}
    return keywords | ({"additional_config": {"rose": {"activation": activation}}} if activation else {})


TRITON = {"attention_backend": "TRITON_ATTN"}  # the only one found to keep a batch's tokens, see docs/mtp.md
ENGINES = {
    "auto": _engine(None, None),
    "marlin": _engine("marlin", "marlin"),
    "rose": _engine("rose_cutedsl", "rose_cutedsl", "mxfp8"),
    "rose_bf16": _engine("rose_cutedsl", "rose_cutedsl", "bf16"),
    "rose_linear": _engine("marlin", "rose_cutedsl", "mxfp8"),
    "rose_linear_bf16": _engine("marlin", "rose_cutedsl", "bf16"),
    "bf16": _engine(None, None),
    "rose_triton": _engine("rose_cutedsl", "rose_cutedsl", "mxfp8") | TRITON,
    "rose_invariant": _engine("rose_cutedsl", "rose_cutedsl", "mxfp8") | TRITON,
}
ENVIRONMENT = {"rose_invariant": {"VLLM_BATCH_INVARIANT": "1"}}
"""Of the process of an engine, beside what all have."""


# ---- in the process of an engine ----


class Forcing:
    """In place of a model's ``compute_logits``: keeps what it gives and makes the sampler take the given tokens.

    Rows are requests in the order in which they were added; all have the same length.
    """

    def __init__(self, compute: Any, tokens: list[list[int]]):
        self.compute, self.tokens = compute, tokens
        self.kept: list[Any] = []

    def __call__(self, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
        import torch

        logits = self.compute(hidden_states, *args, **kwargs)
        step = len(self.kept)
        if len(logits) != len(self.tokens):
            raise RuntimeError(f"step {step} samples {len(logits)} rows instead of {len(self.tokens)}")
        self.kept.append(logits.float().log_softmax(-1).cpu())
        following = torch.tensor([row[min(step, len(row) - 1)] for row in self.tokens], device=logits.device)
        return torch.full_like(logits, -1e4).scatter_(1, following[:, None], 1e4)


def watch_loading() -> dict[str, float]:
    """Filled when the model is loaded: GiB at most while it was, and afterwards, beyond what was there before."""
    import torch
    from vllm.model_executor.model_loader.base_loader import BaseModelLoader

    found: dict[str, float] = {}
    load = BaseModelLoader.load_model

    @functools.wraps(load)
    def load_model(self: Any, *args: Any, **kwargs: Any) -> Any:
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        model = load(self, *args, **kwargs)
        found["load_peak_gib"] = (torch.cuda.max_memory_allocated() - before) / 2**30
        found["held_gib"] = (torch.cuda.memory_allocated() - before) / 2**30
        return model

    BaseModelLoader.load_model = load_model
    return found


def top_kernels(run: Callable[[], Any]) -> list[str]:
    """The kernels that took most of the time while `run` ran: microseconds, launches, name, the sum of all first.

    Kernels that start before the one in front has ended count from then on.
    """
    import torch

    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        run()
    kernels = sorted(profiler.key_averages(), key=lambda kernel: -kernel.self_device_time_total)
    whole = f"{sum(k.self_device_time_total for k in kernels):.0f} us in {sum(k.count for k in kernels)}: all"
    top = [f"{k.self_device_time_total:.0f} us in {k.count}: {k.key[:70]}" for k in kernels[:PROFILED_KERNELS]]
    return [whole, *top]


def measure(plan: dict[str, Any]) -> None:
    """One engine; prints JSON lines."""
    import torch

    memory = watch_loading()
    from vllm import LLM, SamplingParams

    begin = time.perf_counter()
    llm = LLM(seed=0, enable_prefix_caching=False, **plan["engine"])
    print("RESULT " + json.dumps({"kind": "memory", "start_s": time.perf_counter() - begin, **memory}), flush=True)
    sys.stdin.readline()  # its turn, or the end of the input

    def seconds(prompts: list[list[int]], count: int) -> float:
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
        torch.cuda.synchronize()
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return time.perf_counter() - start

    def late(what: str) -> bool:
        if time.time() < plan["deadline"]:
            return False
        print(f"deadline: {what} was not measured", flush=True)
        return True

    tokens = plan["tokens"]
    if "speed" in plan["cases"]:
        for batch in plan["batches"]:
            if late(f"decode at batch {batch}"):
                break
            prompts = [row[:PROMPT_TOKENS] for row in tokens[:batch]]
            seconds(prompts, 1 + STEPS)
            times = [seconds(prompts, 1 + STEPS) - seconds(prompts, 1) for _ in range(plan["repeats"])]
            us = statistics.median(times) / STEPS * 1e6
            print("RESULT " + json.dumps({"kind": "decode", "batch": batch, "us": us}), flush=True)
            if plan["profile"]:
                top = top_kernels(functools.partial(seconds, prompts, 1 + PROFILED_STEPS))
                print("RESULT " + json.dumps({"kind": "kernels", "batch": batch, "top": top}), flush=True)
        if not late(f"prefill of {PREFILL_TOKENS} tokens"):
            prompt = [token for row in tokens for token in row]
            prompt = (prompt * -(-PREFILL_TOKENS // len(prompt)))[:PREFILL_TOKENS]
            seconds([prompt], 1)
            us = statistics.median(seconds([prompt], 1) for _ in range(plan["repeats"])) * 1e6
            print("RESULT " + json.dumps({"kind": "prefill", "batch": 1, "us": us}), flush=True)
    if "agreement" in plan["cases"] and not late("agreement"):
        rows = tokens[: plan["agreement_batch"]]
        forced = [row[PROMPT_TOKENS:] for row in rows]

        def force(model: Any) -> None:
            model.compute_logits = Forcing(model.compute_logits, forced)

        def collect(model: Any) -> list[Any]:
            return model.compute_logits.kept

        llm.apply_model(force)
        seconds([row[:PROMPT_TOKENS] for row in rows], STEPS)
        torch.save(torch.stack(llm.apply_model(collect)[0][:STEPS]), plan["logprobs"])
        print("RESULT " + json.dumps({"kind": "agreement"}), flush=True)


# ---- in the process that compares ----


def token_rows(model: Path, *, count: int, vocabulary: int | None) -> list[list[int]]:
    """Rows of PROMPT_TOKENS + STEPS tokens: of the example's text, or counted up where there is no tokenizer."""
    length = PROMPT_TOKENS + STEPS
    if vocabulary:
        return [[(97 * i + 31 * j) % (vocabulary - 1000) for j in range(length)] for i in range(count)]
    from transformers import AutoTokenizer

    text = TEXT.read_text(encoding="utf-8")
    ids = AutoTokenizer.from_pretrained(model)(text, add_special_tokens=False, verbose=False)["input_ids"]
    apart = (len(ids) - length) // count
    if apart < 1:
        raise SystemExit(f"{TEXT} gives {len(ids)} tokens, too few for {count} rows of {length}")
    return [ids[apart * i : apart * i + length] for i in range(count)]


def start(plan: dict[str, Any], directory: Path, name: str, *, waits: bool = False) -> subprocess.Popen:
    """A process that measures one engine; its output goes to files.

    Args:
        waits: with measuring, for its turn (:func:`give_turn`).
    """
    path = directory / f"{name}.json"
    path.write_text(json.dumps(plan))
    env = {**os.environ, "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_ALLOW_INSECURE_SERIALIZATION": "1"}
    env |= ENVIRONMENT.get(name, {})
    with (directory / f"{name}.out").open("w") as out:
        command = [sys.executable, __file__, "--one", str(path)]
        stdin = subprocess.PIPE if waits else subprocess.DEVNULL
        return subprocess.Popen(command, stdin=stdin, stdout=out, stderr=subprocess.STDOUT, env=env)


def give_turn(process: subprocess.Popen) -> None:
    """Let a process that waits measure."""
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it has ended
        process.stdin.write(b"\n")
        process.stdin.close()


def wait_started(running: dict[str, subprocess.Popen], directory: Path, *, until: float) -> None:
    """Waits until every engine has started or ended, so that none disturbs the measuring of another."""
    while any(process.poll() is None and not results(directory, name) for name, process in running.items()):
        if time.time() > until:
            return
        time.sleep(LOOK_EVERY_S / 10)


def results(directory: Path, name: str) -> list[dict[str, Any]]:
    """What an engine has printed so far."""
    output = (directory / f"{name}.out").read_text()
    lines = output[: output.rfind("\n") + 1].splitlines()  # the last one may not be whole yet
    return [json.loads(line[7:]) for line in lines if line.startswith("RESULT ")]


def follow(
    running: dict[str, subprocess.Popen],
    directory: Path,
    *,
    until: float,
    seen: Callable[[], None],
    only: str | None = None,
) -> None:
    """Waits for engines, calls `seen` whenever one has measured something, and stops what outlasts the deadline.

    Args:
        until: the deadline, in seconds of time.time().
        only: the engine to wait for, instead of all.
    """
    known = 0
    while True:
        alive = [process for name, process in running.items() if process.poll() is None and only in (None, name)]
        found = sum(len(results(directory, name)) for name in running)
        if found > known:
            known = found
            seen()
        if not alive:
            return
        if time.time() > until + GRACE_S:
            for process in alive:
                process.terminate()
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
            continue
        with contextlib.suppress(subprocess.TimeoutExpired):
            alive[0].wait(timeout=LOOK_EVERY_S)


def divergence(expected: Any, found: Any) -> dict[str, Any]:
    """KL(expected || found) in nats over (steps, rows), and how often both put the same token first."""
    import torch

    if expected.shape != found.shape:
        raise SystemExit(f"one engine gave {tuple(found.shape)}, the one to compare with {tuple(expected.shape)}")
    kl = torch.cat([(e.exp() * (e - f)).sum(-1).flatten() for e, f in zip(expected, found, strict=True)]).double()
    return {
        "positions": kl.numel(),
        "mean_kl": f"{kl.mean():.3e}",
        "p99_kl": f"{kl.quantile(0.99):.3e}",
        "max_kl": f"{kl.max():.3e}",
        "same_first_token": f"{(expected.argmax(-1) == found.argmax(-1)).double().mean():.4f}",
    }


def write(path: Path, columns: tuple[str, ...] | list[str], key: tuple[str, ...], found: list[dict[str, str]]) -> None:
    """Rows of earlier runs that this one doesn't measure again stay."""
    rows: dict[tuple, dict[str, str]] = {}
    if path.exists():
        with path.open() as file:
            rows = {tuple(row[k] for k in key): row for row in csv.DictReader(file)}
    rows |= {tuple(row[k] for k in key): dict.fromkeys(columns, "") | row for row in found}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    with partial.open("w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows.values())
    partial.replace(path)


def verdicts(path: Path) -> Iterator[str]:
    """For every case and shape that has both: the throughput of `rose` over that of `auto`, beside its bar."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            found.setdefault((row["case"], row["shape"]), {})[row["provider"]] = float(row["us"])
    for (case, shape), us in found.items():
        if not {"rose", "auto"} <= set(us):
            continue
        batch = int(shape.split("=")[1]) if case.endswith(" decode") else 0
        bar = DECODE_BAR if BAR_BATCHES[0] <= batch <= BAR_BATCHES[1] else 1.0
        ratio = us["auto"] / us["rose"]
        yield f"{case} {shape}: rose {ratio:.2f} times auto, bar {bar}{'' if ratio >= bar else ' MISSED'}"


def compare(args: argparse.Namespace, directory: Path) -> None:
    """Runs the engines and writes the tables."""
    import torch

    common = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "versions": f"vllm {metadata.version('vllm')}; vllm_rose_plugin {metadata.version('vllm-rose-plugin')}",
        "commit": os.environ.get("ROSE_COMMIT", "uncommitted"),
        "date": datetime.date.today().isoformat(),
    }
    extra: dict[str, Any] = {"max_model_len": PREFILL_TOKENS + 64, "max_num_seqs": max(*args.batches, 32)}
    extra |= {"max_num_batched_tokens": PREFILL_TOKENS, "kv_cache_memory_bytes": 4 << 30, "gpu_memory_utilization": 0.1}
    vocabulary = None
    if args.model is None:
        model, case = directory / "model", f"qwen3_235b {args.layers} layers"
        write_config(model, QWEN3_235B | {"num_hidden_layers": args.layers})
        vocabulary = QWEN3_235B["vocab_size"]
        extra |= {**RANDOM_WEIGHTS, "quantization": "mxfp8", "skip_tokenizer_init": True}
    else:
        model, case = args.model, args.model.name
        most = json.loads((model / "config.json").read_text())["max_position_embeddings"]
        extra["max_model_len"] = min(extra["max_model_len"], most)
    count = max(args.agreement_batch, *args.batches) if "speed" in args.cases else args.agreement_batch
    tokens = token_rows(model, count=count, vocabulary=vocabulary)
    running: dict[str, subprocess.Popen] = {}

    def record() -> None:
        tables(args, case, common, {name: results(directory, name) for name in running})

    for name in args.engines:
        if time.time() > args.until:
            print(f"deadline: {name} was not started", flush=True)
            continue
        plan = {
            "engine": {"model": str(args.bf16 if name == "bf16" else model), **extra, **ENGINES[name]},
            "cases": args.cases,
            "batches": args.batches,
            "repeats": args.repeats,
            "agreement_batch": args.agreement_batch,
            "tokens": tokens,
            "logprobs": str(directory / f"{name}.pt"),
            "profile": args.profile,
            "deadline": args.until,
        }
        running[name] = start(plan, directory, name, waits=args.together)
        if "speed" in args.cases and not args.together:
            follow(running, directory, until=args.until, seen=record)
    if args.together:
        wait_started(running, directory, until=args.until)
        for name, process in running.items():
            give_turn(process)
            follow(running, directory, until=args.until, seen=record, only=name)
    follow(running, directory, until=args.until, seen=record)
    by_engine = {name: results(directory, name) for name in running}
    if "agreement" in args.cases:
        agreements(args, case, common, by_engine, directory)
    for name, found in by_engine.items():
        for result in found:
            print(f"{case}: {name} {result}", flush=True)
    if (args.out / "serving.csv").exists():
        print(*verdicts(args.out / "serving.csv"), sep="\n", flush=True)
    failed = [name for name, process in running.items() if process.returncode]
    for name in failed:
        output = (directory / f"{name}.out").read_text()
        print(f"{name} ended with {running[name].returncode}:\n{first_errors(output)}", file=sys.stderr, flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def tables(
    args: argparse.Namespace, case: str, common: dict[str, str], by_engine: dict[str, list[dict[str, Any]]]
) -> None:
    """Writes the times, and the memory where it was asked for without agreement, that engines have printed."""
    speeds, memory = [], []
    for name, found in by_engine.items():
        for result in found:
            if result["kind"] in ("decode", "prefill"):
                shape = f"batch={result['batch']}" if result["kind"] == "decode" else f"tokens={PREFILL_TOKENS}"
                speed = {"area": "serving", "case": f"{case} {result['kind']}", "provider": name, "shape": shape}
                speeds.append({**speed, "us": f"{result['us']:.1f}", **common})
            if result["kind"] == "memory" and "memory" in args.cases and "agreement" not in args.cases:
                held = {key: f"{result[key]:.3f}" for key in ("load_peak_gib", "held_gib") if key in result}
                memory.append({"case": case, "engine": name, **held, **common})
    if speeds:
        write(args.out / "serving.csv", COLUMNS, SPEED_KEY, speeds)
    if memory:
        write(args.out / "serving_agreement.csv", AGREEMENT_COLUMNS, AGREEMENT_KEY, memory)


def agreements(
    args: argparse.Namespace,
    case: str,
    common: dict[str, str],
    by_engine: dict[str, list[dict[str, Any]]],
    directory: Path,
) -> None:
    """Writes how far each engine is from marlin or from the BF16 model, with its memory."""
    import torch

    done = [name for name, found in by_engine.items() if any(result["kind"] == "agreement" for result in found)]
    base = "bf16" if args.bf16 else "marlin"
    if base not in done:
        print(f"left out: agreement, since {base} gave no distributions", file=sys.stderr, flush=True)
        return
    expected, rows = torch.load(directory / f"{base}.pt"), []
    for name in done:
        held = next(result for result in by_engine[name] if result["kind"] == "memory")
        row = {key: f"{held[key]:.3f}" for key in ("load_peak_gib", "held_gib") if key in held}
        rows.append({"case": f"{case} from bf16" if args.bf16 else case, "engine": name, **row, **common})
        rows[-1] |= divergence(expected, torch.load(directory / f"{name}.pt"))
    write(args.out / "serving_agreement.csv", AGREEMENT_COLUMNS, AGREEMENT_KEY, rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help="an MXFP8 checkpoint with a tokenizer")
    parser.add_argument("--bf16", type=Path, help="the checkpoint that --model was made of, to compare with")
    parser.add_argument("--layers", type=int, default=16, help="without --model: of 94 (default: %(default)s)")
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=["marlin", "auto", "rose"])
    parser.add_argument("--cases", default=["speed"], type=lambda text: text.split(","), help="separated by commas")
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--agreement-batch", type=int, default=32)
    parser.add_argument(
        "--together", action="store_true", help="start all engines at once, measure one after the other"
    )
    parser.add_argument("--profile", action="store_true", help="print the kernels that take most of a decode's time")
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which nothing new begins")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the tables (default: %(default)s)")
    args = parser.parse_args()
    args.until = time.time() + args.deadline
    if args.one:
        measure(json.loads(Path(args.one).read_text()))
        return
    unknown = set(args.cases) - {"speed", "agreement", "memory"}
    if unknown:
        parser.error(f"--cases: {', '.join(sorted(unknown))} unknown; choose among speed, agreement, memory")
    if ("bf16" in args.engines) != (args.bf16 is not None) or (args.bf16 and not args.model):
        parser.error("--engines bf16, --bf16 and --model go together")
    base = "bf16" if args.bf16 else "marlin"
    if "agreement" in args.cases and base not in args.engines:
        parser.error(f"--cases agreement compares with {base}: add it to --engines")
    with tempfile.TemporaryDirectory() as directory:
        compare(args, Path(directory))


if __name__ == "__main__":
    main()
