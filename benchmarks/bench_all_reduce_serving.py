"""Decode and prefill times of the real vLLM over several GPUs of one host, with one all-reduce or another.

    python benchmarks/bench_all_reduce_serving.py [--layers 4] [--ranks 2] [--batches 1 8 32] [--engines vllm rose]

Qwen3-235B's shapes cut to some layers, BF16 with random weights, CUDA graphs on, tensor parallel. Engines run one after
the other, each a process of its own with the same settings:

| engine | all-reduce of hidden states |
|---|---|
| `nccl` | NCCL |
| `vllm` | vLLM's choice by size: its custom all-reduce, then NCCL |
| `rose` | ours, peer-to-peer |
| `rose_norm` | ours, residual and norm in the same launch where start-up times that to be faster |

Writes benchmarks/results/all_reduce_end_to_end.csv; rows that a run doesn't measure again stay. The times are
bench_serving.py's: a decode step by the difference of two generations, and one prefill. From --deadline on nothing new
begins.

No multicast object is made: NCCL, torch's symmetric memory and vLLM's use of FlashInfer, its fusion of all-reduce and
norm included, are switched off for all engines alike, since a host's GPUs may be shared.
"""

import argparse
import datetime
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

import bench_serving
from bench_mtp import QWEN3_235B, write_config
from bench_serving import COLUMNS, PREFILL_TOKENS, RESULTS, SPEED_KEY
from engine_output import first_errors
from random_weights import RANDOM_WEIGHTS

BATCHES = (1, 8, 32, 128)
FILE = "all_reduce_end_to_end.csv"
NO_MULTICAST = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",
}
"""Every use of NVLink multicast that is known is off: a host's GPUs may be shared."""
_NO_FUSION = {"compilation_config": {"pass_config": {"fuse_allreduce_rms": False}}}


def _ours(**settings: str) -> dict[str, Any]:
    return {**_NO_FUSION, "additional_config": {"rose": {"all_reduce": "p2p", **settings}}}


ENGINES: dict[str, dict[str, Any]] = {
    "nccl": {**_NO_FUSION, "disable_custom_all_reduce": True},
    "vllm": _NO_FUSION,
    "rose": _ours(),
    "rose_norm": _ours(all_reduce_norm="auto"),
}


def rows_of(case: str, name: str, found: list[dict[str, Any]], common: dict[str, str]) -> list[dict[str, str]]:
    """The table's rows of what an engine has printed."""
    rows = []
    for result in found:
        if result["kind"] in ("decode", "prefill"):
            shape = f"batch={result['batch']}" if result["kind"] == "decode" else f"tokens={PREFILL_TOKENS}"
            key = {"area": "all_reduce_end_to_end", "case": f"{case} {result['kind']}", "provider": name}
            rows.append({**key, "shape": shape, "us": f"{result['us']:.1f}", **common})
    return rows


def verdicts(rows: list[dict[str, str]]) -> Iterator[str]:
    """For every case and shape: the time of each engine over vLLM's own."""
    found: dict[tuple[str, str], dict[str, float]] = {}
    for row in rows:
        found.setdefault((row["case"], row["shape"]), {})[row["provider"]] = float(row["us"])
    for (case, shape), us in found.items():
        if "vllm" in us and len(us) > 1:
            others = ", ".join(
                f"{name} {us[name] / us['vllm']:.3f}" for name in ENGINES if name in us.keys() - {"vllm"}
            )
            yield f"{case} {shape}: vllm {us['vllm']:.0f} us; beside it {others}"


def compare(args: argparse.Namespace, directory: Path) -> None:
    """Runs the engines one after the other and writes the table."""
    import torch

    common = {
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "none",
        "versions": f"vllm {metadata.version('vllm')}; vllm_rose_plugin {metadata.version('vllm-rose-plugin')}",
        "commit": os.environ.get("ROSE_COMMIT", "uncommitted"),
        "date": datetime.date.today().isoformat(),
    }
    model, case = directory / "model", f"qwen3_235b {args.layers} layers tp{args.ranks}"
    write_config(model, QWEN3_235B | {"num_hidden_layers": args.layers})
    tokens = bench_serving.token_rows(model, count=max(args.batches), vocabulary=QWEN3_235B["vocab_size"])
    failed, all_rows = [], []
    for name in args.engines:
        if time.time() > args.until:
            print(f"deadline: {name} was not started", flush=True)
            continue
        engine = {
            "model": str(model),
            **RANDOM_WEIGHTS,
            "skip_tokenizer_init": True,
            "tensor_parallel_size": args.ranks,
            "max_model_len": PREFILL_TOKENS + 64,
            "max_num_seqs": max(*args.batches, 32),
            "max_num_batched_tokens": PREFILL_TOKENS,
            "kv_cache_memory_bytes": 4 << 30,
            "gpu_memory_utilization": 0.1,
        }
        plan = {
            "engine": {**engine, **ENGINES[name]},
            "cases": ["speed"],
            "batches": args.batches,
            "repeats": args.repeats,
            "agreement_batch": 0,
            "profile": False,
            "tokens": tokens,
            "logprobs": "",
            "deadline": args.until,
        }
        process = bench_serving.start(plan, directory, name)
        rows: list[dict[str, str]] = []

        def record(name: str = name, rows: list[dict[str, str]] = rows) -> None:
            rows[:] = rows_of(case, name, bench_serving.results(directory, name), common)
            if rows:
                bench_serving.write(args.out / FILE, COLUMNS, SPEED_KEY, rows)

        bench_serving.follow({name: process}, directory, until=args.until, seen=record)
        all_rows += rows
        output = (directory / f"{name}.out").read_text()
        chosen = [line for line in output.splitlines() if "All-reduce of group" in line]
        print(
            *chosen[:1], *(f"{row['case']}: {name} {row['shape']} {row['us']} us" for row in rows), sep="\n", flush=True
        )
        if process.returncode:
            failed.append(name)
            print(f"{name} ended with {process.returncode}:\n{first_errors(output)}", file=sys.stderr, flush=True)
    print(*verdicts(all_rows), sep="\n", flush=True)
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=4, help="of 94 (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--engines", nargs="+", choices=tuple(ENGINES), default=list(ENGINES))
    parser.add_argument("--batches", nargs="+", type=int, default=list(BATCHES))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--deadline", type=float, default=1e9, help="seconds after which nothing new begins")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder of the table (default: %(default)s)")
    args = parser.parse_args()
    if args.ranks < 2:
        parser.error(f"--ranks is {args.ranks}; it must be 2 or more: one GPU reduces nothing")
    args.until = time.time() + args.deadline
    os.environ |= NO_MULTICAST
    with tempfile.TemporaryDirectory() as directory:
        compare(args, Path(directory))


if __name__ == "__main__":
    main()
