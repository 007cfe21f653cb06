"""`rose check` with vLLM's own parser and configuration, 0.32 (installed) and 0.33 (sources of the CUDA wheel)."""

import json
import os
import re
from pathlib import Path

import pytest
from recipe_files import AGGREGATED, DISAGGREGATED, HOPPER, ROOT, SHIPPED, line_of, write_recipe
from warm_python import WARM

from vllm_rose_plugin.cli import main
from vllm_rose_plugin.recipes.check import vllm_parser
from vllm_rose_plugin.recipes.check.kv_heads import reads
from vllm_rose_plugin.recipes.check.run import check
from vllm_rose_plugin.recipes.check.vllm_parser import VllmMissingError, ask

pytestmark = pytest.mark.slow
DOCUMENT = " ".join((ROOT / "docs/recipes.md").read_text().split())


def vllm_033() -> Path:
    path = Path(os.environ.get("ROSE_VLLM_033", ROOT / "build" / "vllm-0.33.0"))
    assert (path / "vllm" / "__init__.py").is_file(), (
        f"no vLLM 0.33 sources in {path}: run `make test`, which fetches them"
    )
    return path


def test_every_shipped_recipe_passes_with_every_overlay(capsys, monkeypatch):
    monkeypatch.setenv("ROSE_VLLM_033", str(vllm_033()))
    files = sorted(SHIPPED.glob("*.yaml"))
    assert main(["check", *map(str, files)]) == 0
    said = capsys.readouterr().out
    assert "checked with vLLM 0.32.0, 0.33.0: nothing found" in said
    for file in files:
        assert f"{file}: ok" in said
    assert f"{SHIPPED / DISAGGREGATED}.yaml --overlay eagle3: ok" in said
    assert said.count("tokens of KV") >= len(files)
    quoted = re.search(r"decode: \S+ GiB per GPU; .*? = \d+ tokens of KV", DOCUMENT)
    assert quoted and f"  {quoted[0]}\n" in said, "docs/recipes.md shows another plan"


def test_overlays_that_go_together_pass(capsys, monkeypatch):
    monkeypatch.delenv("ROSE_VLLM_033", raising=False)
    assert main(["check", str(SHIPPED / f"{HOPPER}.yaml"), "--overlay", "tp8", "--overlay", "rose-all-reduce"]) == 0
    assert "all-reduce 0.1" in capsys.readouterr().out


@pytest.fixture(scope="module")
def bad(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bad")
    cases = {
        "unknown-flag": (AGGREGATED, {"roles.serve.args.max-num-sequences": 8}),
        "wrong-choice": (AGGREGATED, {"roles.serve.args.moe-backend": "rose_cutedls"}),
        "two-wrong-values": (AGGREGATED, {"roles.serve.args.max-num-seqs": "many", "roles.serve.args.dtype": "float8"}),
        "too-long": (AGGREGATED, {"roles.serve.args.max-model-len": 1_000_000}),
        "wrong-environment": (
            AGGREGATED,
            {"roles.serve.environment": {"VLLM_KV_CACHE_LAYOUT": "LBCHN", "VLLM_ATTENTION_BAKEND": "x"}},
        ),
        "block-size": (DISAGGREGATED, {"roles.decode.args.block-size": 128}),
        "connector-key": (
            DISAGGREGATED,
            {"kv_transfer.extra_config": {"kv_leese_duration": 600, "num_threads": 2, "backends": ["UCX"]}},
        ),
        "cache-dtype": (DISAGGREGATED, {"roles.decode.args.kv-cache-dtype": "fp8"}),
        "draft-on-one-side": (
            DISAGGREGATED,
            {
                "roles.decode.args.speculative-config": {
                    "method": "eagle3",
                    "model": "/models/head",
                    "num_speculative_tokens": 3,
                }
            },
        ),
        "help": (AGGREGATED, {"roles.serve.args.help": True}),
        "negative": (AGGREGATED, {"roles.serve.args.gpu-memory-utilization": -0.5}),
        "switch-with-a-value": (AGGREGATED, {"roles.serve.args.enable-expert-parallel": "true"}),
        "not-mxfp8": (
            AGGREGATED,
            {"model.weights": "bf16", "roles.serve.args.moe-backend": None},
        ),
        "false": (AGGREGATED, {"roles.serve.args.max-num-seqs": False}),
        "redundant": (AGGREGATED, {"roles.serve.args.eplb-config": {"num_redundant_experts": "x"}}),
        "awq": (AGGREGATED, {"roles.serve.args.quantization": "awq"}),
        "modelopt": (AGGREGATED, {"roles.serve.args.quantization": "modelopt"}),
        "online": (AGGREGATED, {"model.weights": "bf16", "roles.serve.args.quantization": "mxfp8"}),
        "rose-variable": (AGGREGATED, {"roles.serve.environment": {"ROSE_ALL_REDUCE": "yes"}}),
        "no-such-shapes": (AGGREGATED, {"model.config": "none.json"}),
        "rank-72": (
            AGGREGATED,
            {
                "hardware.nodes": 18,
                "router.kind": "vllm-router",
                "router.port": 8001,
                "roles.serve.gpus": 72,
                "roles.serve.args.tensor-parallel-size": None,
                "roles.serve.args.data-parallel-size": 72,
                "roles.serve.args.enable-eplb": True,
                "roles.serve.args.eplb-config": {"num_redundant_experts": 16},
                "roles.serve.args.moe-backend": None,
            },
        ),
    }
    paths = {name: write_recipe(folder, name, changes, base) for name, (base, changes) in cases.items()}
    for key in ("num_experts_per_tok", "vocab_size"):
        shapes = json.loads((folder / "models/qwen3-235b-a22b.json").read_text())
        shapes.pop(key)
        (folder / f"models/no-{key}.json").write_text(json.dumps(shapes))
        paths[key] = write_recipe(folder, key.replace("_", "-"), {"model.config": f"no-{key}.json"}, AGGREGATED)
    reports, versions = check(list(paths.values()), every_overlay=False, sources=[vllm_033()])
    assert versions == ["0.33.0"]
    return {report.path.stem: report for report in reports}


def only(report):
    (finding,) = report.findings
    return finding


def test_an_unknown_flag(bad):
    finding = only(bad["unknown-flag"])
    assert finding.problem == "--max-num-sequences is no flag of vLLM 0.33.0" and finding.value == 8
    assert finding.line == line_of(bad["unknown-flag"].path, "max-num-sequences") and "max-num-seqs" in finding.cure
    assert re.sub(r"^\S+:\d+: ", "recipes/x.yaml:27: ", str(finding)) in DOCUMENT, "docs/recipes.md shows another text"


def test_what_both_vllms_say_is_told_once(tmp_path):
    changes = {"roles.serve.args.max-model-len": 1_000_000, "roles.serve.args.max-num-seqs": "many"}
    path = write_recipe(tmp_path, "both", {"roles.serve.args.quantization": "awq"}, AGGREGATED)
    other = write_recipe(tmp_path, "parser", changes, AGGREGATED)
    reports, versions = check([path, other], every_overlay=False, sources=[None, vllm_033()])
    assert versions == ["0.32.0", "0.33.0"]
    assert "is overlooked by vLLM 0.32.0 and 0.33.0 in favour of" in only(reports[0]).problem
    assert only(reports[1]).problem == "is refused by vLLM 0.32.0 and 0.33.0"


def test_a_wrong_choice_lists_the_legal_ones_ours_included(bad):
    finding = only(bad["wrong-choice"])
    assert (
        finding.keys[-1] == "moe-backend" and "rose_cutedsl" in finding.legal and "flashinfer_trtllm" in finding.legal
    )


def test_every_wrong_value_is_told(bad):
    assert {finding.keys[-1] for finding in bad["two-wrong-values"].findings} == {"max-num-seqs", "dtype"}


def test_vllm_s_cross_checks_are_asked(bad):
    finding = only(bad["too-long"])
    assert finding.keys[-1] == "max-model-len" and "40960" in finding.legal


def test_environment_names_and_values_of_this_vllm(bad):
    names = {finding.keys[-1]: finding for finding in bad["wrong-environment"].findings}
    assert set(names) >= {"VLLM_KV_CACHE_LAYOUT", "VLLM_ATTENTION_BAKEND"}
    assert "LBHNC" in names["VLLM_KV_CACHE_LAYOUT"].legal


def test_a_value_of_ours_is_found_where_it_stands(bad):
    finding = only(bad["rose-variable"])
    assert finding.keys == ("roles", "serve", "environment", "ROSE_ALL_REDUCE") and finding.value == "yes"
    assert finding.line == line_of(bad["rose-variable"].path, "ROSE_ALL_REDUCE") and "'p2p'" in finding.legal


def test_a_quantization_that_the_checkpoint_overrules(bad):
    finding = only(bad["awq"])
    assert finding.keys[-1] == "quantization" and finding.value == "awq"
    assert "overlooked by vLLM 0.33.0 in favour of modelopt_mxfp8" in finding.problem
    assert not bad["modelopt"].findings and not bad["online"].findings


def test_block_size_cache_dtype_and_drafting_must_agree(bad):
    assert only(bad["block-size"]).keys[-1] == "block-size"
    assert only(bad["cache-dtype"]).keys[-1] == "kv-cache-dtype"
    assert "handshake would refuse" in only(bad["draft-on-one-side"]).problem


def test_a_key_that_the_connector_does_not_ask_for(bad):
    finding = only(bad["connector-key"])
    assert finding.keys[-1] == "kv_leese_duration" and finding.cure == "write kv_lease_duration"
    assert finding.line == line_of(bad["connector-key"].path, "kv_leese_duration")


def test_what_vllm_s_parser_stumbles_over_ends_nothing(bad):
    assert only(bad["help"]).keys[-1] == "help"
    for name, flag in (("negative", "gpu-memory-utilization"), ("switch-with-a-value", "enable-expert-parallel")):
        assert "is refused by vLLM 0.33.0" in only(bad[name]).problem
        assert only(bad[name]).keys[-1] == flag and only(bad[name]).line == line_of(bad[name].path, flag)
    assert "gets through, it ended with IndexError" in only(bad["negative"]).legal


def test_a_message_names_no_folder_of_ours(bad):
    assert "--linear-backend rose_cutedsl can't serve the model (not quantized" in only(bad["not-mxfp8"]).legal
    assert only(bad["false"]).problem == "--max-num-seqs takes a value: there is no --no-max-num-seqs in vLLM 0.33.0"
    assert only(bad["redundant"]).value == {"num_redundant_experts": "x"}


def test_a_list_where_a_mapping_belongs_is_a_finding(tmp_path):
    (report,), versions = check([write_recipe(tmp_path, "list", {"overlays": ["mtp"]})])
    assert only(report).value == ["mtp"] and versions == []


def test_missing_keys_of_shapes_are_named(bad):
    assert "num_experts_per_tok = None" in only(bad["num-experts-per-tok"]).problem
    assert only(bad["vocab-size"]).problem == "has no vocab_size"


def test_missing_shapes_are_named(bad):
    assert only(bad["no-such-shapes"]).keys == ("model", "config")


def test_72_ranks_with_redundant_experts_pass(bad):
    report = bad["rank-72"]
    assert report.findings == [] and len(report.processes) == 18
    assert report.memory[0].tokens > 40960


def test_a_flag_renamed_in_the_next_vllm(tmp_path, monkeypatch):
    """The next vLLM is simulated by a plugin that renames a flag while vLLM builds its parser.

    The recipe is one for Hopper, asked about alone: vLLM's Mamba kernels then look into Triton's configurations, which
    must also work where there is no Triton.
    """
    (tmp_path / "renamer.py").write_text(
        "def register():\n"
        "    from argparse import _ArgumentGroup as group\n"
        "    from vllm.engine.arg_utils import EngineArgs\n"
        "    add = EngineArgs.add_cli_args\n"
        "    def renamed(parser):\n"
        "        before = group.add_argument\n"
        "        group.add_argument = lambda self, *names, **options: before(\n"
        "            self, *(name.replace('--max-num-seqs', '--max-running') for name in names), **options)\n"
        "        try:\n"
        "            return add(parser)\n"
        "        finally:\n"
        "            group.add_argument = before\n"
        "    EngineArgs.add_cli_args = staticmethod(renamed)\n"
    )
    info = tmp_path / "renamer-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: renamer\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nrenamer = renamer:register\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path), str(ROOT)]))
    reports, _ = check([SHIPPED / f"{HOPPER}.yaml"])
    finding = only(reports[0])
    assert len(reports) > 1 and not any(r.findings for r in reports[1:]), "what the plain file has too is told once"
    assert finding.keys[-1] == "max-num-seqs" and "is no flag of vLLM" in finding.problem
    assert finding.line == line_of(SHIPPED / f"{HOPPER}.yaml", "max-num-seqs")


def test_kv_reads_are_those_of_vllm_s_nixl_connector():
    sizes = (1, 2, 4, 8, 16)
    asked = [(prefill, decode, heads) for heads in (2, 4, 8) for prefill in sizes for decode in sizes]
    plain = dict(os.environ, VLLM_TARGET_DEVICE="cpu", VLLM_LOGGING_LEVEL="ERROR")
    newer = plain | {"PYTHONPATH": os.pathsep.join([str(vllm_033()), plain.get("PYTHONPATH", "")])}

    for environment in (plain, newer):
        probe = str(Path(__file__).parent / "kv_mapping_probe.py")
        done = WARM.run([probe], stdin=json.dumps(asked), env=environment)
        assert done.returncode == 0, done.stderr[-3000:]
        theirs = json.loads(done.stdout)
        for prefill, decode, heads in asked:
            for rank, plan in enumerate(theirs[f"{prefill},{decode},{heads}"]):
                block = max(1, heads // decode) * 10
                length = block // len(plan["sources"])
                ours = reads(prefill_ranks=prefill, decode_ranks=decode, rank=rank, heads=heads, head_bytes=10)
                assert [(read.source_rank, read.start, read.source_start, read.length) for read in ours] == [
                    (source, slot * length, plan["offset"] * block, length)
                    for source, slot in zip(plan["sources"], plan["slots"], strict=True)
                ], (prefill, decode, heads, rank)


def test_a_vllm_that_can_t_be_asked_is_named(tmp_path):
    (tmp_path / "vllm").mkdir()
    (tmp_path / "vllm" / "__init__.py").write_text("raise RuntimeError('half a wheel')\n")
    with pytest.raises(VllmMissingError, match=r"can't be asked \(exit code 1\): RuntimeError: half a wheel"):
        ask([], sources=[tmp_path])


def test_a_vllm_that_gives_no_answer_is_named(monkeypatch, capsys):
    monkeypatch.setattr(vllm_parser, "_SECONDS", 0.01)
    monkeypatch.delenv("ROSE_VLLM_033", raising=False)
    assert main(["check", str(SHIPPED / f"{AGGREGATED}.yaml")]) == 2
    assert "the installed vLLM gave no answer in 0.01 s" in capsys.readouterr().err


def test_a_folder_without_vllm_is_refused(tmp_path, capsys):
    assert main(["check", str(SHIPPED / f"{AGGREGATED}.yaml"), "--vllm-sources", str(tmp_path)]) == 2
    assert "holds no unpacked vLLM wheel" in capsys.readouterr().err
