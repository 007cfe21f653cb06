import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from checkpoint_builders import load, moe_tensors, rose, write_checkpoint
from safetensors.torch import save_file

from vllm_rose_plugin.checkpoint.convert import convert
from vllm_rose_plugin.checkpoint.headers import CHECKSUMS_NAME, INDEX_NAME, check_headers, read_header
from vllm_rose_plugin.checkpoint.plan import Options
from vllm_rose_plugin.checkpoint.rules import CheckpointFormat
from vllm_rose_plugin.checkpoint.scale_use import ScaleUse
from vllm_rose_plugin.checkpoint.verify import verify
from vllm_rose_plugin.cli import UserError
from vllm_rose_plugin.kernels.contracts import Rounding

DOWN = "model.layers.1.mlp.experts.2.down_proj.weight"  # (64, 32), scale (64, 1)
O_PROJ = "model.layers.0.self_attn.o_proj.weight"  # (64, 128), scale (64, 4)
Tensors = dict[str, torch.Tensor]


@pytest.fixture(params=list(CheckpointFormat))
def sound(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    source = write_checkpoint(tmp_path / "src", moe_tensors(), files=2)
    options = Options(checkpoint_format=request.param)
    convert(source=source, destination=tmp_path / "dst", options=options, progress=False)
    return tmp_path / "dst"


def rewrite(directory: Path, change: Callable[[Tensors], object]) -> None:
    """Change tensors and write the checkpoint anew, in one file with its index and without checksums."""
    (directory / CHECKSUMS_NAME).unlink(missing_ok=True)
    tensors = load(directory)
    change(tensors)
    for path in directory.glob("*.safetensors"):
        path.unlink()
    save_file(tensors, directory / "model.safetensors")
    (directory / INDEX_NAME).write_text(json.dumps({"weight_map": dict.fromkeys(tensors, "model.safetensors")}))


def test_a_sound_checkpoint(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check_headers(sound) == []
    assert rose("verify", sound) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "sound"
    rewrite(sound, lambda tensors: None)
    assert verify(sound).faults == []


def test_json(sound: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert rose("verify", "--json", sound) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is True and answer["faults"] == [] and answer["rounding"] == "rceil"
    assert answer["quantized"] == 4 + 3 + 4 + 12 and answer["tensors"] == 2 * 23 + 8
    assert answer["zero_scale_share"] == 0
    rewrite(sound, lambda tensors: tensors.pop(DOWN + "_scale"))
    assert rose("verify", sound) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 fault"
    assert rose("verify", "--json", sound) == 1
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"] is False and len(answer["faults"]) == 1


def replace(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[Tensors], object]:
    return lambda tensors: tensors.update({name: change(tensors[name]).contiguous()})


HEADER_FAULTS = [
    (lambda tensors: tensors.pop(DOWN + "_scale"), f"{DOWN}_scale is missing"),
    (lambda tensors: tensors.pop(DOWN), f"{DOWN}_scale has no weight: {DOWN} is missing"),
    (replace(O_PROJ + "_scale", lambda t: t.float()), f"{O_PROJ}_scale has dtype F32, expected U8"),
    (
        replace(O_PROJ + "_scale", lambda t: t.T),
        f"{O_PROJ}_scale is transposed: it has shape [4, 64], expected [64, 4]",
    ),
    (replace(O_PROJ + "_scale", lambda t: t[:, :3]), f"{O_PROJ}_scale has shape [64, 3], expected [64, 4]"),
    (replace(O_PROJ + "_scale", lambda t: t.flatten()), f"{O_PROJ}_scale has shape [256], expected [64, 4]"),
    (replace(DOWN, lambda t: t.bfloat16()), f"{DOWN} has an MXFP8 scale but dtype BF16"),
]


@pytest.mark.parametrize(("change", "fault"), HEADER_FAULTS, ids=[fault[:60] for _, fault in HEADER_FAULTS])
def test_faults_that_headers_show(sound: Path, change: Callable[[Tensors], object], fault: str) -> None:
    rewrite(sound, change)
    for faults in (check_headers(sound), verify(sound).faults):
        assert [text for text in faults if text.startswith(fault)], faults
    assert len(check_headers(sound)) == 1
    (sound / INDEX_NAME).unlink()  # the same without an index
    assert [text for text in check_headers(sound) if text.startswith(fault)]


def set_byte(name: str, value: int) -> Callable[[Tensors], object]:
    return lambda tensors: tensors[name].view(torch.uint8).view(-1)[-1:].fill_(value)


@pytest.mark.parametrize(
    ("change", "fault"),
    [
        (set_byte(DOWN + "_scale", 255), f"{DOWN}_scale holds the scale code 255"),
        (set_byte(DOWN, 0x7F), f"{DOWN} holds E4M3 NaN codes"),
        (set_byte(DOWN, 0xFF), f"{DOWN} holds E4M3 NaN codes"),
        (replace("model.norm.weight", lambda t: t / 0), "model.norm.weight holds NaN or inf"),
        (
            lambda tensors: (
                tensors.update({DOWN: torch.ones(64, 32).bfloat16(), DOWN + "_scale": None})
                or tensors.pop(DOWN + "_scale")
            ),
            f"{DOWN} has dtype BF16 and the ignore list doesn't cover it",
        ),
    ],
)
def test_faults_that_data_and_config_show(sound: Path, change: Callable[[Tensors], object], fault: str) -> None:
    rewrite(sound, change)
    assert [text for text in verify(sound).faults if text.startswith(fault)], verify(sound).faults


def test_the_largest_finite_code_is_no_fault(sound: Path) -> None:
    rewrite(sound, set_byte(DOWN, 0xFE))
    assert verify(sound).faults == []


def test_scales_of_zero_are_counted_and_warned_about(sound: Path) -> None:
    rewrite(sound, lambda tensors: [tensors[name].view(torch.uint8).zero_() for name in (O_PROJ, O_PROJ + "_scale")])
    verdict = verify(sound)
    assert verdict.ok
    assert verdict.zero_scales == 256
    assert [text for text in verdict.warnings if text.startswith(f"{O_PROJ}_scale: 100% of the scale codes are 0")]
    rewrite(sound, set_byte(O_PROJ + "_scale", 254))
    assert [text for text in verify(sound).warnings if "2**127" in text]


@pytest.mark.parametrize("entry", ["model.layers.1.mlp.experts.0.gate_proj", "model.layers.0.self_attn.o_proj"])
def test_an_ignored_weight_that_is_quantized(sound: Path, entry: str) -> None:
    config = json.loads((sound / "config.json").read_text())
    config["quantization_config"]["ignore"].append(entry)
    (sound / "config.json").write_text(json.dumps(config))
    faults = verify(sound).faults
    assert [text for text in faults if text.startswith(entry) and "the ignore list covers it" in text], faults


def test_an_ignore_list_that_lost_an_entry(sound: Path) -> None:
    config = json.loads((sound / "config.json").read_text())
    config["quantization_config"]["ignore"].remove("lm_head")
    (sound / "config.json").write_text(json.dumps(config))
    assert verify(sound).faults == ["lm_head.weight has dtype BF16 and the ignore list doesn't cover it: not quantized"]


@pytest.mark.parametrize(
    "config",
    [
        None,
        "{",
        "[]",
        "{}",
        '{"quantization_config": {"quant_method": "fp8"}}',
        '{"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}',
        '{"quantization_config": {"quant_method": "compressed-tensors", "format": "float-quantized"}}',
    ],
)
def test_configs_that_do_not_say_mxfp8(sound: Path, config: str | None) -> None:
    if config is None:
        (sound / "config.json").unlink()
    else:
        (sound / "config.json").write_text(config)
    faults = verify(sound).faults
    assert len(faults) == 1 and "config.json" in faults[0]


def test_other_spellings_of_the_config(sound: Path) -> None:
    config = json.loads((sound / "config.json").read_text())
    ignore = [*config["quantization_config"]["ignore"]]
    for quantization in (
        {"quant_method": "modelopt", "quantization": {"quant_algo": "mxfp8", "exclude_modules": ["*gate", "lm_head*"]}},
        {"quant_method": "mxfp8", "ignored_layers": ignore},
        {"quant_method": "compressed-tensors", "format": "mxfp8-quantized", "ignore": [r"re:.*\.gate$", "lm_head"]},
    ):
        (sound / "config.json").write_text(json.dumps({"quantization_config": quantization}))
        assert verify(sound).faults == [], quantization


def test_damaged_files(sound: Path) -> None:
    victim = min(sound.glob("*.safetensors"))
    whole = victim.read_bytes()
    header = whole[8 : 8 + int.from_bytes(whole[:8], "little")]
    for damaged in (
        b"",
        whole[:100],
        whole[:-1],
        whole + b"x",
        whole[:8] + b"{" * len(header) + whole[8 + len(header) :],
    ):
        victim.write_bytes(damaged)
        for faults in (verify(sound).faults, check_headers(sound)):
            assert any(victim.name in text for text in faults)
    victim.write_bytes(whole)
    assert verify(sound).faults == []
    victim.unlink()
    assert f"{victim.name} is missing" in check_headers(sound)


def test_index_and_files_disagree(sound: Path) -> None:
    index = json.loads((sound / INDEX_NAME).read_text())
    weight_map = index["weight_map"]
    first, second = sorted(set(weight_map.values()))
    moved = next(name for name, file in weight_map.items() if file == first)
    (sound / INDEX_NAME).write_text(json.dumps({"weight_map": {**weight_map, moved: second, "ghost.weight": first}}))
    faults = check_headers(sound)
    assert f"{moved} is in {first}, but the index puts it in {second}" in faults
    assert [text for text in faults if text.startswith("ghost.weight is missing")]
    (sound / INDEX_NAME).write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    assert "not in the checkpoint's directory" in check_headers(sound)[0]
    (sound / INDEX_NAME).write_text("[]")
    assert f"{INDEX_NAME} can't be read" in check_headers(sound)[0]


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="absent is not a directory: give a checkpoint directory"):
        rose("verify", tmp_path / "absent")
    assert "is not a directory" in verify(tmp_path / "absent").faults[0]
    assert "holds no *.safetensors" in check_headers(tmp_path)[0]


def test_headers_of_eighty_thousand_tensors_touch_no_data(tmp_path: Path) -> None:
    """The data are five terabytes of holes in sparse files: whoever reads them doesn't come back."""
    weight_map = {}
    for layer in range(10):
        header, position = {}, 0
        for expert in range(1334):
            for leaf in ("gate", "up", "down"):
                name = f"model.layers.{layer}.mlp.experts.{expert}.{leaf}_proj.weight"
                rows, columns = (1 << 13, 1 << 14) if leaf == "down" else (1 << 14, 1 << 13)
                for suffix, dtype, shape in (("", "F8_E4M3", [rows, columns]), ("_scale", "U8", [rows, columns >> 5])):
                    size = shape[0] * shape[1]
                    offsets = [position, position + size]
                    header[name + suffix] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
                    position += size
                    weight_map[name + suffix] = f"{layer}.safetensors"
        text = json.dumps(header).encode()
        with (tmp_path / f"{layer}.safetensors").open("wb") as file:
            file.write(len(text).to_bytes(8, "little") + text)
            file.truncate(8 + len(text) + position)
    (tmp_path / INDEX_NAME).write_text(json.dumps({"weight_map": weight_map}))
    config = {"model_type": "qwen3_moe", "num_experts": 1334, "num_hidden_layers": 10, "hidden_size": 1 << 13}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert len(weight_map) == 80_040
    begin = time.process_time()
    assert check_headers(tmp_path) == []
    assert time.process_time() - begin < 5  # 0.8 s where nothing else runs


@pytest.mark.parametrize("field", ["offsets", "size"])
def test_headers_that_contradict_themselves(tmp_path: Path, field: str) -> None:
    save_file({"a.weight": torch.zeros(4, 8), "b.weight": torch.zeros(4)}, tmp_path / "model.safetensors")
    entries = read_header(tmp_path / "model.safetensors")
    assert sum(entry.nbytes for entry in entries.values()) == 144
    data = (tmp_path / "model.safetensors").read_bytes()
    old, new = (b"[0,", b"[4,") if field == "offsets" else (b"[4,8]", b"[8,8]")
    assert data.count(old) == 1
    (tmp_path / "model.safetensors").write_bytes(data.replace(old, new))
    faults = check_headers(tmp_path)
    assert len(faults) == 1 and ("expected it to start" if field == "offsets" else "holds 128 bytes") in faults[0]


GATE = "model.layers.1.mlp.experts.0.gate_proj.weight"


def swap_scales(tensors: Tensors) -> None:
    gate, up = GATE + "_scale", GATE.replace("gate", "up") + "_scale"
    tensors[gate], tensors[up] = tensors[up], tensors[gate]


def rewrite_with_checksums(directory: Path, change: Callable[[Tensors], object]) -> None:
    checksums = (directory / CHECKSUMS_NAME).read_bytes()
    rewrite(directory, change)
    (directory / CHECKSUMS_NAME).write_bytes(checksums)


def test_scales_of_another_weight(sound: Path) -> None:
    rewrite_with_checksums(sound, lambda tensors: None)
    assert verify(sound).faults == []
    rewrite_with_checksums(sound, swap_scales)
    faults = verify(sound).faults
    assert len(faults) == 2 and all("is not what rose quantize wrote" in text for text in faults)
    assert {text.split()[0] for text in faults} == {GATE + "_scale", GATE.replace("gate", "up") + "_scale"}
    (sound / CHECKSUMS_NAME).write_text("[" * 100_000)
    assert [text for text in verify(sound).faults if text.startswith(f"{CHECKSUMS_NAME} can't be read")]


@pytest.mark.parametrize("code", [0, 20, 158])
@pytest.mark.parametrize("producer", [False, True])
def test_scales_far_off(sound: Path, code: int, producer: bool) -> None:
    rewrite(sound, replace(GATE + "_scale", lambda scales: torch.full_like(scales, code)))
    if not producer:
        forget_producer(sound)
    faults = verify(sound).faults
    assert len(faults) == 1 and faults[0].startswith(f"{GATE}: its scales are far off"), faults


def forget_producer(directory: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    del config["quantization_config"]["producer"]
    (directory / "config.json").write_text(json.dumps(config))


def halve_largest(blocks: int) -> Callable[[Tensors], object]:
    """In the first blocks, make all elements above 64 smaller by two binades: as if the scale were not theirs."""

    def change(tensors: Tensors) -> None:
        codes = tensors[O_PROJ].view(torch.uint8).view(-1, 32)[:blocks]
        codes -= torch.where((codes & 0x7F) >= 0x68, 0x10, 0).to(torch.uint8)

    return change


def test_one_block_that_does_not_use_its_scale(sound: Path) -> None:
    rewrite(sound, halve_largest(1))
    faults = verify(sound).faults
    assert len(faults) == 1 and faults[0].startswith(f"{O_PROJ}: 1 blocks don't fit their scales"), faults
    forget_producer(sound)
    assert verify(sound).faults == []  # others may have rules of their own
    rewrite(sound, halve_largest(200))
    assert [text for text in verify(sound).faults if text.startswith(f"{O_PROJ}: ") and "don't fit" in text]


@pytest.mark.parametrize("rounding", list(Rounding))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_block_of_the_converter_fits(tmp_path: Path, rounding: Rounding, dtype: torch.dtype) -> None:
    """All mantissas of bf16, and binade after binade down to zero, subnormals and blocks of zeros included."""
    tensors = moe_tensors(dtype=dtype)
    largest = (torch.arange(128) / 128 + 1).repeat(64) * 2.0 ** torch.arange(-140, -140 + 4 * 64, 4).repeat_interleave(
        128
    )
    weight = largest.unsqueeze(1) * torch.rand(8192, 32, generator=torch.Generator().manual_seed(0))
    weight[:, 3] = largest
    weight[17] = 0
    tensors["extra.layers.0.linear_attn.out_proj.weight"] = weight.to(dtype)
    options = Options(rounding=rounding)
    source = write_checkpoint(tmp_path / "src", tensors)
    convert(source=source, destination=tmp_path / "dst", options=options, progress=False)
    assert verify(tmp_path / "dst").faults == []
    forget_producer(tmp_path / "dst")
    assert verify(tmp_path / "dst").faults == []


@pytest.mark.parametrize(("rounding", "least"), [(Rounding.RCEIL, 0x76), (Rounding.FLOOR, 0x78), (None, 0x70)])
def test_bounds_of_a_block(rounding: Rounding | None, least: int) -> None:
    for code in range(0x7F):
        for place in range(32):
            for scale in (0, 120):
                magnitude = torch.zeros(96, dtype=torch.uint8)
                magnitude[64 + place], magnitude[0], magnitude[32] = code, 0x7E, 0x7E
                use = ScaleUse(rounding)
                use.add(magnitude, torch.tensor([120, 120, scale], dtype=torch.uint8))
                empty = code == 0 and rounding is None
                assert bool(use.fault()) == (code < least and scale != 0 and not empty), (code, place, scale)


def test_weights_that_are_no_floats(sound: Path) -> None:
    rewrite(sound, replace("model.norm.weight", lambda norm: torch.zeros(64, dtype=torch.int32)))
    for faults in (verify(sound).faults, check_headers(sound)):
        assert len(faults) == 1 and faults[0].startswith("model.norm.weight has dtype I32"), faults


def test_a_tensor_that_the_index_does_not_mention(sound: Path) -> None:
    """vLLM takes every tensor of the files that the index names."""
    index = json.loads((sound / INDEX_NAME).read_text())
    del index["weight_map"]["model.norm.weight"]
    (sound / INDEX_NAME).write_text(json.dumps(index))
    assert check_headers(sound) == []
    verdict = verify(sound)
    assert verdict.faults == []
    assert [text for text in verdict.warnings if text.startswith("model.norm.weight is in ")]


def minimax(tensors: Tensors) -> None:
    """As MiniMax-M3 names its tensors: w1, w3 and w2 for gate, up and down, and block scales in weight_scale_inv."""
    renamed = {}
    for name, tensor in tensors.items():
        if ".experts." in name:
            for ours, theirs in (("gate_proj", "w1"), ("up_proj", "w3"), ("down_proj", "w2")):
                name = name.replace(ours, theirs)
            name = name.replace(".mlp.", ".block_sparse_moe.")
        renamed["language_model." + name.replace("weight_scale", "weight_scale_inv")] = tensor
    tensors.clear()
    tensors.update(renamed)


@pytest.mark.parametrize("damage", [None, "missing", "dtype", "shape", "orphan", "nan", "far", "both"])
def test_minimax_naming(sound: Path, damage: str | None) -> None:
    config = json.loads((sound / "config.json").read_text())
    ignored = ["language_model.lm_head", "lm_head", "language_model.model.layers.1.mlp.gate"]
    config |= {"model_type": "minimax_m3", "quantization_config": {"quant_method": "mxfp8", "ignored_layers": ignored}}
    (sound / "config.json").write_text(json.dumps(config))
    rewrite(sound, minimax)
    assert check_headers(sound) == verify(sound).faults == []
    weight = "language_model.model.layers.1.block_sparse_moe.experts.2.w2.weight"
    scale = weight + "_scale_inv"
    changes: dict[str | None, tuple[Callable[[Tensors], object], str]] = {
        None: (lambda tensors: None, ""),
        "missing": (lambda tensors: tensors.pop(scale), f"{weight}_scale is missing"),
        "dtype": (replace(scale, lambda t: t.float()), f"{scale} has dtype F32"),
        "shape": (replace(scale, lambda t: t[:3]), f"{scale} has shape [3, 1], expected [64, 1]"),
        "orphan": (lambda tensors: tensors.pop(weight), f"{scale} has no weight"),
        "nan": (set_byte(scale, 255), f"{scale} holds the scale code 255"),
        "far": (replace(scale, lambda t: torch.full_like(t, 20)), f"{weight}: its scales are far off"),
        "both": (
            lambda tensors: tensors.update({weight + "_scale": tensors[scale].clone()}),
            f"{weight} has two scales",
        ),
    }
    change, fault = changes[damage]
    rewrite(sound, change)
    verdict = verify(sound)
    assert verdict.quantized == 23 - (damage == "orphan")
    assert (verdict.faults == []) == (damage is None)
    assert damage is None or [text for text in verdict.faults if text.startswith(fault)], verdict.faults
    if damage not in (None, "nan", "far"):
        assert [text for text in check_headers(sound) if text.startswith(fault)]
