"""docs/kernels.md names files, functions and limits that exist."""

import importlib
import re
from pathlib import Path

import pytest

from vllm_rose_plugin.kernels.jit.targets import LIMITS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "docs/kernels.md").read_text()
PATHS = sorted(set(re.findall(r"`((?:vllm_rose_plugin|tests|benchmarks(?!/results))/[\w/.]+?)(?: [^`]*)?`", TEXT)))


@pytest.mark.parametrize("path", PATHS)
def test_path_exists(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize(
    ("module", "names"),
    [
        ("jit.compile", ("compile", "compile_to_artifacts")),
        ("jit.sass", ("sass", "resource_usage")),
        ("jit.providers", ("choose",)),
        ("ptx.wide", ("load_global",)),
        ("ptx.reduce", ("warp_sums",)),
        ("ptx.pdl", ("pdl_wait",)),
        ("qk_norm.config", ("QkNormConfig", "choose_config", "model_configs")),
        ("qk_norm.kernel", ("build",)),
        ("qk_norm.launch", ("qk_norm",)),
    ],
)
def test_names_exist(module, names):
    found = importlib.import_module(f"vllm_rose_plugin.kernels.{module}")
    for name in names:
        assert name in TEXT
        assert hasattr(found, name)


def test_table_of_targets_is_the_code():
    rows = re.findall(r"\| `(sm_\w+)` \| [^|]+ \| ([\d,]+) B \| (\d+) \| (\d+) bits \|", TEXT)
    found = {target: (int(shared.replace(",", "")), int(tmem), int(bits)) for target, shared, tmem, bits in rows}
    assert found == {name: (x.shared_memory, x.tmem_columns, x.widest_access) for name, x in LIMITS.items()}
