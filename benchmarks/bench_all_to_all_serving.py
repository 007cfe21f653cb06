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
slower rank's, the median of `--repeats`; rows go into benchmarks/results/all_to_all_end_to_end.csv as engines end, and
those that a run doesn't measure again stay. Bar for `rose` beside `default`: 1.1 times the decode throughput.
"""

import argparse
import csv
import datetime
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from bench_mtp import QWEN3_235B, write_config
from bench_serving import PROMPT_TOKENS, SPEED_KEY, STEPS, token_rows, write
from columns import COLUMNS
from random_weights import RANDOM_WEIGHTS

RESULTS = Path(__file__).parent / "results"
AREA = "all_to_all_end_to_end"
RANKS = 2
BATCHES = (1, 8, 32, 64, 128, 256)
BAR = 1.1
ENGINE_S = 540.0
"""Until an engine counts as one that hangs."""
GRACE_S = 20.0
"""What a rank gets to end when the other has failed."""
NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1", "NCCL_NVLS_ENABLE": "0", "VLLM_ALLREDUCE_USE_SYMM_MEM": "0"}
"""A host's GPUs may be shared."""
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
        return subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=env)


def run(plan: dict[str, Any], directory: Path) -> dict[int, float]:
    """Microseconds of a decode step by batch, of the numbers that all ranks have measured.

    Raises:
        RuntimeError: a rank failed; with the end of its output.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    processes = [start(plan, directory, rank, port) for rank in range(RANKS)]
    until, failed = time.monotonic() + ENGINE_S, False
    try:
        while None in (codes := [process.poll() for process in processes]):
            if not failed and any(codes):
                failed, until = True, min(until, time.monotonic() + GRACE_S)  # the other rank would wait for it
            if time.monotonic() > until:
                print("the engine hangs, or a rank of it has failed: it was stopped", flush=True)
                break
            time.sleep(0.1)
    finally:
        for process in processes:
            process.kill()
            process.wait()
    found = [dict(results(directory / f"{rank}.out")) for rank in range(RANKS)]
    common = [batch for batch in found[0] if all(batch in of_rank for of_rank in found)]
    if not common:
        raise RuntimeError("\n".join((directory / f"{rank}.out").read_text()[-2000:] for rank in range(RANKS)))
    turns = {batch: zip(*(of_rank[batch] for of_rank in found), strict=True) for batch in common}
    return {batch: statistics.median(max(of_turn) for of_turn in turns[batch]) for batch in common}


def results(path: Path) -> Iterator[tuple[int, list[float]]]:
    """(batch, microseconds of a step in each turn) that a rank has printed."""
    for line in path.read_text().splitlines():
        if line.startswith("RESULT "):
            result = json.loads(line[7:])
            yield result["batch"], result["us"]


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
        place = directory / name
        place.mkdir()
        plan = {
            "engine": {"model": str(model), **engine, **ENGINES[name]},
            "batches": args.batches,
            "repeats": args.repeats,
            "tokens": tokens,
            "directory": str(place),
        }
        try:
            found = run(plan, place)
        except RuntimeError as error:
            failed.append(name)
            print(f"{name} failed:\n{error}", file=sys.stderr, flush=True)
            continue
        rows = [
            {"case": case, "provider": name, "shape": f"batch={batch};ranks={RANKS}", "us": f"{us:.1f}", **common}
            for batch, us in found.items()
        ]
        write(args.out / f"{AREA}.csv", COLUMNS, SPEED_KEY, rows)
        print(f"{case}: {name} " + ", ".join(f"{us:.0f} us at {batch}" for batch, us in found.items()), flush=True)
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
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the table (default: %(default)s)")
    args = parser.parse_args()
    if args.one:
        measure(json.loads(Path(args.one).read_text()))
        return
    if min(args.batches) < 1 or args.repeats < 1:
        parser.error(f"--batches {args.batches} and --repeats {args.repeats} must be 1 or more")
    with tempfile.TemporaryDirectory() as directory:
        compare(args, Path(directory))


if __name__ == "__main__":
    main()
