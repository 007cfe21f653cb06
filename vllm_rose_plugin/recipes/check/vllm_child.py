"""One vLLM's own word on command lines: its parser, its configuration, its list of environment variables.

Runs in a process of its own, so that two versions can be asked and none is changed for the caller. Reads a JSON object
from stdin, {"models": {name: config.json}, "processes": [...]} as :mod:`.vllm_parser` writes it, prints one to stdout.
"""

import contextlib
import json
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_FLAG = re.compile(r"argument (?:-[a-z]+/|-[a-z]+, ?)*(--[a-z0-9-]+)")


class _Refused(Exception):
    """What the parser would have ended the process with."""


def _refuse(message: str) -> None:
    raise _Refused(message)


def main() -> None:
    """Answer the request on stdin."""
    request = json.load(sys.stdin)
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # vLLM and its imports print lines of their own
    with tempfile.TemporaryDirectory() as folder:
        # A model's class is looked at under the stand-in: nothing of that may stay in vLLM's cache.
        os.environ.update(VLLM_CACHE_ROOT=folder, HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
        answer = _answer(request, Path(folder))
    json.dump(answer, out)
    out.close()


def _answer(request: dict[str, Any], folder: Path) -> dict[str, Any]:
    from vllm_rose_plugin.seams.cuda_stand_in import stand_in

    platform = stand_in()
    import vllm
    from vllm import envs
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    command = cmd_init()[0]
    parser = command.subparser_init(FlexibleArgumentParser().add_subparsers())
    parser.error = _refuse  # type: ignore[method-assign,assignment]
    known = sorted(flag.removeprefix("--") for flag in parser._option_string_actions if flag.startswith("--"))
    for name, config in request["models"].items():
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
    processes = []
    for process in request["processes"]:
        gpu = process["gpu"]
        platform.gpu_name, platform.capability = gpu["name"], tuple(gpu["capability"])
        platform.memory_bytes, platform.gpus = gpu["memory_bytes"], gpu["gpus"]
        with _environment(process["environment"]):
            processes.append(
                {"environment": _wrong_values(process["environment"], envs.environment_variables)}
                | _one(process, parser, command, known, folder)
            )
    return {
        "version": vllm.__version__,
        "flags": known,
        "environment_variables": sorted(envs.environment_variables),
        "connector_keys": _connector_keys(),
        "processes": processes,
    }


def _connector_keys() -> list[str]:
    """The keys of ``kv_connector_extra_config`` that NixlConnector asks for; vLLM has no list of them but its code."""
    from vllm.distributed.kv_transfer.kv_connector.v1 import nixl

    files = (file for folder in nixl.__path__ for file in Path(folder).glob("*.py"))
    asked = (re.findall(r'get_from_extra_config\(\s*"(\w+)"', file.read_text(encoding="utf-8")) for file in files)
    return sorted({key for keys in asked for key in keys})


def _one(process: dict[str, Any], parser: Any, command: Any, known: list[str], folder: Path) -> dict[str, Any]:
    """What is wrong with one command line, and the resolved configuration where nothing is."""
    words: dict[str, list[str]] = process["flags"]
    faults = [
        {"flag": flag, "kind": "unknown"} for flag, given in words.items() if given[0].removeprefix("--") not in known
    ]
    left = {flag: given for flag, given in words.items() if given[0].removeprefix("--") in known}
    while True:
        line = [str(folder / process["model"]), *(word for given in left.values() for word in given)]
        try:
            args = parser.parse_args(line)
            break
        except Exception as error:  # _Refused, and what vLLM's parser stumbles over itself
            found = _FLAG.search(str(error))
            flag = found.group(1).removeprefix("--") if found else _stumbles_over(parser, left)
            said = _plain(error)
            if not isinstance(error, _Refused):
                said = f"a value that vLLM's parser gets through, it ended with {type(error).__name__}: {said}"
            faults.append({"flag": flag, "kind": "value", "message": said})
            if flag.removeprefix("no-") not in left and flag not in left:
                return {"faults": faults}
            left.pop(flag, None)
        except SystemExit:  # --help
            said = "`vllm serve` prints something and ends"
            return {"faults": [*faults, {"flag": "help" if "help" in left else "", "kind": "value", "message": said}]}
    if faults:
        return {"faults": faults}
    try:
        args.model = str(folder / process["model"])
        args.model_tag = None
        args.skip_tokenizer_init = True  # the shapes are here, the tokenizer is not
        if isinstance(args.speculative_config, dict) and process.get("draft"):
            args.speculative_config["model"] = str(folder / process["draft"])
        command.validate(args)
        return {"faults": [], "config": _config(args)}
    except Exception as error:
        # The folder has another name in each process, and the reader doesn't know it.
        message = _plain(error).replace(f"{folder / process['model']}", "the model")
        return {"faults": [{"flag": "", "kind": "config", "message": message}]}


def _stumbles_over(parser: Any, words: dict[str, list[str]]) -> str:
    """The flag that the parser refuses alone too, for messages that name none; empty where it takes each."""
    for flag, given in words.items():
        try:
            parser.parse_args(["model", *given])
        except (Exception, SystemExit):
            return flag
    return ""


def _config(args: Any) -> dict[str, Any]:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    engine_args = AsyncEngineArgs.from_cli_args(args)
    config = engine_args.create_engine_config(UsageContext.OPENAI_API_SERVER, headless=bool(args.headless))
    facts = {
        "block_size": config.cache_config.block_size,
        "cache_dtype": str(config.cache_config.cache_dtype),
        "gpu_memory_utilization": config.cache_config.gpu_memory_utilization,
        "kv_cache_memory_bytes": config.cache_config.kv_cache_memory_bytes,
        "num_gpu_blocks_override": config.cache_config.num_gpu_blocks_override,
        "max_num_batched_tokens": config.scheduler_config.max_num_batched_tokens,
        "max_num_seqs": config.scheduler_config.max_num_seqs,
        "max_model_len": config.model_config.max_model_len,
        "enforce_eager": config.model_config.enforce_eager,
        "quantization": config.model_config.quantization,
        "kv_heads": config.model_config.get_total_num_kv_heads(),
        "mamba_cache_dtype": str(config.cache_config.mamba_cache_dtype),
        "mamba_ssm_cache_dtype": str(config.cache_config.mamba_ssm_cache_dtype),
    }
    if config.kv_transfer_config is not None:
        from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import compute_nixl_compatibility_hash

        # Both roles are asked with one name, so the hash differs only where the roles do.
        facts["nixl"] = compute_nixl_compatibility_hash(config, attn_backend_name="any")
    return facts


def _wrong_values(environment: dict[str, str], variables: dict[str, Any]) -> dict[str, str]:
    """Of those that vLLM knows, the ones whose value it refuses, with its message."""
    faults = {}
    for name in environment:
        try:
            if name in variables:
                variables[name]()
        except Exception as error:
            faults[name] = str(error)
    return faults


def _plain(error: Exception) -> str:
    """A pydantic error without its tail of types and links."""
    text = str(error)
    found = re.search(r"(?:Value error|Assertion failed), (.*?)(?: \[type=|$)", text, re.DOTALL)
    return " ".join((found.group(1) if found else text or type(error).__name__).split())


@contextlib.contextmanager
def _environment(values: dict[str, str]) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.update(values)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


if __name__ == "__main__":
    main()
