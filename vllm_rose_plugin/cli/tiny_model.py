"""``rose tiny-model``: a random Qwen3-MoE checkpoint of any shape, made without a network."""

import argparse
import hashlib
import json
import math
import re
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from vllm_rose_plugin.cli import UserError

HELP = "make a random Qwen3-MoE checkpoint of any shape, with a tokenizer"

SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
# Three special tokens and the 256 bytes: any text can be written with these.
MIN_VOCAB_SIZE = len(SPECIAL_TOKENS) + 256
# Special tokens, bytes, and every run of two to four letters with or without a space before it.
MAX_VOCAB_SIZE = MIN_VOCAB_SIZE + 27 * (26 + 26**2 + 26**3)
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Elements generated at a time: bounds memory whatever a tensor's size.
CHUNK_ELEMENTS = 4 << 20
DTYPES = {"bfloat16": ("BF16", 2), "float16": ("F16", 2), "float32": ("F32", 4)}
SIZE_UNITS = {"KB": 10**3, "MB": 10**6, "GB": 10**9}


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The model: names and meanings are those of Hugging Face's ``Qwen3MoeConfig``."""

    layers: int
    experts: int
    top_k: int
    hidden_size: int
    moe_intermediate_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab_size: int
    max_position: int
    norm_topk_prob: bool
    tie_embeddings: bool
    attention_bias: bool
    dtype: str


@dataclass(frozen=True, kw_only=True)
class Tensor:
    """One tensor to write: normal with the deviation ``std``, or filled with ``fill`` where ``std`` is 0."""

    name: str
    shape: tuple[int, ...]
    std: float
    fill: float = 0.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Arguments of the command."""
    parser.add_argument("directory", metavar="DIR", type=Path, help="directory to make")
    for flag, default, meaning in (
        ("--layers", 2, "decoder layers, each with experts"),
        ("--experts", 8, "experts of a layer"),
        ("--top-k", 2, "experts of a token"),
        ("--hidden-size", 256, "width of the residual stream"),
        ("--moe-intermediate-size", 128, "inner width of an expert"),
        ("--intermediate-size", 512, "inner width of a dense layer (config.json only: no layer is dense)"),
        ("--heads", 4, "query heads"),
        ("--kv-heads", 2, "key and value heads"),
        ("--head-dim", 64, "width of a head"),
        ("--vocab-size", 4096, f"tokens, {MIN_VOCAB_SIZE} to {MAX_VOCAB_SIZE}"),
        ("--max-position", 2048, "longest sequence"),
    ):
        parser.add_argument(flag, metavar="N", type=int, default=default, help=f"{meaning} (default: %(default)s)")
    boolean = argparse.BooleanOptionalAction
    parser.add_argument("--norm-topk-prob", action=boolean, default=True, help="a token's expert weights add up to 1")
    parser.add_argument("--tie-embeddings", action=boolean, default=False, help="the output head is the embedding")
    parser.add_argument("--attention-bias", action=boolean, default=False, help="attention projections have a bias")
    parser.add_argument("--dtype", choices=tuple(DTYPES), default="bfloat16", help="(default: %(default)s)")
    parser.add_argument("--seed", metavar="N", type=int, default=0, help="(default: %(default)s)")
    parser.add_argument(
        "--shard-size", metavar="SIZE", default="2GB", help="largest file, such as 500MB or 2GB (default: %(default)s)"
    )


def run(args: argparse.Namespace) -> int:
    """Make the checkpoint; DIR appears only when it is complete."""
    shape = Shape(**{name: getattr(args, name) for name in Shape.__dataclass_fields__})
    _check(shape)
    shard_bytes = _parse_size(args.shard_size)
    directory: Path = args.directory
    if directory.exists() or directory.is_symlink():
        raise UserError(f"{directory} exists; choose another DIR or remove it")
    tensors = list(_tensors(shape))
    total = sum(_nbytes(tensor, shape.dtype) for tensor in tensors)
    try:
        directory.parent.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(directory.parent).free) < total:
            raise UserError(f"{directory} needs {total / 1e9:.2f} GB, {free / 1e9:.2f} GB are free")
        partial = Path(tempfile.mkdtemp(prefix=f".{directory.name}.", dir=directory.parent))
        try:
            partial.chmod(0o755)
            shards = _write_weights(partial, tensors, shape.dtype, shard_bytes, args.seed)
            _write_tokenizer(partial, shape)
            _write_configs(partial, shape)
            partial.rename(directory)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise UserError(f"{directory} can't be written: {error.strerror}") from None
    parameters = sum(math.prod(tensor.shape) for tensor in tensors)
    print(f"wrote {directory}: {parameters:,} parameters, {total / 1e6:,.1f} MB in {shards} file{'s'[: shards != 1]}")
    return 0


def _check(shape: Shape) -> None:
    for name, value in vars(shape).items():
        if isinstance(value, int) and not isinstance(value, bool) and value < 1:
            raise UserError(f"{_flag(name)} {value} is below 1")
    if shape.top_k > shape.experts:
        raise UserError(f"--top-k {shape.top_k} is above --experts {shape.experts}; choose 1 to {shape.experts}")
    if shape.heads % shape.kv_heads:
        raise UserError(f"--heads {shape.heads} is not a multiple of --kv-heads {shape.kv_heads}")
    if shape.head_dim % 2:
        raise UserError(f"--head-dim {shape.head_dim} is odd; rotary embeddings turn pairs, so it must be even")
    if not MIN_VOCAB_SIZE <= shape.vocab_size <= MAX_VOCAB_SIZE:
        raise UserError(f"--vocab-size {shape.vocab_size} is outside {MIN_VOCAB_SIZE} to {MAX_VOCAB_SIZE}")


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB)", text.strip().upper())
    size = int(float(match[1]) * SIZE_UNITS[match[2]]) if match else 0
    if size < 1:
        raise UserError(f"--shard-size {text!r} is no size above zero; write it like 500MB or 2GB")
    return size


def _tensors(shape: Shape) -> Iterator[Tensor]:
    """Every tensor, in Hugging Face's naming with one tensor per expert; linears are ``[out, in]``.

    Deviations of 1/sqrt(in) keep activations and logits near a deviation of 1 at any shape.
    """
    hidden, query = shape.hidden_size, shape.heads * shape.head_dim
    key = shape.kv_heads * shape.head_dim

    def linear(name: str, rows: int, columns: int) -> Tensor:
        return Tensor(name=f"{name}.weight", shape=(rows, columns), std=columns**-0.5)

    def norm(name: str, width: int) -> Tensor:
        return Tensor(name=f"{name}.weight", shape=(width,), std=0.0, fill=1.0)

    yield linear("model.embed_tokens", shape.vocab_size, hidden)
    for index in range(shape.layers):
        layer = f"model.layers.{index}"
        yield norm(f"{layer}.input_layernorm", hidden)
        for part, rows, columns in (("q", query, hidden), ("k", key, hidden), ("v", key, hidden), ("o", hidden, query)):
            name = f"{layer}.self_attn.{part}_proj"
            yield linear(name, rows, columns)
            if shape.attention_bias:
                # vLLM's Qwen3-MoE has no bias on o_proj, transformers' has: with zeros both compute the same.
                yield Tensor(name=f"{name}.bias", shape=(rows,), std=0.0 if part == "o" else 0.02)
        yield norm(f"{layer}.self_attn.q_norm", shape.head_dim)
        yield norm(f"{layer}.self_attn.k_norm", shape.head_dim)
        yield norm(f"{layer}.post_attention_layernorm", hidden)
        yield linear(f"{layer}.mlp.gate", shape.experts, hidden)
        for expert in range(shape.experts):
            name = f"{layer}.mlp.experts.{expert}"
            yield linear(f"{name}.gate_proj", shape.moe_intermediate_size, hidden)
            yield linear(f"{name}.up_proj", shape.moe_intermediate_size, hidden)
            yield linear(f"{name}.down_proj", hidden, shape.moe_intermediate_size)
    yield norm("model.norm", hidden)
    if not shape.tie_embeddings:
        yield linear("lm_head", shape.vocab_size, hidden)


def _nbytes(tensor: Tensor, dtype: str) -> int:
    return math.prod(tensor.shape) * DTYPES[dtype][1]


def _write_weights(directory: Path, tensors: list[Tensor], dtype: str, shard_bytes: int, seed: int) -> int:
    """Write the safetensors files, in the order given, and an index if there are several; returns how many."""
    shards: list[list[Tensor]] = [[]]
    filled = 0
    for tensor in tensors:
        size = _nbytes(tensor, dtype)
        if shards[-1] and filled + size > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(tensor)
        filled += size
    weight_map: dict[str, str] = {}
    for number, shard in enumerate(shards, start=1):
        name = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if len(shards) > 1 else "model.safetensors"
        with (directory / name).open("wb") as file:
            _write_shard(file, shard, dtype, seed)
        weight_map |= {tensor.name: name for tensor in shard}
    if len(shards) > 1:
        total = sum(_nbytes(tensor, dtype) for tensor in tensors)
        _write_json(
            directory / "model.safetensors.index.json", {"metadata": {"total_size": total}, "weight_map": weight_map}
        )
    return len(shards)


def _write_shard(file: BinaryIO, tensors: list[Tensor], dtype: str, seed: int) -> None:
    """One safetensors file, tensor by tensor: length of the header (u64), header (JSON), data."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        end = offset + _nbytes(tensor, dtype)
        header[tensor.name] = {"dtype": DTYPES[dtype][0], "shape": tensor.shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # readers map the file: the data starts aligned
    file.write(len(text).to_bytes(8, "little") + text)
    for tensor in tensors:
        for chunk in _values(tensor, dtype, seed):
            file.write(chunk)


def _values(tensor: Tensor, dtype: str, seed: int) -> Iterator[memoryview]:
    """The tensor's bytes in pieces. The seed is mixed with the name: a tensor's values don't depend on the others."""
    import torch

    mixed = hashlib.sha256(f"{seed} {tensor.name}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(mixed[:8], "little"))
    left = math.prod(tensor.shape)
    while left:
        count = min(left, CHUNK_ELEMENTS)
        left -= count
        if tensor.std:
            values = torch.randn(count, generator=generator).mul_(tensor.std)  # (count,) f32
        else:
            values = torch.full((count,), tensor.fill)
        yield values.to(getattr(torch, dtype)).view(torch.uint8).numpy().data


def _write_tokenizer(directory: Path, shape: Shape) -> None:
    """A byte-level BPE tokenizer whose merges are runs of letters, in order of length, until the vocabulary is full."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    space, letters = "Ġ", "abcdefghijklmnopqrstuvwxyz"  # Ġ: how byte-level BPE writes a space
    tokens = [*SPECIAL_TOKENS, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    merges: list[tuple[str, str]] = []
    runs = [space, *letters]
    while len(tokens) < shape.vocab_size:
        pairs = [(run, letter) for run in runs for letter in letters][: shape.vocab_size - len(tokens)]
        merges += pairs
        runs = [run + letter for run, letter in pairs]
        tokens += runs
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.save(str(directory / "tokenizer.json"))
    _write_json(
        directory / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": shape.max_position,
            "clean_up_tokenization_spaces": False,
        },
    )
    (directory / "chat_template.jinja").write_text(CHAT_TEMPLATE)


def _write_configs(directory: Path, shape: Shape) -> None:
    config = {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "dtype": shape.dtype,
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "moe_intermediate_size": shape.moe_intermediate_size,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "num_experts": shape.experts,
        "num_local_experts": shape.experts,
        "num_experts_per_tok": shape.top_k,
        "norm_topk_prob": shape.norm_topk_prob,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "attention_bias": shape.attention_bias,
        "attention_dropout": 0.0,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-06,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "max_position_embeddings": shape.max_position,
        "tie_word_embeddings": shape.tie_embeddings,
        "initializer_range": 0.02,
        "use_cache": True,
        "use_sliding_window": False,
        "sliding_window": None,
        "bos_token_id": 0,
        "eos_token_id": 2,
        "pad_token_id": 0,
    }
    _write_json(directory / "config.json", config)
    generation = {"do_sample": False, "bos_token_id": 0, "eos_token_id": [2, 0], "pad_token_id": 0}
    _write_json(directory / "generation_config.json", generation)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")
