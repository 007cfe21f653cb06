"""``rose tune``: time other configs of the GEMM at a model's shapes on this GPU, and keep the fastest."""

import argparse
import json
import time
from pathlib import Path
from typing import TYPE_CHECKING

from vllm_rose_plugin.cli import UserError

if TYPE_CHECKING:
    from vllm_rose_plugin.kernels.gemm.tune import Result

HELP = "measure which configs of the GEMM are fastest for a model on this GPU; servers use what is found"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of ``rose tune``."""
    parser.add_argument("--model", type=Path, required=True, help="a checkpoint folder or its config.json")
    parser.add_argument("--tensor-parallel-size", type=int, default=1, metavar="N", help="as vllm serve will have it")
    parser.add_argument("--enable-expert-parallel", action="store_true", help="as vllm serve will have it")
    parser.add_argument("--activation", choices=("mxfp8", "bf16"), default="mxfp8", help="the plugin's setting (mxfp8)")
    parser.add_argument("--tokens", metavar="N,N,…", help="of a step, each rounded up to its bucket (1,8,16,32,… 8192)")
    parser.add_argument("--again", action="store_true", help="measure also what was measured before")


def run(args: argparse.Namespace) -> int:
    """Measure, print a table, write the file; 1 where something couldn't be measured."""
    from vllm_rose_plugin.kernels.contracts import Activation
    from vllm_rose_plugin.kernels.gemm.tune import TOKENS, Job, summary, tune
    from vllm_rose_plugin.kernels.jit.store import TUNED, cache_folder
    from vllm_rose_plugin.kernels.rank_shapes import RankShapes
    from vllm_rose_plugin.kernels.warm import gemm_jobs

    tokens = _tokens(args.tokens) if args.tokens else TOKENS
    path = args.model / "config.json" if args.model.is_dir() else args.model
    try:
        shapes = RankShapes.of(
            json.loads(path.read_text()),
            tensor_parallel_size=args.tensor_parallel_size,
            enable_expert_parallel=args.enable_expert_parallel,
        )
    except OSError as error:
        raise UserError(f"{path}: {error.strerror or error}") from error
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    folder = cache_folder()
    if folder is None:
        raise UserError("there is no home directory; ROSE_CACHE_DIR names a cache for what is found")
    target, sm_count = _device()
    begin = time.perf_counter()
    results: list[Result] = []
    try:
        jobs = list(
            gemm_jobs(shapes, target=target, sm_count=sm_count, tokens=tokens, activation=Activation(args.activation))
        )
    except ValueError as error:
        raise UserError(f"{path}: {error}") from error
    print(f"{'shape':32} {'rows':>7} {'heuristic us':>13} {'best us':>9}  chosen")
    for result in tune(jobs, again=args.again):
        results.append(result)
        print(line(result), flush=True)
    print(f"{summary(results, seconds=time.perf_counter() - begin)}; {folder / TUNED}")
    asked = {Job(job.call, job.rows[1]) for job in jobs}
    if missing := len(asked) - len(results):
        print(f"{missing} sizes could not be measured; the lines above say why")
    return 1 if missing else 0


def line(result: "Result") -> str:
    """One row of the table: rows are those over all groups, and the fields are left out where the heuristic's stay."""
    call, choice = result.call, result.choice
    shape = f"G={call.num_groups} N={call.n} K={call.k} {call.epilogue}"
    chosen = (
        " ".join(f"{name}={value}" for name, value in choice.fields.items()) if choice.counts else "the heuristic's"
    )
    again = " (measured before)" if result.from_table else ""
    return f"{shape:32} {result.rows:>7} {choice.heuristic_us:>13.2f} {choice.choice_us:>9.2f}  {chosen}{again}"


def _tokens(text: str) -> list[int]:
    try:
        tokens = [int(each) for each in text.split(",")]
    except ValueError:
        tokens = []
    if not tokens or min(tokens) < 1:
        raise UserError(f"--tokens is {text!r}; it must be numbers from 1 on with commas between, such as 1,64,2048")
    return tokens


def _device() -> tuple[str, int]:
    """(target, SM count) of the GPU."""
    import torch

    from vllm_rose_plugin.kernels.mxfp8_quantize.launch import device_facts

    if not torch.cuda.is_available():
        raise UserError(
            "times are measured on an NVIDIA GPU, and torch finds none here: run this where the model will be served "
            "(`rose cache export` and `import` carry what it finds to other machines with the same GPUs)"
        )
    try:
        return device_facts(torch.cuda.current_device())
    except RuntimeError as error:  # no kernel of ours for the device, or the compiler is missing or mixed
        raise UserError(str(error)) from error
