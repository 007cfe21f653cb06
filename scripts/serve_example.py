"""Converts a checkpoint to MXFP8, serves it through the plugin, asks one question and shows what answered it.

`make serve` runs it: with `--check-port` by any Python, otherwise by the one of .venv.
"""

import argparse
import hashlib
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

from server import ProgressLine, ServeError, Server, port_error

ROOT = Path(__file__).resolve().parent.parent
HOST = "127.0.0.1"
READY_SECONDS = 900.0
MAX_MODEL_LEN = 2048
EXPERTS_CLASS = "RoseCuteDslExperts"
LINEAR_CLASS = "RoseCuteDslMxfp8LinearKernel"


def main() -> int:
    """Exit code 0: answered by our kernels, nothing left running. 1: anything else, with one clear line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--port", default="8000")
    parser.add_argument("--check-port", action="store_true", help="only say whether the port is free")
    parser.add_argument("--once", default="0", choices=["", "0", "1"], help="1 stops after the answer")
    parser.add_argument("--model", type=Path, default=ROOT / "examples/tiny_moe/target", help="a BF16 checkpoint")
    parser.add_argument("--question", default="What is the functools module?")
    parser.add_argument("--vllm-args", default="", metavar="ARGS", help="more arguments for vllm serve")
    args = parser.parse_args()
    # A terminated script must end its server too; SIGINT raises KeyboardInterrupt by itself.
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    try:
        if not args.port.isdigit():
            raise ServeError(f"port {args.port!r} is not a number; choose one with PORT=…")
        if problem := port_error(host=HOST, port=int(args.port)):
            raise ServeError(problem)
        if not args.check_port:
            serve(args)
    except ServeError as error:
        print(f"serve: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nserve: interrupted", file=sys.stderr)
        return 130
    return 0


def serve(args: argparse.Namespace) -> None:
    """Convert, start, ask, report, and keep serving unless ``--once 1``."""
    build = ROOT / "build"
    build.mkdir(exist_ok=True)
    checkpoint = quantized(args.model, build)
    url = f"http://{HOST}:{args.port}"
    server = Server(
        command=serve_command(args, checkpoint), environment=serve_environment(), log=build / f"serve-{args.port}.log"
    )
    try:
        say(f"vllm serve {checkpoint.relative_to(ROOT)} on {url}, log in {server.log.relative_to(ROOT)}")
        progress = ProgressLine()
        try:
            waited = server.wait_ready(url=f"{url}/health", timeout=READY_SECONDS, progress=progress)
        finally:
            progress.clear()
        say(f"ready after {waited:.0f} s")
        ask(url, args.question)
        check_stats(get_json(f"{url}/rose/stats"))
        if args.once != "1":
            keep_serving(server, url)
    finally:
        # A second Ctrl-C must not leave half of the processes behind.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        server.stop()
        say("stopped, no process left")


def quantized(source: Path, build: Path) -> Path:
    """The MXFP8 checkpoint of ``source`` in ``build``; made only where it is missing or older than its source."""
    source = source.resolve()
    if not (source / "config.json").is_file():
        raise ServeError(f"{source} is no checkpoint (it has no config.json); choose one with MODEL=…")
    name = f"{source.parent.name}-{source.name}"
    destination, stamp = build / f"{name}-mxfp8", build / f"{name}-mxfp8.made-from"
    state = fingerprint(source)
    if destination.is_dir() and stamp.is_file() and stamp.read_text() == state:
        say(f"{destination.relative_to(ROOT)} is up to date")
        return destination
    stamp.unlink(missing_ok=True)
    for leftover in build.glob(f"{name}-mxfp8*"):
        shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    command = [str(Path(sys.executable).with_name("rose")), "quantize", str(source), str(destination)]
    if (code := subprocess.run(command).returncode) != 0:
        raise ServeError(f"rose quantize ended with exit code {code}")
    stamp.write_text(state)
    return destination


def fingerprint(source: Path) -> str:
    """Changes when a file of the checkpoint or the converter does."""
    digest = hashlib.sha256()
    for file in sorted(p for p in source.iterdir() if p.is_file()):
        digest.update(f"{file} {file.stat().st_size} {file.stat().st_mtime_ns}\n".encode())
    package = ROOT / "vllm_rose_plugin"
    for file in sorted([*(package / "checkpoint").glob("*.py"), *(package / "kernels/mxfp8_quantize").glob("*.py")]):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def serve_command(args: argparse.Namespace, checkpoint: Path) -> list[str]:
    """`vllm serve` with our two backends."""
    positions = json.loads((checkpoint / "config.json").read_text()).get("max_position_embeddings", MAX_MODEL_LEN)
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(checkpoint)]
    command += ["--served-model-name", "rose-example", "--host", HOST, "--port", args.port]
    command += ["--moe-backend", "rose_cutedsl", "--linear-backend", "rose_cutedsl"]
    command += ["--max-model-len", str(min(MAX_MODEL_LEN, positions))]
    # Starts in half the time and needs no C++ compiler; SERVE_ARGS=--no-enforce-eager turns torch.compile on.
    command.append("--enforce-eager")
    return command + shlex.split(args.vllm_args)


def serve_environment() -> dict[str, str]:
    """The environment of `vllm serve`: ours, offline, and small enough for a laptop unless it says otherwise."""
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **os.environ}
    # VLLM_PLUGINS names us because vLLM loads an endpoint plugin (GET /rose/stats) only by name.
    environment |= {"VLLM_PLUGINS": "rose", "VLLM_NO_USAGE_STATS": "1"}
    return environment | {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}


def ask(url: str, question: str) -> None:
    """One chat completion through the OpenAI client, printed."""
    import openai

    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0) as client:
        start = time.monotonic()
        try:
            answer = client.chat.completions.create(
                model=client.models.list().data[0].id,
                messages=[{"role": "user", "content": question}],
                max_completion_tokens=128,
                temperature=0,
            )
        except openai.OpenAIError as error:
            raise ServeError(f"the chat completion failed: {error}") from error
    tokens = answer.usage.completion_tokens if answer.usage else 0
    print(f"\nQ: {question}\nA: {answer.choices[0].message.content}\n", flush=True)
    say(f"{tokens} tokens in {time.monotonic() - start:.1f} s")


def check_stats(stats: dict[str, Any]) -> None:
    """Print what the workers say they ran.

    Raises:
        ServeError: a worker has another class for its experts or linears, or ours was not called.
    """
    if not stats["workers"]:
        raise ServeError("/rose/stats names no worker")
    for worker in stats["workers"]:
        say(f"worker {worker['rank']} (pid {worker['pid']}), vllm_rose_plugin {worker['plugin_version']}")
        for kind, expected in (("experts", EXPERTS_CLASS), ("linear", LINEAR_CLASS)):
            classes = worker["layers"].get(kind, {})
            say(f"  {kind}: " + (", ".join(f"{name} in {count} layers" for name, count in classes.items()) or "none"))
            if set(classes) != {expected}:
                raise ServeError(f"worker {worker['rank']} serves {kind} with {sorted(classes)}, not with {expected}")
        for kernel, providers in worker["calls"].items():
            say(f"  {kernel}: " + ", ".join(f"{count} calls of {provider}" for provider, count in providers.items()))
        for kernel in ("grouped_gemm", "mxfp8_linear"):
            if not sum(worker["calls"].get(kernel, {}).values()):
                raise ServeError(f"worker {worker['rank']} answered without one call of {kernel}")


def get_json(url: str) -> dict[str, Any]:
    """The JSON at ``url``."""
    try:
        with urllib.request.urlopen(url, timeout=60) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        raise ServeError(f"{url} did not answer with JSON: {error}") from error


def keep_serving(server: Server, url: str) -> None:
    """Until Ctrl-C, which is a good end; a server that dies by itself is not."""
    say(f"serving on {url}/v1 until Ctrl-C")
    try:
        while (code := server.exit_code()) is None:
            time.sleep(0.5)
    except KeyboardInterrupt:
        print()
        return
    raise ServeError(f"the server ended by itself with exit code {code}; log: {server.log}")


def say(text: str) -> None:
    """One line of progress."""
    print(f"serve: {text}", flush=True)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
