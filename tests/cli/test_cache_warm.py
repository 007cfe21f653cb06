"""`rose cache warm`: a model's kernels for a target, compiled with no GPU."""

import json
from pathlib import Path

import pytest

from vllm_rose_plugin.cli import main

EXAMPLE = Path(__file__).resolve().parents[2] / "examples/tiny_moe/target"
STEP = "4"
FAMILIES = {"gemm", "moe_combine", "moe_dispatch", "moe_route", "mxfp8_quantize", "qk_norm"}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of the test's own; kernels of earlier tests are forgotten."""
    from vllm_rose_plugin.kernels.jit.compile import clear_memory

    clear_memory()
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache"


def warm(model: Path, *arguments: str) -> int:
    """Exit code of the command for steps of up to four tokens."""
    return main(["cache", "warm", "--model", str(model), "--max-tokens", STEP, *arguments])


def config(tmp_path: Path, **changes: object) -> Path:
    """The example's config.json with other values; None removes a key."""
    values = json.loads((EXAMPLE / "config.json").read_text()) | changes
    path = tmp_path / "config.json"
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
    return path


def test_it_fills_the_cache_and_finds_it_full(
    cache: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from vllm_rose_plugin.kernels.jit.compile import clear_memory, counts

    monkeypatch.setattr("vllm_rose_plugin.cli.cache._SAY_SECONDS", 0.0)
    before = counts.compiled
    assert warm(EXAMPLE, "--target", "sm_100a") == 0
    compiled = counts.compiled - before
    said = capsys.readouterr()
    assert f"{compiled} of {compiled} kernels for sm_100a" in said.out
    assert said.err.splitlines() == [f"rose cache: {done + 1} of {compiled} kernels" for done in range(compiled)]
    assert main(["cache", "list", "--json"]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(found) == compiled
    assert {(entry["target"], entry["fault"]) for entry in found} == {("sm_100a", "")}
    assert {entry["family"] for entry in found} == FAMILIES
    clear_memory()
    assert warm(EXAMPLE, "--target", "sm_100a", "--target", "sm_100a") == 0
    assert counts.compiled - before == compiled


@pytest.mark.parametrize(
    ("changes", "arguments", "words"),
    [
        ({}, ["--target", "sm_80"], "--target sm_80 is unknown; known: sm_90a"),
        ({}, ["--target", "sm_90a", "--max-tokens", "0"], "--max-tokens is 0"),
        ({"model_type": "llama"}, ["--target", "sm_90a"], "model_type is 'llama'; known: qwen3_moe"),
        ({"moe_intermediate_size": None}, ["--target", "sm_90a"], "the config has no moe_intermediate_size"),
        ({}, ["--target", "sm_90a", "--tensor-parallel-size", "3"], "tensor_parallel_size=3 doesn't divide 8 heads"),
        ({}, ["--target", "sm_100a", "--activation", "bf16"], "activation='bf16' is served on sm_90 only"),
    ],
)
def test_wrong_values_are_named(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    changes: dict[str, object],
    arguments: list[str],
    words: str,
) -> None:
    assert warm(config(tmp_path, **changes), *arguments) == 2
    assert words in capsys.readouterr().err


def test_a_model_that_is_not_there_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in (tmp_path, tmp_path / "absent"):
        assert warm(path, "--target", "sm_90a") == 2
        assert f"--model {path} is no checkpoint folder" in capsys.readouterr().err


def test_experts_that_ranks_would_cut_are_named_unless_they_are_dealt_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm_rose_plugin.kernels.rank_shapes import RankShapes

    values = json.loads(config(tmp_path, moe_intermediate_size=100).read_text())
    with pytest.raises(ValueError, match="tensor_parallel_size=8 doesn't divide moe_intermediate_size=100"):
        RankShapes.of(values, tensor_parallel_size=8)
    shapes = RankShapes.of(values, tensor_parallel_size=8, enable_expert_parallel=True)
    assert (shapes.expert_size, shapes.num_q_heads, shapes.num_kv_heads) == (100, 1, 1)


def test_sizes_of_qwen3_5_that_ranks_do_not_divide_are_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    values = json.loads((EXAMPLE.parents[2] / "recipes/models/qwen3.5-397b-a17b.json").read_text())
    path = tmp_path / "config.json"
    for changes, words in (
        ({"linear_num_key_heads": 6}, "tensor_parallel_size=4 doesn't divide linear_num_key_heads=6"),
        (
            {"shared_expert_intermediate_size": 1022},
            "tensor_parallel_size=4 doesn't divide shared_expert_intermediate_size=1022",
        ),
    ):
        path.write_text(json.dumps({**values, "text_config": {**values["text_config"], **changes}}))
        assert warm(path, "--target", "sm_90a", "--tensor-parallel-size", "4") == 2
        assert words in capsys.readouterr().err


def test_an_mtp_draft_needs_the_kernels_of_a_model_of_its_sizes() -> None:
    from vllm_rose_plugin.kernels.rank_shapes import RankShapes
    from vllm_rose_plugin.kernels.warm import kernels

    target, draft = (json.loads((EXAMPLE.parent / name / "config.json").read_text()) for name in ("target", "mtp"))
    found = [
        set(kernels(RankShapes.of(values), target="sm_90a", max_tokens=4))
        for values in (target, draft, draft | {"num_attention_heads": 4})
    ]
    assert found[0] == found[1] != found[2]


def test_a_cache_that_keeps_nothing_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from vllm_rose_plugin.kernels.jit.compile import counts

    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROSE_CACHE_DIR", str(tmp_path / "file"))
    before = counts.compiled
    assert warm(EXAMPLE, "--target", "sm_90a") == 2
    assert counts.compiled == before + 1
    assert "does not keep what is compiled; ROSE_CACHE_DIR names another place" in capsys.readouterr().err
