"""Where `rose quantize` may work, what it leaves alone, and what it says to files that are not what they should be."""

import json
import os
from pathlib import Path
from typing import Any

import pytest
from checkpoint_builders import contents, load, moe_tensors, rose, write_checkpoint

from vllm_rose_plugin.checkpoint.convert import convert
from vllm_rose_plugin.checkpoint.headers import INDEX_NAME, check_headers
from vllm_rose_plugin.checkpoint.state import WorkDirectory
from vllm_rose_plugin.checkpoint.verify import verify
from vllm_rose_plugin.cli import UserError


def refusal(*arguments: object) -> str:
    with pytest.raises(UserError) as error:
        rose("quantize", *arguments)
    text = str(error.value)
    assert text.isprintable() and len(text) < 700
    return text


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return write_checkpoint(tmp_path / "src", moe_tensors())


@pytest.mark.parametrize("bad", [False, True])
@pytest.mark.parametrize("files", [["checkpoint/precious.txt"], ["notes.tmp"], ["lock", "checkpoint/x"], ["plan.json"]])
def test_a_partial_directory_of_somebody_else(tmp_path: Path, source: Path, files: list[str], bad: bool) -> None:
    if bad:  # a failing conversion cleans up
        tensors = moe_tensors()
        tensors["model.norm.weight"][0] = float("nan")
        source = write_checkpoint(tmp_path / "nan", tensors)
    for name in files:
        path = tmp_path / "dst.partial" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("[]")
    before = contents(tmp_path)
    assert f"{tmp_path}/dst.partial is in the way" in refusal(source, tmp_path / "dst")
    assert contents(tmp_path) == before


def test_files_of_somebody_else_in_our_directory_survive(tmp_path: Path) -> None:
    tensors = moe_tensors()
    tensors["model.norm.weight"][0] = float("nan")
    source = write_checkpoint(tmp_path / "src", tensors)
    work = WorkDirectory(tmp_path / "dst")
    work.acquire()
    work.begin({"vllm_rose_plugin": "?"})
    for name in ("notes.tmp", "a.done.json", "checkpoint/precious.safetensors"):
        (work.root / name).write_text("x")
    work.discard()
    work.release()
    for name in ("notes.tmp", "a.done.json", "checkpoint/precious.safetensors"):
        assert (work.root / name).read_text() == "x"
    assert "unfinished conversion" in refusal(source, tmp_path / "dst")


@pytest.mark.parametrize("where", ["src.partial", "src.partial/checkpoint", "link"])
def test_a_source_where_work_would_be_kept(tmp_path: Path, where: str) -> None:
    place = tmp_path / ("elsewhere" if where == "link" else where)
    place.parent.mkdir(exist_ok=True)
    source = write_checkpoint(place, moe_tensors())
    if where == "link":
        (tmp_path / "src.partial").symlink_to(source)
    before = contents(tmp_path)
    assert "src.partial" in refusal(source, tmp_path / "src")
    assert contents(tmp_path) == before


def test_a_source_inside_the_destination(tmp_path: Path) -> None:
    source = write_checkpoint(tmp_path / "a" / "src", moe_tensors())
    assert "lies inside DST" in refusal(source, tmp_path / "a")


def test_a_dangling_link_is_refused_at_once(tmp_path: Path, source: Path) -> None:
    (tmp_path / "dst").symlink_to(tmp_path / "nowhere")
    assert "symbolic link" in refusal(source, tmp_path / "dst")
    assert not (tmp_path / "dst.partial").exists()


@pytest.mark.parametrize("destination", [".", "/", "..", "/proc/x", "a" * 250, "a" * 300])
def test_impossible_destinations(
    tmp_path: Path, source: Path, destination: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert "DST" in refusal(source, destination) or "File name too long" in refusal(source, destination)
    assert [path.name for path in tmp_path.iterdir()] == ["src"]


@pytest.mark.parametrize("taken", [False, True])
def test_killed_after_the_rename_and_dst_removed(
    tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch, taken: bool
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(WorkDirectory, "discard", lambda self: None)
        convert(source=source, destination=tmp_path / "dst", progress=False)
    whole = contents(tmp_path / "dst")
    assert (tmp_path / "dst.partial" / "plan.json").exists()
    (tmp_path / "dst").rename(tmp_path / "moved")
    if taken:
        (tmp_path / "dst").mkdir()
        assert "exists" in refusal(source, tmp_path / "dst")  # an empty directory is not what was published
        (tmp_path / "dst").rmdir()
    assert rose("quantize", source, tmp_path / "dst", "--rounding", "rceil") == 0
    assert contents(tmp_path / "dst") == whole
    assert not (tmp_path / "dst.partial").exists()


def raw(text: bytes, data: bytes = b"") -> bytes:
    return len(text).to_bytes(8, "little") + text + data


def header(**change: Any) -> bytes:
    entry = {"dtype": "BF16", "shape": [1, 32], "data_offsets": [0, 64], **change}
    return raw(json.dumps({"model.layers.0.self_attn.q_proj.weight": entry}).encode(), bytes(64))


HEADERS = {
    "dtype list": (header(dtype=["BF16"]), "['BF16']"),
    "no dtype": (header(dtype=None), "None"),
    "floats": (header(shape=[1.0, 32.0]), "[1.0, 32.0]"),
    "text size": (header(shape=["a", 32]), "['a', 32]"),
    "negative": (header(shape=[-1, -32]), "[-1, -32]"),
    "bool": (header(shape=[True, 32]), "[True, 32]"),
    "no list": (header(shape=32), "32"),
    "offsets": (header(data_offsets=["a", "b"]), "['a', 'b']"),
    "three offsets": (header(data_offsets=[0, 64, 128]), "[0, 64, 128]"),
    "entry": (raw(b'{"x.weight": 3}'), "x.weight"),
    "list": (raw(b"[]"), "not a JSON object"),
    "deep": (raw(b'{"a":' + b"[" * 200_000 + b"]" * 200_000 + b"}"), "nested too deeply"),
    "surrogate": (header().replace(b"model.", b"\\ud800"), "d800"),
    "bytes": (raw(b'{"\xff": 1}'), "unreadable"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_are_nonsense(tmp_path: Path, name: str) -> None:
    data, said = HEADERS[name]
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "config.json").write_text("{}")
    (tmp_path / "src" / "model.safetensors").write_bytes(data)
    assert "model.safetensors has an unreadable safetensors header" in refusal(tmp_path / "src", tmp_path / "dst")
    assert said in refusal(tmp_path / "src", tmp_path / "dst")
    for faults in (verify(tmp_path / "src").faults, check_headers(tmp_path / "src")):
        assert any(said in text and text.isprintable() for text in faults), faults
    assert rose("verify", tmp_path / "src") == 1


INDICES = ['{"weight_map": {"a": ["b"]}}', '{"weight_map": {"a": 1}}', '{"weight_map": [1]}', "[" * 100_000, "[]", "{}"]


@pytest.mark.parametrize("text", INDICES, ids=[text[:30] for text in INDICES])
def test_indices_that_are_nonsense(source: Path, tmp_path: Path, text: str) -> None:
    (source / INDEX_NAME).write_text(text)
    assert INDEX_NAME in refusal(source, tmp_path / "dst")
    for faults in (verify(source).faults, check_headers(source)):
        assert any(INDEX_NAME in fault for fault in faults)


CONFIGS = ["[" * 100_000, '{"a": "\\ud800"}', "[]", "\x00"]
QUANTIZATION = ['{"quant_method": "modelopt", "quant_algo": "MXFP8", "ignore": 3}', "[3]"]
QUANTIZATION += ['{"quant_method": "compressed-tensors", "format": ["x"], "config_groups": [1]}']
QUANTIZATION += ['{"quant_method": "compressed-tensors", "format": "mxfp8-quantized", "ignore": ["re:("]}']


@pytest.mark.parametrize("text", CONFIGS, ids=["deep", "surrogate", "list", "zero"])
def test_configs_that_are_nonsense(source: Path, tmp_path: Path, text: str) -> None:
    (source / "config.json").write_text(text)
    assert "config.json" in refusal(source, tmp_path / "dst")
    assert any("config.json" in fault for fault in verify(source).faults)
    assert check_headers(source) == []


@pytest.mark.parametrize("text", QUANTIZATION)
def test_quantization_configs_that_are_nonsense(source: Path, text: str) -> None:
    (source / "config.json").write_text(f'{{"quantization_config": {text}}}')
    assert any("quantization_config" in fault for fault in verify(source).faults)


def test_files_that_may_not_be_read(tmp_path: Path, source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (source / "config.json").unlink()
    (source / "config.json").mkdir()
    assert "config.json" in refusal(source, tmp_path / "dst")
    assert any("config.json" in fault for fault in verify(source).faults)
    assert "can't be read" in verify(tmp_path / ("a" * 300)).faults[0]


O_PROJ = "model.layers.0.self_attn.o_proj.weight"
QKV = "*self_attn.[qkv]_proj"


@pytest.mark.parametrize(
    "arguments",
    [
        ("--ignore", "*o_proj", "SRC", "DST"),
        ("SRC", "--ignore", "*o_proj", "DST"),
        ("SRC", "DST", "--ignore", "*o_proj"),
        ("--ignore", "*o_proj", "--", "SRC", "DST"),
        ("--ignore", "*o_proj", "--workers", "1", "SRC", "DST"),
        ("--ignore", QKV, "--ignore", "*o_proj", "SRC", "DST"),
        ("--ignore", QKV, "*o_proj", "SRC", "DST"),
        ("SRC", "DST", "--ignore", QKV, "*o_proj"),
        ("SRC", "DST", "--ignore", QKV, "--ignore", "*o_proj"),
        ("--ignore", QKV, "*o_proj", "lm_head", "--workers", "1", "SRC", "DST"),
    ],
)
def test_where_patterns_may_stand(tmp_path: Path, source: Path, arguments: tuple[str, ...]) -> None:
    places = {"SRC": source, "DST": tmp_path / "dst"}
    assert rose("quantize", *(places.get(argument, argument) for argument in arguments)) == 0
    names = set(load(tmp_path / "dst"))
    assert O_PROJ + "_scale" not in names
    assert (O_PROJ.replace("o_proj", "q_proj") + "_scale" in names) == (QKV not in arguments)
    assert "model.layers.0.mlp.up_proj.weight_scale" in names


@pytest.mark.parametrize(
    "arguments",
    [
        ("--ignore", "*o_proj"),
        ("--ignore", "*o_proj", "SRC"),
        ("SRC", "--ignore", "*o_proj"),
        ("--ignore", "*o_proj", "SRC", "--workers", "1", "DST"),
        ("--ignore", "*o_proj", "SRC", "DST", "--ignore", "lm_head", "*q_proj", "*k_proj"),
    ],
)
def test_places_that_may_be_patterns(tmp_path: Path, source: Path, arguments: tuple[str, ...]) -> None:
    places = {"SRC": source, "DST": tmp_path / "dst"}
    text = refusal(*(places.get(argument, argument) for argument in arguments))
    assert "SRC and DST are missing: give them before --ignore" in text
    assert sorted(os.listdir(tmp_path)) == ["src"]


def test_without_patterns_argparse_asks_for_the_places(source: Path) -> None:
    with pytest.raises(SystemExit):
        rose("quantize", source)
