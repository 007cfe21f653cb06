"""Decode of two data-parallel ranks with expert parallelism in the real vLLM: our all-to-all beside its default.

    python benchmarks/bench_all_to_all_serving.py --layers 4    # shapes of Qwen3-235B, random weights, two GPUs
    python benchmarks/bench_all_to_all_serving.py --model DIR --engines default rose

| engine | `--all2all-backend` | `--moe-backend`, `--linear-backend` |
|---|---|---|
| `default` | allgather_reducescatter | vLLM's choice |
| `default_nvlink` | rose_nvlink | vLLM's choice |
| `rose` | rose_nvlink | rose_cutedsl |

`default_nvlink` beside `default` shows what the all-to-all alone changes. Every rank is a process with CUDA graphs on;
both have the same number of requests, and begin each measurement together. `us` is the time of one decode step, the
slower rank's, the median of `--repeats`; rows go into benchmarks/results/all_to_all_end_to_end.csv as they come, and
those that a run doesn't measure again stay. At --deadline engines are stopped. Bar for `rose` beside `default`: 1.1
times the decode throughput.
"""

import argparse
import contextlib
import csv
import datetime
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from bench_all_reduce_serving import NO_MULTICAST
from bench_mtp import QWEN3_235B, write_config
from bench_serving import PROMPT_TOKENS, SPEED_KEY, STEPS, token_rows, write
from columns import COLUMNS
from engine_output import first_errors
from random_weights import RANDOM_WEIGHTS

RESULTS = Path(__file__).parent / "results"
AREA = "all_to_all_end_to_end"
RANKS = 2
BATCHES = (1, 8, 32, 64, 128, 256)
BAR = 1.1
ENGINE_S = 540.0
"""Until an engine counts as one that hangs."""
GRACE_S, LOOK_EVERY_S = 20.0, 0.1
"""What a rank gets to end when the other has failed; how often their output is looked at."""
_OURS = {"moe_backend": "rose_cutedsl", "linear_backend": "rose_cutedsl"}
ENGINES: dict[str, dict[str, Any]] = {
    "default": {"all2all_backend": "allgather_reducescatter"},
    "default_nvlink": {"all2all_backend": "rose_nvlink"},
    "rose": {"all2all_backend": "rose_nvlink", **_OURS},
}


# ---- in the process of a rank ----


def meet(directory: Path, what: str, rank: int) -> None:
    """Wait for the other ranks."""
    (directory / f"{what}.{rank}").touch()
    until = time.monotonic() + ENGINE_S
    while not all((directory / f"{what}.{other}").exists() for other in range(RANKS)):
        if time.monotonic() > until:
            raise TimeoutError(f"rank {rank}: another rank didn't come to {what!r} in {ENGINE_S:g} s")
        time.sleep(0.001)


def measure(plan: dict[str, Any]) -> None:
    """One rank; prints JSON lines."""
    from vllm import LLM, SamplingParams

    rank, directory = int(os.environ["VLLM_DP_RANK"]), Path(plan["directory"])
    llm = LLM(seed=0, enable_prefix_caching=False, **plan["engine"])

    def seconds(prompts: list[list[int]], count: int, what: str) -> float:
        sampling = SamplingParams(max_tokens=count, temperature=0.0, ignore_eos=True, detokenize=False)
        meet(directory, what, rank)
        start = time.perf_counter()
        llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
        return time.perf_counter() - start

    for batch in plan["batches"]:
        prompts = [row[:PROMPT_TOKENS] for row in plan["tokens"][:batch]]
        seconds(prompts, 1 + STEPS, f"{batch} warm")
        times = []
        for turn in range(plan["repeats"]):
            whole = seconds(prompts, 1 + STEPS, f"{batch} whole {turn}")
            times.append(whole - seconds(prompts, 1, f"{batch} first {turn}"))
        us = [time_s / STEPS * 1e6 for time_s in times]
        print("RESULT " + json.dumps({"batch": batch, "us": us}), flush=True)
    meet(directory, "end", rank)


# ---- in the process that compares ----


def start(plan: dict[str, Any], directory: Path, rank: int, port: int) -> subprocess.Popen:
    """A process for one rank of an engine; its output goes to a file."""
    path = directory / "plan.json"
    path.write_text(json.dumps(plan))
    env = {**os.environ, **NO_MULTICAST, "VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank)}
    env |= {"VLLM_DP_SIZE": str(RANKS), "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": str(port)}
    with (directory / f"{rank}.out").open("w") as out:
        command = [sys.executable, __file__, "--one", str(path)]
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env, start_new_session=True)


def run(plan: dict[str, Any], directory: Path, *, until: float, seen: Callable[[dict[int, float]], None]) -> None:
    """Measures one engine.

    Args:
        plan: of :func:`measure`.
        directory: for output.
        until: when it is stopped, in seconds of time.monotonic().
        seen: is called with :func:`medians` whenever all ranks have measured one more batch.

    Raises:
        RuntimeError: a rank failed or was stopped; with the first errors and the end of each rank's output.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [start(plan, directory, rank, port) for rank in range(RANKS)]
    failed, known = False, 0
    try:
        while True:
            codes = [process.poll() for process in processes]
            found = medians(directory)
            if len(found) > known:
                known = len(found)
                seen(found)
            if None not in codes:
                break
            if not failed and any(codes):
                failed, until = True, min(until, time.monotonic() + GRACE_S)  # the other rank would wait for it
            if time.monotonic() > until:
                break
            time.sleep(LOOK_EVERY_S)
    finally:
        for process in processes:
            end(process)
    if any(code != 0 for code in codes):
        said = (
            f"rank {rank} {'was stopped' if code is None else f'ended with {code}'}:\n"
            + first_errors((directory / f"{rank}.out").read_text(errors="replace"))
            for rank, code in enumerate(codes)
        )
        raise RuntimeError("\n".join(said))


def end(process: subprocess.Popen) -> None:
    """By force, with the processes that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def medians(directory: Path) -> dict[int, float]:
    """Microseconds of a decode step by batch, of those that all ranks have measured: the slower rank's, the median."""
    found = [results(directory / f"{rank}.out") for rank in range(RANKS)]
    common = [batch for batch in found[0] if all(batch in of_rank for of_rank in found)]
    turns = {batch: zip(*(of_rank[batch] for of_rank in found), strict=True) for batch in common}
    return {batch: statistics.median(max(of_turn) for of_turn in turns[batch]) for batch in common}


def results(path: Path) -> dict[int, list[float]]:
    """Microseconds of a step in each turn by batch, of whole lines that a rank has printed."""
    output = path.read_text(errors="replace")
    lines = output[: output.rfind("\n") + 1].splitlines()
    found = [json.loads(line[7:]) for line in lines if line.startswith("RESULT ")]
    return {result["batch"]: result["us"] for result in found}


def verdicts(path: Path) -> Iterator[str]:
    """The throughput of every engine over that of `default`; for `rose` beside its bar."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    with path.open() as file:
        for row in csv.DictReader(file):
            found.setdefault((row["case"], row["shape"]), {})[row["provider"]] = float(row["us"])
    for (case, shape), us in found.items():
        for name in us.keys() - {"default"} if "default" in us else ():
            ratio = us["default"] / us[name]
            bar = f", bar {BAR}{'' if ratio >= BAR else ' MISSED'}" if name == "rose" else ""
            yield f"{case} {shape}: {name} {ratio:.2f} times default{bar}"


def compare(args: argparse.Namespace, directory: Path) -> None:
    """Runs the engines one after another and writes the table after each."""
    import torch

    common = {
        "area": AREA,
        "device": f"{RANKS} x {torch.cuda.get_device_name()}" if torch.cuda.is_available() else "none",
        "versions": f"vllm {metadata.version('vllm')}; vllm_rose_plugin {metadata.version('vllm-rose-plugin')}",
        "commit": os.environ.get("ROSE_COMMIT", "uncommitted"),
        "date": datetime.date.today().isoformat(),
    }
    most = max(args.batches)
    engine: dict[str, Any] = {"max_model_len": 512, "max_num_seqs": most, "enable_expert_parallel": True}
    engine |= {
        "max_num_batched_tokens": max(2048, most),
        "kv_cache_memory_bytes": 4 << 30,
        "gpu_memory_utilization": 0.1,
    }
    vocabulary = None
    if args.model is None:
        model, case = directory / "model", f"qwen3_235b {args.layers} layers decode"
        write_config(model, QWEN3_235B | {"num_hidden_layers": args.layers})
        vocabulary = QWEN3_235B["vocab_size"]
        engine |= {**RANDOM_WEIGHTS, "quantization": "mxfp8", "skip_tokenizer_init": True}
    else:
        model, case = args.model, f"{args.model.name} decode"
    tokens = token_rows(model, count=max(args.batches), vocabulary=vocabulary)
    failed = []
    for name in args.engines:
        if time.monotonic() > args.until:
            print(f"deadline: {name} was not started", flush=True)
            continue
        place = directory / name
        place.mkdir()
        plan = {
            "engine": {"model": str(model), **engine, **ENGINES[name]},
            "batches": args.batches,
            "repeats": args.repeats,
            "tokens": tokens,
            "directory": str(place),
        }

        def record(found: dict[int, float], name: str = name) -> None:
            key = {"case": case, "provider": name}
            rows = [
                {**key, "shape": f"batch={batch};ranks={RANKS}", "us": f"{us:.1f}", **common}
                for batch, us in found.items()
            ]
            write(args.out / f"{AREA}.csv", COLUMNS, SPEED_KEY, rows)
            print(f"{case}: {name} " + ", ".join(f"{us:.0f} us at {batch}" for batch, us in found.items()), flush=True)

        try:
            run(plan, place, until=min(args.until, time.monotonic() + ENGINE_S), seen=record)
        except RuntimeError as error:
            failed.append(name)
            print(f"{name} failed:\n{error}", file=sys.stderr, flush=True)
    if (args.out / f"{AREA}.csv").exists():
        print(*verdicts(args.out / f"{AREA}.csv"), sep="\n", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("--model", type=Path, help="an MXFP8 checkpoint with a tokenizer")
    parser.add_argument("--layers", type=int, default=4, help="without --model: of 94 (default: %(default)s)")
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=list(ENGINES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES), help="requests of each rank")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which engines are stopped")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the table (default: %(default)s)")
    args = parser.parse_args()
    if args.one:
        measure(json.loads(Path(args.one).read_text()))
        return
    if min(args.batches) < 1 or args.repeats < 1:
        parser.error(f"--batches {args.batches} and --repeats {args.repeats} must be 1 or more")
    args.until = time.monotonic() + args.deadline
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # ends the engines on the way out
    with tempfile.TemporaryDirectory() as directory:
        compare(args, Path(directory))


if __name__ == "__main__":
    main()
