"""What goes into a cache key."""

import enum
import sys
from dataclasses import dataclass, make_dataclass

import pytest
import torch

from vllm_rose_plugin.kernels.contracts import Rounding
from vllm_rose_plugin.kernels.jit.fingerprint import config_text, host_features, sources_of


class Mode(enum.Enum):
    FAST = 1


@dataclass(frozen=True)
class Inner:
    width: int = 4


@dataclass(frozen=True)
class Config:
    dtype: torch.dtype = torch.bfloat16
    mode: Mode = Mode.FAST
    rounding: Rounding = Rounding.RCEIL
    inner: Inner = Inner()
    tile: tuple[int, int] = (128, 64)
    eps: float = 1e-6
    residual: bool = False
    name: str | None = None
    accumulator: type = int


def test_config_text_is_what_people_would_write():
    assert config_text(Config()) == (
        "Config(dtype=torch.bfloat16, mode=Mode.FAST, rounding=Rounding.RCEIL, inner=Inner(width=4), tile=(128, 64), "
        "eps=1e-06, residual=False, name=None, accumulator=builtins.int)"
    )


@pytest.mark.parametrize(
    "change",
    [
        {"dtype": torch.float16},
        {"rounding": Rounding.FLOOR},
        {"inner": Inner(5)},
        {"tile": (128, 32)},
        {"eps": 1e-5},
        {"residual": True},
        {"name": "x"},
        {"accumulator": float},
    ],
)
def test_every_field_counts(change):
    assert config_text(Config(**change)) != config_text(Config())


@pytest.mark.parametrize(("field", "value"), [("eps", 1), ("residual", 0), ("residual", 1)])
def test_values_that_python_calls_equal_are_refused(field, value):
    with pytest.raises(TypeError, match=rf"Config\.{field}"):
        config_text(Config(**{field: value}))


def test_values_without_stable_text_are_refused():
    with pytest.raises(TypeError, match=r"Config\.name holds a object"):
        config_text(Config(name=object()))
    with pytest.raises(TypeError, match=r"Config\.tile holds a list"):
        config_text(Config(tile=[1, 2]))
    with pytest.raises(TypeError, match="frozen dataclass"):
        config_text(make_dataclass("Loose", [("a", int)])(1))
    with pytest.raises(TypeError, match="frozen dataclass"):
        config_text({"a": 1})


FILES = {
    "__init__.py": "",
    "shared.py": "VALUE = 1\n",
    "unrelated.py": "VALUE = 1\n",
    "deep/__init__.py": "",
    "deep/helper.py": "from .. import shared\n",
    "kernel.py": "import torch\nfrom pack.deep import helper\n\ndef build(config):\n    from . import late\n",
    "late.py": "from vllm_rose_plugin.kernels.contracts import Rounding\n",
}


@pytest.fixture
def pack(tmp_path, monkeypatch):
    folder = tmp_path / "pack"
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    monkeypatch.syspath_prepend(str(tmp_path))
    import pack.kernel

    yield folder, pack.kernel.build
    for name in [name for name in sys.modules if name == "pack" or name.startswith("pack.")]:
        del sys.modules[name]


def test_sources_are_what_the_kernel_imports(pack):
    _, build = pack
    names = set(sources_of(build).files)
    assert {"pack/kernel.py", "pack/deep/helper.py", "pack/shared.py", "pack/late.py"} <= names
    assert "vllm_rose_plugin/kernels/contracts.py" in names
    assert "pack/unrelated.py" not in names
    assert not any("torch" in name for name in names)


@pytest.mark.parametrize("name", ["kernel.py", "shared.py", "deep/helper.py", "late.py"])
def test_edits_behind_the_kernel_count(pack, name):
    folder, build = pack
    before = sources_of(build).digest
    (folder / "unrelated.py").write_text("VALUE = 2\n")
    assert sources_of(build).digest == before
    (folder / name).write_text((folder / name).read_text() + "# edited\n")
    assert sources_of(build).digest != before


def test_host_features_name_instructions():
    machine, features = host_features()
    assert machine and features
    assert not features & {"fpu", "hypervisor", "constant_tsc"}
