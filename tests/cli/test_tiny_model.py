"""`rose tiny-model` against transformers, safetensors and its own command line."""

import argparse
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from vllm_rose_plugin.cli import UserError, tiny_model

SMALL = ["--layers", "2", "--experts", "4", "--hidden-size", "64", "--moe-intermediate-size", "32", "--head-dim", "32"]
SMALL += ["--vocab-size", "1000"]


def make(directory: Path, *arguments: str) -> Path:
    parser = argparse.ArgumentParser()
    tiny_model.add_arguments(parser)
    assert tiny_model.run(parser.parse_args([str(directory), *SMALL, *arguments])) == 0
    return directory


def load_all(directory: Path) -> dict[str, torch.Tensor]:
    tensors = {}
    for file in directory.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 (no iterator)
    return tensors


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["--tie-embeddings", "--dtype", "float32"],
        ["--attention-bias", "--no-norm-topk-prob", "--dtype", "float16"],
        ["--layers", "1", "--experts", "3", "--top-k", "3", "--heads", "6", "--kv-heads", "2", "--shard-size", "20KB"],
        ["--hidden-size", "40", "--moe-intermediate-size", "24", "--head-dim", "14", "--vocab-size", "259"],
    ],
)
def test_transformers_loads_every_tensor_and_no_other(tmp_path: Path, arguments: list[str]) -> None:
    directory = make(tmp_path / "model", *arguments)
    model, report = AutoModelForCausalLM.from_pretrained(directory, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"] and not report["mismatched_keys"]
    config = json.loads((directory / "config.json").read_text())
    assert model.config.norm_topk_prob == ("--no-norm-topk-prob" not in arguments)
    assert model.dtype == getattr(torch, config["dtype"])
    with torch.no_grad():
        logits = model.float()(torch.arange(7)[None]).logits  # (1, 7, vocab)
    assert logits.shape == (1, 7, config["vocab_size"])
    assert 0.2 < logits.std() < 5


def test_values_have_the_deviation_of_their_kind(tmp_path: Path) -> None:
    tensors = load_all(make(tmp_path / "model", "--attention-bias", "--dtype", "float32"))
    up = tensors["model.layers.1.mlp.experts.3.up_proj.weight"]
    assert up.shape == (32, 64) and abs(up.std() * 64**0.5 - 1) < 0.1
    assert not torch.equal(up, tensors["model.layers.1.mlp.experts.2.up_proj.weight"])
    assert (tensors["model.norm.weight"] == 1).all()
    assert (tensors["model.layers.0.self_attn.o_proj.bias"] == 0).all()
    assert tensors["model.layers.0.self_attn.q_proj.bias"].std() > 0.01


def test_shards_change_nothing_but_the_files(tmp_path: Path) -> None:
    whole, cut = make(tmp_path / "whole"), make(tmp_path / "cut", "--shard-size", "50KB")
    index = json.loads((cut / "model.safetensors.index.json").read_text())
    files = sorted(file.name for file in cut.glob("*.safetensors"))
    assert len(files) > 2 and sorted(set(index["weight_map"].values())) == files
    one, many = load_all(whole), load_all(cut)
    assert one.keys() == many.keys() == index["weight_map"].keys()
    assert all(torch.equal(one[name], many[name]) for name in one)
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in many.values())
    largest = max(t.nbytes for t in many.values())
    assert all((cut / file).stat().st_size < max(50_000, largest) + 10_000 for file in files)


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    first, second, other = make(tmp_path / "a"), make(tmp_path / "b"), make(tmp_path / "c", "--seed", "1")
    for file in first.iterdir():
        assert file.read_bytes() == (second / file.name).read_bytes()
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


@pytest.mark.parametrize("vocab_size", [259, 260, 1000, 25_000])
def test_tokenizer_is_full_and_reversible(tmp_path: Path, vocab_size: int) -> None:
    tokenizer = AutoTokenizer.from_pretrained(make(tmp_path / "model", "--vocab-size", str(vocab_size)))
    assert len(tokenizer) == vocab_size
    assert all(isinstance(tokenizer.decode([index]), str) for index in range(vocab_size))
    for text in ("What is the functools module?", " Größe: 2 ÷ 3 🙂\n\tend  ", "<|im_start|>user\nhi<|im_end|>"):
        assert tokenizer.decode(tokenizer.encode(text)) == text
    messages = [{"role": "user", "content": "hi"}]
    chat = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer.encode(chat)[0] == 1 and tokenizer.eos_token_id == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", "0"], "--layers 0 is below 1"),
        (["--moe-intermediate-size", "-4"], "--moe-intermediate-size -4 is below 1"),
        (["--top-k", "5"], "--top-k 5 is above --experts 4"),
        (["--heads", "4", "--kv-heads", "3"], "--heads 4 is not a multiple of --kv-heads 3"),
        (["--head-dim", "33"], "--head-dim 33 is odd"),
        (["--vocab-size", "258"], "--vocab-size 258 is outside 259"),
        (["--vocab-size", "99999999"], "--vocab-size 99999999 is outside"),
        (["--shard-size", "12"], "--shard-size '12' is no size"),
        (["--shard-size", "0MB"], "--shard-size '0MB' is no size"),
        (["--hidden-size", "8000000", "--moe-intermediate-size", "8000000"], "GB are free"),
    ],
)
def test_bad_input_is_one_clear_line_and_leaves_nothing(tmp_path: Path, arguments: list[str], message: str) -> None:
    with pytest.raises(UserError) as caught:
        make(tmp_path / "model", *arguments)
    assert message in str(caught.value) and "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_an_existing_directory_is_kept(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="exists; choose another DIR"):
        make(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failure_half_way_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tiny_model, "_write_tokenizer", full)
    with pytest.raises(UserError, match="No space left on device"):
        make(tmp_path / "model")
    assert list(tmp_path.iterdir()) == []


def test_memory_does_not_grow_with_the_model(tmp_path: Path) -> None:
    code = "import sys; from vllm_rose_plugin.cli.tiny_model import *; p = argparse.ArgumentParser(); add_arguments(p);"
    code += "import torch, tokenizers, resource; before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss;"
    code += "run(p.parse_args(sys.argv[1:])); print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)"
    command = [sys.executable, "-c", code, str(tmp_path / "model"), "--hidden-size", "2048", "--experts", "16"]
    command += ["--moe-intermediate-size", "1024", "--layers", "2", "--shard-size", "100MB"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    written = sum(file.stat().st_size for file in (tmp_path / "model").glob("*.safetensors"))
    assert written > 400e6
    assert int(printed[-1]) * 1024 < 150e6
