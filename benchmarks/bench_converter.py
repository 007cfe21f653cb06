"""Speed and memory of `rose quantize` on a synthetic bf16 Qwen3-MoE checkpoint.

    python benchmarks/bench_converter.py [--gb 2] [--repeats 3]

Writes benchmarks/results/converter.csv. Speed is counted in source bytes. The limit is a copy of the same bytes through
the same file system, synced to disk, timed in the same round as each conversion; the peer quantizes the same tensors
from memory to memory, so it has no file to read or write.
"""

import argparse
import csv
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from importlib import metadata
from pathlib import Path

import torch
from columns import COLUMNS as COMMON_COLUMNS
from columns import commit
from safetensors.torch import load_file, save_file

import vllm_rose_plugin

RESULTS = Path(__file__).parent / "results"
COLUMNS = [*COMMON_COLUMNS, "peak_rss_mb"]
# VmHWM and not getrusage: Linux carries a parent's peak over into ru_maxrss of the process that it starts.
PROGRAM = """
import argparse, sys
from vllm_rose_plugin.cli import quantize
parser = argparse.ArgumentParser()
quantize.add_arguments(parser)
code = quantize.run(parser.parse_args())
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
sys.exit(code)
"""
HIDDEN, INTERMEDIATE, EXPERTS = 2048, 768, 48  # Qwen3-30B-A3B's dims with fewer experts: half a gigabyte a layer


def make_checkpoint(directory: Path, *, gigabytes: float) -> int:
    """Write a sharded checkpoint, one layer a file; returns its bytes."""
    directory.mkdir()
    generator = torch.Generator().manual_seed(0)
    pool = torch.randn(1 << 24, generator=generator).mul_(0.02).bfloat16()
    weight_map: dict[str, str] = {}
    written = layer = 0
    while written < 0.95 * gigabytes * 1e9:
        prefix = f"model.layers.{layer}"
        shapes = {f"{prefix}.self_attn.{p}_proj.weight": (n, HIDDEN) for p, n in (("q", 4096), ("k", 512), ("v", 512))}
        shapes[f"{prefix}.self_attn.o_proj.weight"] = (HIDDEN, 4096)
        shapes[f"{prefix}.mlp.gate.weight"] = (EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            for name in ("gate", "up"):
                shapes[f"{prefix}.mlp.experts.{expert}.{name}_proj.weight"] = (INTERMEDIATE, HIDDEN)
            shapes[f"{prefix}.mlp.experts.{expert}.down_proj.weight"] = (HIDDEN, INTERMEDIATE)
        tensors = {}
        for number, (name, (rows, columns)) in enumerate(shapes.items()):
            start = number * 4099 % (pool.numel() - rows * columns)
            tensors[name] = pool[start : start + rows * columns].reshape(rows, columns).clone()
        file_name = f"model-{layer + 1:05d}.safetensors"
        save_file(tensors, directory / file_name)
        weight_map.update(dict.fromkeys(tensors, file_name))
        written += (directory / file_name).stat().st_size
        layer += 1
    config = {"architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "num_hidden_layers": layer}
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return written


def copy_files(source: Path, destination: Path) -> None:
    """The limit: the same bytes, read and written and synced."""
    destination.mkdir()
    for path in source.glob("*.safetensors"):
        shutil.copyfile(path, destination / path.name)
        with (destination / path.name).open("rb") as file:
            os.fsync(file.fileno())


def run_rose(source: Path, destination: Path, *, workers: int) -> tuple[float, float]:
    """Seconds of the whole command, interpreter and torch import included, and peak RSS in MB."""
    start = time.perf_counter()
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(source), str(destination), "--workers", str(workers)],
        check=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    return time.perf_counter() - start, int(result.stdout.split()[-1]) / 1024


def time_peer(source: Path, *, limit_bytes: int) -> tuple[float, int]:
    """Seconds and bytes of compressed-tensors' MXFP8 quantization of expert tensors, memory to memory."""
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import quantize
    from compressed_tensors.quantization.utils import calculate_qparams

    args = QuantizationArgs(
        num_bits=8, type="float", strategy="group", group_size=32, symmetric=True, scale_dtype=torch.uint8
    )
    tensors = [t for n, t in load_file(min(source.glob("*.safetensors"))).items() if "experts" in n]
    done = 0
    start = time.perf_counter()
    for weight in tensors:
        blocks = weight.unflatten(-1, (-1, 32))
        scale, zero_point = calculate_qparams(blocks.amin(-1), blocks.amax(-1), args)
        quantize(weight, scale, zero_point, args, dtype=torch.float8_e4m3fn)
        done += weight.nbytes
        if done >= limit_bytes:
            break
    return time.perf_counter() - start, done


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gb", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    args = parser.parse_args()
    seconds: dict[str, list[float]] = {"copy": [], "workers=1": [], "workers=2": [], "compressed-tensors": []}
    peak: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as name:
        work = Path(name)
        source = work / "source"
        size = make_checkpoint(source, gigabytes=args.gb)
        peer_bytes = 0
        for _ in range(args.repeats):  # round robin, so that a noisy minute hits all alike
            start = time.perf_counter()
            copy_files(source, work / "copy")
            seconds["copy"].append(time.perf_counter() - start)
            shutil.rmtree(work / "copy")
            for workers in (1, 2):
                key = f"workers={workers}"
                elapsed, rss = run_rose(source, work / "mxfp8", workers=workers)
                seconds[key].append(elapsed)
                peak[key] = max(peak.get(key, 0.0), rss)
                shutil.rmtree(work / "mxfp8")
            elapsed, peer_bytes = time_peer(source, limit_bytes=200_000_000)
            seconds["compressed-tensors"].append(elapsed)
    versions = f"torch {torch.__version__}; compressed-tensors {metadata.version('compressed-tensors')}; "
    versions += f"vllm_rose_plugin {vllm_rose_plugin.__version__}"
    common = {
        "area": "converter",
        "device": f"{cpu_name()} ({os.cpu_count()} cores)",
        "versions": versions,
        "commit": commit(),
        "date": datetime.date.today().isoformat(),
    }
    limit = size / statistics.median(seconds["copy"]) / 1e9
    rows = []
    for key, times in seconds.items():
        count = peer_bytes if key == "compressed-tensors" else size
        rate = count / statistics.median(times) / 1e9
        rows.append(
            {
                **common,
                "case": "in_memory" if key == "compressed-tensors" else f"{args.gb:g}gb_bf16",
                "provider": {"copy": "file copy + fsync", "compressed-tensors": key}.get(key, "rose"),
                "shape": f"bytes={count}" + (f";{key}" if key.startswith("workers") else ""),
                "us": round(statistics.median(times) * 1e6),
                "gb_per_s": round(rate, 4),
                "tflop_per_s": "",
                "share_of_limit": round(rate / limit, 4),
                "peak_rss_mb": round(peak[key]) if key.startswith("workers") else "",
            }
        )
        print(f"{key:20} {rate * 1000:8.1f} MB/s  {rate / limit:6.1%} of copy  peak {peak.get(key, 0):.0f} MB")
    print(f"load average while it ran: {os.getloadavg()[1]:.1f} on {os.cpu_count()} cores")
    RESULTS.mkdir(exist_ok=True)
    with (RESULTS / "converter.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS)
        writer.writeheader()
        writer.writerows(rows)


if __name__ == "__main__":
    main()
