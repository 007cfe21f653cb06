"""Converts a checkpoint to MXFP8, serves it through the plugin, asks one question and shows what answered it.

`make serve` runs it: with `--check` by any Python and before the install, then by the one of .venv.
"""

import argparse
import json
import os
import re
import shlex
import signal
import sys
import time
from pathlib import Path
from typing import Any

from checkpoint_cache import ROOT, checkpoint_error, held, quantized
from server import ProgressLine, ServeError, Server, open_local, port_error, say

HOST = "127.0.0.1"
READY_SECONDS = 900.0
MAX_MODEL_LEN = 2048
MODEL_NAME = "rose-example"
DRAFT_TOKENS = 3
"""Speculative tokens of MTP=…; SERVE_ARGS can hold a --speculative-config of its own instead."""
EXPERTS_CLASS = "RoseCuteDslExperts"
LINEAR_CLASS = "RoseCuteDslMxfp8LinearKernel"


def main() -> int:
    """Exit code 0: answered by our kernels, nothing left running. 1: anything else, with one clear line."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--port", default="8000")
    parser.add_argument("--check", action="store_true", help="only check the other arguments")
    parser.add_argument("--once", default="0", help="1 stops after the answer")
    parser.add_argument("--model", type=Path, default=ROOT / "examples/tiny_moe/target", help="a BF16 checkpoint")
    parser.add_argument("--mtp", default="0", help="1 drafts with the folder mtp beside the model; or a directory")
    parser.add_argument("--question", default="What is the functools module?")
    parser.add_argument("--vllm-args", default="", metavar="ARGS", help="more arguments for vllm serve")
    args = parser.parse_args()
    # A terminated script must end its server too; SIGINT raises KeyboardInterrupt by itself.
    signal.signal(signal.SIGTERM, _interrupt)
    signal.signal(signal.SIGHUP, _interrupt)
    try:
        check(args)
        if not args.check:
            serve(args)
    except (ServeError, OSError) as error:
        print(f"serve: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nserve: interrupted", file=sys.stderr)
        return 130
    return 0


def check(args: argparse.Namespace) -> None:
    """Every argument that can be wrong, in the words of make, before anything slow begins.

    Raises:
        ServeError: the value, what is legal and the variable to set.
    """
    # str.isdigit takes digits that int doesn't.
    if not re.fullmatch("[0-9]{1,5}", args.port):
        raise ServeError(f"port {args.port!r} is not a number from 1 to 65535; choose one with PORT=…")
    if problem := port_error(host=HOST, port=int(args.port)):
        raise ServeError(problem)
    if args.once not in ("", "0", "1"):
        raise ServeError(f"ONCE={args.once} is neither 1 (stop after the answer) nor 0 (keep serving)")
    try:
        shlex.split(args.vllm_args)
    except ValueError as error:
        raise ServeError(f"SERVE_ARGS={args.vllm_args} can't be split into arguments: {error}") from error
    if problem := checkpoint_error(args.model):
        raise ServeError(problem)
    speculation(args)


def speculation(args: argparse.Namespace) -> dict[str, Any] | None:
    """vLLM's --speculative-config for the MTP draft to serve with, or None.

    Raises:
        ServeError: there is none where it should be.
    """
    if args.mtp in ("", "0"):
        return None
    config = {"method": "mtp", "num_speculative_tokens": DRAFT_TOKENS}
    if args.mtp == "1" and json.loads((args.model / "config.json").read_text()).get("num_nextn_predict_layers"):
        return config  # attached to the checkpoint
    draft = args.model.resolve().parent / "mtp" if args.mtp == "1" else Path(args.mtp)
    if not (draft / "config.json").is_file():
        raise ServeError(f"MTP={args.mtp}: {draft} is no draft directory (no config.json); choose one with MTP=…")
    return {**config, "model": str(draft.resolve())}


def serve(args: argparse.Namespace) -> None:
    """Convert, start, ask, report, and keep serving unless ``--once 1``.

    Raises:
        ServeError: anything failed, or another run of this tree has the port, and so the log.
    """
    build = ROOT / "build"
    build.mkdir(exist_ok=True)

    def refuse() -> None:
        raise ServeError(f"port {args.port} is taken by another make serve of this tree; choose another with PORT=…")

    with held(build / f"serve-{int(args.port)}.lock", otherwise=refuse):
        serve_checkpoint(args, quantized(args.model, build), build)


def serve_checkpoint(args: argparse.Namespace, checkpoint: Path, build: Path) -> None:
    """The same, converted."""
    url = f"http://{HOST}:{args.port}"
    server = Server(
        command=serve_command(args, checkpoint), environment=serve_environment(), log=build / f"serve-{args.port}.log"
    )
    try:
        say(f"vllm serve {os.path.relpath(checkpoint, ROOT)} on {url}, log in {server.log.relative_to(ROOT)}")
        progress = ProgressLine()
        try:
            waited = server.wait_ready(url=f"{url}/health", timeout=READY_SECONDS, progress=progress)
        finally:
            progress.clear()
        say(f"ready after {waited:.0f} s")
        ask(url, args.question)
        check_stats(get_json(f"{url}/rose/stats"))
        if speculation(args):
            check_drafting(f"{url}/metrics")
        if args.once != "1":
            keep_serving(server, url)
    finally:
        # A second Ctrl-C must not leave half of the processes behind.
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        server.stop()
        say("stopped, no process left")


def serve_command(args: argparse.Namespace, checkpoint: Path) -> list[str]:
    """`vllm serve` with our two backends."""
    positions = json.loads((checkpoint / "config.json").read_text()).get("max_position_embeddings", MAX_MODEL_LEN)
    command = [str(Path(sys.executable).with_name("vllm")), "serve", str(checkpoint)]
    command += ["--served-model-name", MODEL_NAME, "--host", HOST, "--port", args.port]
    command += ["--moe-backend", "rose_cutedsl", "--linear-backend", "rose_cutedsl"]
    command += ["--max-model-len", str(min(MAX_MODEL_LEN, positions))]
    # Starts in half the time and needs no C++ compiler; SERVE_ARGS=--no-enforce-eager turns torch.compile on.
    command.append("--enforce-eager")
    if config := speculation(args):
        command += ["--speculative-config", json.dumps(config)]
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

    # trust_env=False: a proxy of the environment can't reach this machine's 127.0.0.1.
    local = openai.DefaultHttpxClient(trust_env=False)
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=300, max_retries=0, http_client=local) as client:
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


def check_drafting(url: str) -> None:
    """Print how many drafted tokens the target accepted.

    Raises:
        ServeError: none was drafted.
    """
    try:
        with open_local(url, timeout=60) as answer:
            text = answer.read().decode()
    except (OSError, ValueError) as error:
        raise ServeError(f"{url} can't be read: {error}") from error
    counts = []
    for name in ("draft_tokens", "accepted_tokens"):
        values = re.findall(rf"^vllm:spec_decode_num_{name}_total(?:{{.*}})? (\S+)$", text, re.MULTILINE)
        counts.append(round(sum(map(float, values))))
    drafted, accepted = counts
    if not drafted:
        raise ServeError("MTP was asked for, and not one token was drafted")
    say(f"MTP: {accepted} of {drafted} drafted tokens accepted ({accepted / drafted:.0%})")


def get_json(url: str) -> dict[str, Any]:
    """The JSON at ``url``."""
    try:
        with open_local(url, timeout=60) as answer:
            return json.load(answer)
    except (OSError, ValueError) as error:
        raise ServeError(f"{url} did not answer with JSON: {error}") from error


def keep_serving(server: Server, url: str) -> None:
    """Until Ctrl-C, which is a good end; a server that dies by itself is not."""
    say(f"serving {MODEL_NAME} on {url}/v1 until Ctrl-C; try")
    body = json.dumps({"model": MODEL_NAME, "messages": [{"role": "user", "content": "What is a decorator?"}]})
    print(f"  curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{body}'\n  curl {url}/rose/stats")
    try:
        while (code := server.exit_code()) is None:
            time.sleep(0.5)
    except KeyboardInterrupt:
        print()
        return
    raise ServeError(f"the server ended by itself with exit code {code}; log: {server.log}")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    sys.exit(main())
