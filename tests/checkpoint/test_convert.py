import json
import shutil
from pathlib import Path

import pytest
import torch
from checkpoint_builders import TINY_MOE, contents, load, moe_tensors, rose, stack_experts, write_checkpoint
from safetensors.torch import save_file

from vllm_rose_plugin.checkpoint.convert import convert
from vllm_rose_plugin.checkpoint.headers import CHECKSUMS_NAME, INDEX_NAME, CheckpointError, check_headers, read_header
from vllm_rose_plugin.checkpoint.plan import Options
from vllm_rose_plugin.checkpoint.rules import CheckpointFormat
from vllm_rose_plugin.checkpoint.verify import verify
from vllm_rose_plugin.cli import UserError
from vllm_rose_plugin.kernels.contracts import Rounding
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import dequantize_mxfp8, quantize_mxfp8

UNQUANTIZED = ("embed_tokens", "norm", "lm_head", "mlp.gate.")


def is_kept(name: str) -> bool:
    return any(part in name for part in UNQUANTIZED)


def assert_converted(source: dict[str, torch.Tensor], output: dict[str, torch.Tensor], rounding: Rounding) -> None:
    """Every tensor is there, kept ones unchanged and the others as the reference quantizes them; nothing else is."""
    expected = {}
    for name, tensor in source.items():
        if is_kept(name):
            expected[name] = tensor
        else:
            expected[name], expected[name + "_scale"] = quantize_mxfp8(tensor, rounding=rounding)
    assert set(output) == set(expected)
    for name, tensor in expected.items():
        assert output[name].dtype == tensor.dtype, name
        assert torch.equal(output[name].view(torch.uint8), tensor.view(torch.uint8)), name


@pytest.mark.parametrize("files", [1, 3])
@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_tensors_are_the_reference_s(tmp_path: Path, dtype: torch.dtype, rounding: Rounding, files: int) -> None:
    tensors = moe_tensors(dtype=dtype)
    source = write_checkpoint(tmp_path / "src", tensors, files=files)
    assert rose("quantize", source, tmp_path / "dst", "--rounding", rounding.value, "--workers", files) == 0
    assert_converted(tensors, load(tmp_path / "dst"), rounding)
    config = json.loads((tmp_path / "dst" / "config.json").read_text())["quantization_config"]
    assert config["producer"]["scale_rounding"] == rounding.value
    assert verify(tmp_path / "dst").faults == []


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dims", [(64, 32), (32, 64), (64, 64), (96, 1024)])
def test_stacked_experts_give_the_same_checkpoint(tmp_path: Path, dims: tuple[int, int], transposed: bool) -> None:
    hidden, intermediate = dims
    tensors = moe_tensors(hidden=hidden, intermediate=intermediate)
    plain = write_checkpoint(tmp_path / "plain", tensors)
    stacked = write_checkpoint(tmp_path / "stacked", stack_experts(tensors, transposed=transposed), files=2)
    for source in (plain, stacked):
        convert(source=source, destination=tmp_path / f"{source.name}.out", workers=2, progress=False)
    one, two = load(tmp_path / "plain.out"), load(tmp_path / "stacked.out")
    assert set(one) == set(two)
    assert all(torch.equal(one[name].view(torch.uint8), two[name].view(torch.uint8)) for name in one)
    configs = [json.loads((tmp_path / f"{name}.out" / "config.json").read_text()) for name in ("plain", "stacked")]
    assert configs[0] == configs[1]


def test_large_tensors_are_cut_into_chunks_that_fit(tmp_path: Path) -> None:
    """Larger than a chunk, than a task and than a copy, and not a multiple of any; rows longer than a chunk."""
    generator = torch.Generator().manual_seed(5)
    tensors = {
        "model.embed_tokens.weight": torch.randn(1031, 4099, generator=generator).bfloat16(),
        "model.layers.0.mlp.gate_proj.weight": torch.randn(1536, 4128, generator=generator).bfloat16(),
        "model.layers.0.mlp.up_proj.weight": torch.randn(1536, 4128, generator=generator).bfloat16(),
        "model.layers.0.mlp.down_proj.weight": torch.randn(4128, 1536, generator=generator).bfloat16(),
        "model.layers.0.linear_attn.out_proj.weight": torch.randn(3, (1 << 19) + 32, generator=generator).bfloat16(),
    }
    convert(source=write_checkpoint(tmp_path / "src", tensors), destination=tmp_path / "dst", workers=3, progress=False)
    assert_converted(tensors, load(tmp_path / "dst"), Rounding.RCEIL)


def test_every_scale_code_that_a_finite_weight_can_have(tmp_path: Path) -> None:
    """Codes 0 to 247: float32 ends below 2**128, so 248 to 254 don't occur, and 255 is for NaN, which is refused."""
    largest = torch.tensor([256.0 * 2.0 ** (code - 127) for code in range(247)] + [1.9 * 2.0**127]).float()
    weight = torch.rand(248, 32, generator=torch.Generator().manual_seed(1)).mul_(largest.unsqueeze(1) * 0.99)
    weight[:, 7] = largest
    tensors = moe_tensors(dtype=torch.float32)
    tensors["extra.layers.0.linear_attn.out_proj.weight"] = weight
    convert(source=write_checkpoint(tmp_path / "src", tensors), destination=tmp_path / "dst", progress=False)
    output = load(tmp_path / "dst")
    codes, scales = (output[f"extra.layers.0.linear_attn.out_proj.weight{suffix}"] for suffix in ("", "_scale"))
    assert scales.flatten().tolist() == list(range(248))
    difference = (dequantize_mxfp8(codes, scales) - weight).double().abs().amax(1)
    assert bool((difference <= largest.double() / 16).all())


def test_floor_saturates_where_rceil_does_not(tmp_path: Path) -> None:
    tensors = moe_tensors()
    tensors["model.layers.0.self_attn.o_proj.weight"] = torch.full((64, 128), 500.0, dtype=torch.bfloat16)
    source = write_checkpoint(tmp_path / "src", tensors)
    values = {}
    for rounding in Rounding:
        convert(
            source=source, destination=tmp_path / rounding.value, options=Options(rounding=rounding), progress=False
        )
        output = load(tmp_path / rounding.value)
        name = "model.layers.0.self_attn.o_proj.weight"
        values[rounding] = dequantize_mxfp8(output[name], output[name + "_scale"]).unique().tolist()
    assert values == {Rounding.RCEIL: [512.0], Rounding.FLOOR: [448.0]}


def test_everything_else_is_copied_and_weights_only_once(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "src", moe_tensors(), files=2)
    (source / "chat_template.jinja").write_text("x")
    (source / "code").mkdir()
    (source / "code" / "modeling.py").write_text("y")
    for name in ("pytorch_model.bin", "consolidated.pth", "model.gguf", "pytorch_model.bin.index.json", ".hidden"):
        (source / name).write_bytes(b"z")
    save_file({"a": torch.zeros(1)}, source / "adapter.safetensors")
    assert rose("quantize", source, tmp_path / "dst") == 0
    shards = {"model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"}
    others = {"config.json", "tokenizer.json", INDEX_NAME, CHECKSUMS_NAME, "chat_template.jinja", "code/modeling.py"}
    assert set(contents(tmp_path / "dst")) == shards | others
    assert contents(tmp_path / "dst")["tokenizer.json"] == contents(source)["tokenizer.json"]
    assert not (tmp_path / "dst.partial").exists()


def test_shards_are_bounded_and_tensors_aligned(tmp_path: Path) -> None:
    tensors = moe_tensors() | {"model.odd.k_proj.weight": torch.ones(33, 32, dtype=torch.bfloat16)}
    source = write_checkpoint(tmp_path / "src", tensors)
    convert(source=source, destination=tmp_path / "dst", options=Options(max_shard_bytes=20_000), progress=False)
    files = sorted((tmp_path / "dst").glob("*.safetensors"))
    assert len(files) > 2
    for file in files:
        entries = read_header(file).values()
        assert sum(entry.nbytes for entry in entries) <= 20_000
        assert all(entry.begin % {"BF16": 2}.get(entry.dtype, 1) == 0 for entry in entries)
    index = json.loads((tmp_path / "dst" / INDEX_NAME).read_text())
    assert index["metadata"]["total_size"] == sum(e.nbytes for file in files for e in read_header(file).values())


@pytest.mark.parametrize("checkpoint_format", list(CheckpointFormat))
@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize(
    ("pattern", "kept"),
    [
        ("model.layers.1.mlp.experts", "model.layers.1.mlp.experts"),
        ("*.1.mlp.experts.*", "model.layers.1.mlp.experts"),
        ("*self_attn*", "self_attn"),
        ("model.layers.0.self_attn.[qkv]_proj", "layers.0.self_attn.q_proj"),
        ("model.layers.0.mlp.*", "model.layers.0.mlp"),
    ],
)
def test_ignored_modules_stay(
    tmp_path: Path, pattern: str, kept: str, stacked: bool, checkpoint_format: CheckpointFormat
) -> None:
    tensors = moe_tensors()
    tensors = stack_experts(tensors, transposed=False) if stacked else tensors
    options = Options(checkpoint_format=checkpoint_format, ignore=(pattern,))
    source = write_checkpoint(tmp_path / "src", tensors)
    convert(source=source, destination=tmp_path / "dst", options=options, progress=False)
    output = load(tmp_path / "dst")
    names = [name for name in tensors if kept in name]
    assert names
    for name in names:
        assert torch.equal(output[name], tensors[name]), name
    assert verify(tmp_path / "dst").faults == []


def test_qwen3_5_keeps_what_vllm_cannot_load_quantized(tmp_path: Path) -> None:
    def weight(*shape: int) -> torch.Tensor:
        return torch.ones(*shape, dtype=torch.bfloat16)

    base = "model.language_model.layers.0"
    quantized = {f"{base}.linear_attn.{name}.weight" for name in ("in_proj_qkv", "in_proj_z", "out_proj")}
    quantized |= {f"{base}.mlp.shared_expert.{name}_proj.weight" for name in ("gate", "up", "down")}
    quantized |= {"mtp.layers.0.self_attn.o_proj.weight"}
    kept = {f"{base}.linear_attn.in_proj_a.weight", f"{base}.linear_attn.in_proj_b.weight", "mtp.fc.weight"}
    kept |= {f"{base}.mlp.gate.weight", f"{base}.mlp.shared_expert_gate.weight"}
    kept |= {"model.visual.blocks.0.attn.qkv.weight", "model.visual.blocks.0.attn.q_proj.weight"}
    tensors = {name: weight(64, 64) for name in quantized | kept}
    tensors[f"{base}.linear_attn.conv1d.weight"] = weight(64, 1, 4)
    tensors["model.visual.patch_embed.proj.weight"] = weight(32, 3, 2, 16, 16)
    tensors["model.language_model.embed_tokens.weight"] = weight(64, 64)
    source = write_checkpoint(tmp_path / "src", tensors, config={"model_type": "qwen3_5_moe"})
    convert(source=source, destination=tmp_path / "dst", progress=False)
    output = load(tmp_path / "dst")
    assert {name for name, tensor in output.items() if tensor.dtype == torch.float8_e4m3fn} == quantized
    ignore = json.loads((tmp_path / "dst" / "config.json").read_text())["quantization_config"]["ignore"]
    assert {name.removesuffix(".weight") for name in kept} | {"model.visual.patch_embed.proj", "lm_head"} <= set(ignore)
    assert verify(tmp_path / "dst").faults == []


def test_the_config_is_kept(tmp_path: Path) -> None:
    config = {"model_type": "qwen3_moe", "tie_word_embeddings": True, "dtype": "float16", "x": {"y": "ü"}}
    tensors = moe_tensors(dtype=torch.float16)
    del tensors["lm_head.weight"]
    source = write_checkpoint(tmp_path / "src", tensors, config=config)
    for checkpoint_format, dtype in (
        (CheckpointFormat.MODELOPT, "bfloat16"),
        (CheckpointFormat.COMPRESSED_TENSORS, "float16"),
    ):
        destination = tmp_path / checkpoint_format.value
        options = Options(checkpoint_format=checkpoint_format)
        report = convert(source=source, destination=destination, options=options, progress=False)
        written = json.loads((destination / "config.json").read_text())
        assert "lm_head" in written.pop("quantization_config")["ignore"]
        assert written == {**config, "dtype": dtype}
        assert bool(report.notes) == (dtype == "bfloat16")


def test_the_trained_tiny_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rose("quantize", TINY_MOE, tmp_path / "dst") == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert [line.split()[0] for line in lines[:5]] == ["layer", *(f"model.layers.{n}" for n in range(3)), "total"]
    assert 0.02 < float(lines[4].split()[2]) < 0.04  # relative RMS of three mantissa bits
    assert "100%" in printed.err
    assert check_headers(tmp_path / "dst") == []
    assert verify(tmp_path / "dst").faults == []


def refusal(*arguments: object) -> str:
    with pytest.raises(UserError) as error:
        rose("quantize", *arguments)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("name", ["model.layers.1.mlp.experts.2.up_proj.weight", "model.norm.weight"])
def test_refuses_non_finite_weights(tmp_path: Path, name: str, bad: float) -> None:
    tensors = moe_tensors()
    tensors[name].view(-1)[11] = bad
    text = refusal(write_checkpoint(tmp_path / "src", tensors), tmp_path / "dst", "--workers", 2)
    assert name in text and "NaN or inf" in text
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize("name", ["model.layers.0.self_attn.o_proj", "model.layers.0.mlp.down_proj"])
def test_refuses_a_dimension_that_is_not_whole_blocks_unless_ignored(tmp_path: Path, name: str) -> None:
    tensors = moe_tensors(layers=1)
    tensors[f"{name}.weight"] = torch.ones(64, 48, dtype=torch.bfloat16)
    for leaf in ("gate", "up"):
        if name.endswith("down_proj"):
            tensors[f"model.layers.0.mlp.{leaf}_proj.weight"] = torch.ones(48, 64, dtype=torch.bfloat16)
    source = write_checkpoint(tmp_path / "src", tensors)
    text = refusal(source, tmp_path / "dst")
    assert f"{name}.weight" in text and "48" in text and "multiple of 32" in text and f"--ignore {name}" in text
    assert rose("quantize", source, tmp_path / "dst", "--ignore", name) == 0
    assert verify(tmp_path / "dst").faults == []


def test_refuses_experts_of_a_bad_dimension_by_name(tmp_path: Path) -> None:
    tensors = stack_experts(moe_tensors(intermediate=48), transposed=True)
    dense = {name: tensor for name, tensor in moe_tensors().items() if "layers.0.mlp" in name}
    source = write_checkpoint(tmp_path / "src", tensors | dense)
    text = refusal(source, tmp_path / "dst")
    assert "model.layers.1.mlp.experts.0.down_proj.weight" in text
    assert "--ignore model.layers.1.mlp.experts " in text
    assert rose("quantize", source, tmp_path / "dst", "--ignore", "model.layers.1.mlp.experts") == 0


def test_refuses_a_source_that_is_quantized(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "src", moe_tensors())
    assert rose("quantize", source, tmp_path / "dst") == 0
    assert "already quantized (modelopt)" in refusal(tmp_path / "dst", tmp_path / "again")
    config = json.loads((tmp_path / "dst" / "config.json").read_text())
    del config["quantization_config"]
    (tmp_path / "dst" / "config.json").write_text(json.dumps(config))
    text = refusal(tmp_path / "dst", tmp_path / "again")
    assert "already quantized" in text and "F8_E4M3" in text


def test_refuses_what_is_no_checkpoint(tmp_path: Path) -> None:
    assert "is not a directory" in refusal(tmp_path / "absent", tmp_path / "dst")
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "no config.json" in refusal(empty, tmp_path / "dst")
    (empty / "config.json").write_text("{}")
    assert "holds no *.safetensors" in refusal(empty, tmp_path / "dst")
    (empty / "pytorch_model.bin").write_bytes(b"x")
    assert "pytorch_model.bin" in refusal(empty, tmp_path / "dst")
    (empty / "config.json").write_text("{")
    assert "config.json can't be read" in refusal(empty, tmp_path / "dst")


def test_refuses_places_that_are_taken(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "src", moe_tensors())
    before = contents(tmp_path)
    (tmp_path / "dst").mkdir()
    assert "exists" in refusal(source, tmp_path / "dst")
    assert "same directory" in refusal(source, tmp_path / "dst" / ".." / "src")
    assert "inside SRC" in refusal(source, source / "dst")
    assert "is not a directory" in refusal(source, tmp_path / "no" / "dst")
    assert "--workers 0" in refusal(source, tmp_path / "new", "--workers", 0)
    assert contents(tmp_path) == before


def test_refuses_patterns_that_do_nothing_or_tear_apart(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "src", moe_tensors())
    assert "'*.mlp.expert'" in refusal(source, tmp_path / "dst", "--ignore", "*lm_head*", "*.mlp.expert")
    text = refusal(source, tmp_path / "dst", "--ignore", "model.layers.0.self_attn.k_proj")
    assert "k_proj" in text and "q_proj" in text
    assert "experts" in refusal(source, tmp_path / "dst", "--ignore", "model.layers.1.mlp.experts.3.up_proj")
    assert "nothing to quantize" in refusal(source, tmp_path / "dst", "--ignore", "model.*")


def test_refuses_damaged_sources(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "src", moe_tensors(), files=2)
    victim = source / "model-00001-of-00002.safetensors"
    whole = victim.read_bytes()
    for size in (0, 5, 100, len(whole) - 1):
        victim.write_bytes(whole[:size])
        assert victim.name in refusal(source, tmp_path / "dst")
    victim.write_bytes(whole)
    index = json.loads((source / INDEX_NAME).read_text())
    index["weight_map"]["model.layers.9.x.weight"] = victim.name
    (source / INDEX_NAME).write_text(json.dumps(index))
    assert "model.layers.9.x.weight is missing" in refusal(source, tmp_path / "dst")
    victim.unlink()
    assert f"{victim.name} is missing" in refusal(source, tmp_path / "dst")


def test_refuses_half_a_stack(tmp_path: Path) -> None:
    tensors = stack_experts(moe_tensors(), transposed=False)
    down = tensors.pop("model.layers.1.mlp.experts.down_proj")
    assert "down_proj is missing" in refusal(write_checkpoint(tmp_path / "a", tensors), tmp_path / "dst")
    tensors["model.layers.1.mlp.experts.down_proj"] = down[:, :, :16].contiguous()
    assert "neither" in refusal(write_checkpoint(tmp_path / "b", tensors), tmp_path / "dst")


def test_refuses_a_full_disk_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tmp_path / "src", moe_tensors())
    usage = shutil.disk_usage(tmp_path)._replace(free=1_000_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    text = refusal(source, tmp_path / "dst")
    assert "needed" in text and "0.00 GB available" in text
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


def test_destination_that_appears_meanwhile_is_not_touched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_checkpoint(tmp_path / "src", moe_tensors())
    copyfile = shutil.copyfile

    def copy_and_interfere(*args: Path) -> None:
        (tmp_path / "dst").mkdir(exist_ok=True)
        copyfile(*args)

    monkeypatch.setattr(shutil, "copyfile", copy_and_interfere)
    with pytest.raises(CheckpointError, match="appeared"):
        convert(source=source, destination=tmp_path / "dst", progress=False)
    assert list((tmp_path / "dst").iterdir()) == []
