"""A plugin that is broken, too old or switched off, while a rose flag is given: an error that names it, never stock."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from vllm_probe import ROOT, environment
from warm_python import WARM

from vllm_rose_plugin.seams.seam import vllm_minor

PACKAGE = "vllm_rose_plugin"


@pytest.fixture
def copy(tmp_path):
    """A second copy of the package that comes first on the path, to be broken."""
    shutil.copytree(ROOT / PACKAGE, tmp_path / PACKAGE, ignore=shutil.ignore_patterns("__pycache__"))
    return tmp_path


def serve(directory: Path, **extra: str) -> subprocess.CompletedProcess[str]:
    """``vllm serve … --moe-backend rose_cutedsl`` with the copy in ``directory`` in place of the plugin."""
    return WARM.run(
        ["-m", "vllm.entrypoints.cli.main", "serve", "no-such-model", "--moe-backend", "rose_cutedsl"],
        env={**environment("0.32", **extra), "PYTHONPATH": str(directory), "VLLM_LOGGING_LEVEL": "INFO"},
        cwd=directory,
        timeout=120,
    )


def break_module(directory: Path, module: str) -> None:
    path = directory / PACKAGE / f"{module.replace('.', '/')}.py"
    assert path.is_file()
    path.write_text('raise ImportError("broken on purpose")\n')


@pytest.mark.slow
@pytest.mark.parametrize("module", ["seams.table", "seams.backend_names", "config", "kernels.contracts"])
def test_import_error_inside_names_the_plugin(copy, module):
    break_module(copy, module)
    done = serve(copy)
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "vllm_rose_plugin" in last and "broken on purpose" in last and "VLLM_ROSE_DISABLE=1" in last


@pytest.mark.slow
def test_import_error_in_a_layer_names_plugin_and_seam(copy):
    """Layers are imported late, where vLLM imports its own kernels: the error must still be ours."""
    break_module(copy, "layers.linear")
    done = subprocess.run(
        [sys.executable, "-c", "import vllm_rose_plugin as p; p.register(); import vllm.model_executor.kernels.linear"],
        env={**environment("0.32"), "PYTHONPATH": str(copy)},
        cwd=copy,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode != 0
    last = done.stderr.strip().splitlines()[-1]
    assert "vllm_rose_plugin can't attach" in last and "'linear_registration'" in last and "broken on purpose" in last


@pytest.mark.slow
def test_package_that_cannot_be_imported_at_all(copy):
    """vLLM swallows this one and logs it; the flag's value is then unknown, so start-up ends all the same."""
    (copy / PACKAGE / "__init__.py").write_text('raise ImportError("broken on purpose")\n')
    done = serve(copy)
    assert done.returncode != 0
    output = done.stdout + done.stderr
    assert "Failed to load plugin rose" in output and "broken on purpose" in output
    assert "invalid choice: 'rose_cutedsl'" in output


@pytest.mark.slow
def test_switched_off_plugin_leaves_vllms_own_error(copy):
    done = serve(copy, VLLM_ROSE_DISABLE="1")
    assert done.returncode != 0
    assert "invalid choice: 'rose_cutedsl'" in done.stderr


@pytest.mark.parametrize(
    ("version", "minor"),
    [("0.32.0", "0.32"), ("0.32.0+cpu", "0.32"), ("0.33.0", "0.33"), ("0.33.1.dev7+gabcdef", "0.33")],
)
def test_supported_versions(version, minor):
    assert vllm_minor(version) == minor


@pytest.mark.parametrize("version", ["0.31.2", "0.34.0", "0.3", "1.0.0", "0.320.0", "dev"])
def test_unsupported_versions_are_refused_and_the_supported_ones_named(version):
    with pytest.raises(RuntimeError, match=r"supports vLLM 0\.32 and 0\.33, found .*VLLM_ROSE_DISABLE=1"):
        vllm_minor(version)
