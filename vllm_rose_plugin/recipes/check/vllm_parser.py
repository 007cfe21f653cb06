"""Ask one or more vLLM versions about every process of some recipes, and turn their answers into findings."""

import difflib
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm_rose_plugin.recipes.check.environment import place_of
from vllm_rose_plugin.recipes.deployment import Process, flag_words
from vllm_rose_plugin.recipes.finding import Finding, Keys
from vllm_rose_plugin.recipes.hardware import GPUS
from vllm_rose_plugin.recipes.schema import Recipe

_SECONDS = 600.0
_MODULE = "vllm_rose_plugin.recipes.check.vllm_child"
QUANTIZATION: dict[str, dict[str, Any]] = {
    "mxfp8": {"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": ["lm_head", "*.mlp.gate"]},
    "nvfp4": {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "kv_cache_scheme": None,
        "group_size": 16,
        "ignore": ["lm_head", "*.mlp.gate"],
    },
    "fp8": {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]},
}
"""What the served checkpoint's config.json says about its weights, by ``weights`` or ``expert_weights``."""


_NEEDED = ("hidden_size", "num_attention_heads", "num_key_value_heads", "vocab_size", "max_position_embeddings")
"""Of every model, for vLLM and for :func:`draft_config`."""


class VllmMissingError(RuntimeError):
    """A vLLM could not be asked; the message names it and how the process ended."""


@dataclass(frozen=True)
class Answer:
    """What one vLLM said."""

    version: str
    flags: frozenset[str]
    environment_variables: frozenset[str]
    connector_keys: frozenset[str]
    """What ``kv_transfer.extra_config`` may hold."""
    processes: list[dict[str, Any]]
    """In the order in which they were asked about: ``faults``, ``environment`` and, without faults, ``config``."""


def ask(
    recipes: Sequence[tuple[Recipe, Sequence[Process]]], *, sources: Sequence[Path | None] = (None,)
) -> list[Answer]:
    """One answer per vLLM: the installed one for None, else the unpacked wheel in that folder.

    Raises:
        VllmMissingError: a vLLM can't be imported, or its process crashed.
    """
    request = _request(recipes)
    with ThreadPoolExecutor() as pool:  # its threads only wait for children
        return list(pool.map(lambda source: _ask_one(request, source), sources))


def _request(recipes: Sequence[tuple[Recipe, Sequence[Process]]]) -> str:
    models: dict[str, dict[str, Any]] = {}
    asked = []
    for recipe, processes in recipes:
        config = model_config(recipe)
        weights = recipe.model.expert_weights or recipe.model.weights
        name = f"{recipe.model.config}-{weights}"
        models[name] = config | ({"quantization_config": QUANTIZATION[weights]} if weights in QUANTIZATION else {})
        draft = f"{recipe.model.config}-draft"
        models[draft] = draft_config(config)
        for process in processes:
            speculative = process.flags.get("speculative-config")
            eagle = isinstance(speculative, dict) and str(speculative.get("method", "")).startswith("eagle")
            asked.append(
                {
                    "flags": {flag: flag_words({flag: value}) for flag, value in process.flags.items()},
                    "environment": process.environment,
                    "model": name,
                    "draft": draft if eagle else None,
                    "gpu": _gpu(recipe),
                }
            )
    return json.dumps({"models": models, "processes": asked})


def model_config(recipe: Recipe) -> dict[str, Any]:
    """The facts of the model's config.json.

    Raises:
        OSError, ValueError: no such file, or no JSON object.
    """
    config = json.loads(recipe.model_config_path().read_text(encoding="utf-8"))
    if not isinstance(config, dict):
        raise ValueError("is no JSON object")
    config.pop("_source", None)
    text = config.get("text_config", config)
    missing = [key for key in _NEEDED if not isinstance(text, dict) or not text.get(key)]
    if missing:
        raise ValueError(f"has no {', '.join(missing)}")
    return config


def draft_config(config: dict[str, Any]) -> dict[str, Any]:
    """An EAGLE3 head for a model: one Llama layer of the target's width, the form of the public ones.

    The head's own config.json isn't known here, so the check holds for its form, not for its sizes.
    """
    target = config.get("text_config", config)
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target["hidden_size"],
        "intermediate_size": 4 * target["hidden_size"],
        "num_attention_heads": target["num_attention_heads"],
        "num_key_value_heads": target["num_key_value_heads"],
        "head_dim": target.get("head_dim", 128),
        "num_hidden_layers": 1,
        "max_position_embeddings": target["max_position_embeddings"],
        "vocab_size": target["vocab_size"],
        "draft_vocab_size": 32000,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "dtype": "bfloat16",
    }


def _gpu(recipe: Recipe) -> dict[str, Any]:
    gpu = GPUS[recipe.hardware.gpu]
    return {
        "name": gpu.name,
        "capability": gpu.compute_capability,
        "memory_bytes": gpu.memory_bytes,
        "gpus": recipe.hardware.gpus_per_node,
    }


def _ask_one(request: str, source: Path | None) -> Answer:
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("ROSE_", "VLLM_"))}
    environment = kept | {"VLLM_LOGGING_LEVEL": "ERROR", "VLLM_TARGET_DEVICE": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    if source is not None:
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(source), kept.get("PYTHONPATH")]))
    which = f"the vLLM in {source}" if source else "the installed vLLM"
    try:
        done = subprocess.run(
            [sys.executable, "-m", _MODULE],
            env=environment,
            input=request,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
        )
    except subprocess.TimeoutExpired as error:
        problem = f"{which} gave no answer in {_SECONDS:g} s; check fewer recipes at once, or when the machine is idle"
        raise VllmMissingError(problem) from error
    if done.returncode:
        last = next((line for line in reversed(done.stderr.splitlines()) if line.strip()), "no message")
        raise VllmMissingError(f"{which} can't be asked (exit code {done.returncode}): {last.strip()}")
    answer = json.loads(done.stdout)
    return Answer(
        version=answer["version"],
        flags=frozenset(answer["flags"]),
        environment_variables=frozenset(answer["environment_variables"]),
        connector_keys=frozenset(answer["connector_keys"]),
        processes=answer["processes"],
    )


def check_answer(recipe: Recipe, process: Process, answer: Answer, said: dict[str, Any]) -> list[Finding]:
    """Findings of one process: flags, their values, and the configuration as a whole."""
    findings = []
    for fault in said["faults"]:
        flag, kind = fault["flag"], fault["kind"]
        keys = process.flag_source.get(flag, ("roles", process.role, "args"))
        value = process.flags.get(flag)
        if kind == "unknown" and value is False and flag in answer.flags:
            problem = f"--{flag} takes a value: there is no --no-{flag} in vLLM {answer.version}"
            findings.append(recipe.finding(keys, value, problem, "a value of this flag", "give one, or remove it"))
        elif kind == "unknown":
            near = difflib.get_close_matches(flag, answer.flags, n=3)
            cure = f"write {' or '.join(near)}" if near else "remove it, or look it up in `vllm serve --help=all`"
            legal = f"the flags of vLLM {answer.version}"
            findings.append(recipe.finding(keys, value, f"--{flag} is no flag of vLLM {answer.version}", legal, cure))
        elif kind == "value":
            legal = fault["message"]
            problem = f"is refused by vLLM {answer.version}"
            findings.append(recipe.finding(keys, value, problem, legal, "give a value that its parser takes"))
        else:
            keys, value = _named(fault["message"], recipe, process)
            problem = f"vLLM {answer.version} can't build the configuration of this role"
            findings.append(recipe.finding(keys, value, problem, fault["message"], "do as vLLM's message says"))
    if "config" in said:
        findings += _overlooked(recipe, process, answer, said["config"])
    return findings


def _overlooked(recipe: Recipe, process: Process, answer: Answer, config: dict[str, Any]) -> Iterator[Finding]:
    """A ``quantization`` that isn't the checkpoint's: of a ModelOpt checkpoint vLLM takes the latter without a word."""
    given, taken = process.flags.get("quantization"), config["quantization"]
    stated = QUANTIZATION.get(recipe.model.expert_weights or recipe.model.weights, {}).get("quant_method")
    if given is not None and given not in (taken, stated):
        keys = process.flag_source["quantization"]
        problem = f"is overlooked by vLLM {answer.version} in favour of {taken}, by the checkpoint's config.json"
        yield recipe.finding(keys, given, problem, f"{taken}, or no such flag", "remove it, or name another checkpoint")


def check_extra_config(recipe: Recipe, answer: Answer) -> Iterator[Finding]:
    """Keys that vLLM's connector never asks for: it takes any key, and a misspelled one has no effect."""
    for key, value in (recipe.kv_transfer.extra_config if recipe.kv_transfer else {}).items():
        if key not in answer.connector_keys:
            near = difflib.get_close_matches(key, answer.connector_keys, n=1)
            problem = f"NixlConnector of vLLM {answer.version} asks for no {key}"
            legal, cure = ", ".join(sorted(answer.connector_keys)), f"write {near[0]}" if near else "remove it"
            yield recipe.finding(("kv_transfer", "extra_config", key), value, problem, legal, cure)


def _named(message: str, recipe: Recipe, process: Process) -> tuple[Keys, object]:
    """The variable or flag of this process that a message talks about, else all of its args."""
    for name, given in process.environment.items():
        if re.search(rf"\b{name}\b", message):
            return place_of(recipe, process, name), given
    words = set(re.findall(r"[a-z0-9]+(?:-[a-z0-9]+)+|(?<=--)[a-z]+", message.replace("_", "-")))
    named = [flag for flag in process.flags if flag in words]
    if not named:
        return ("roles", process.role, "args"), None
    flag = max(named, key=len)
    return process.flag_source[flag], process.flags[flag]
