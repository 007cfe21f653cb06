"""docker/check_image.py: what of the doctor's report ends an image build."""

import copy
import importlib.util
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docker/check_image.py"
SOUND: dict[str, Any] = {
    "findings": [
        {"level": "error", "code": "cuda_build_without_gpu", "text": "there is no GPU"},
        {"level": "warning", "code": "no_bindings", "text": "x"},
        {"level": "note", "code": "no_driver", "text": "no NVIDIA driver"},
    ],
    "packages": [
        {"name": "torch", "version": "2.14.0", "wanted": "==2.14.0", "satisfied": True},
        {"name": "flashinfer-python", "version": None, "wanted": None, "satisfied": None},
    ],
    "seam_check": {
        "ran": True,
        "problem": "",
        "cuda_initialized": False,
        "seams": [{"name": "moe", "state": "applied"}],
    },
}


@pytest.fixture(scope="module")
def problems() -> Any:
    """The function of the script, which is no module of a package."""
    spec = importlib.util.spec_from_file_location("check_image", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.problems


def test_an_image_that_only_lacks_a_gpu_is_sound(problems: Any) -> None:
    assert problems(SOUND) == []


CHANGES = {
    "seam: seam moe: no such attribute": (
        "findings",
        {"level": "error", "code": "seam", "text": "seam moe: no such attribute"},
    ),
    "torch 2.13.0, wanted ==2.14.0": (
        "packages",
        {"name": "torch", "version": "2.13.0", "wanted": "==2.14.0", "satisfied": False},
    ),
    "nvidia-cutlass-dsl is missing, wanted ==4.8.0": (
        "packages",
        {"name": "nvidia-cutlass-dsl", "version": None, "wanted": "==4.8.0", "satisfied": None},
    ),
}


@pytest.mark.parametrize("words", CHANGES)
def test_what_ends_the_build(problems: Any, words: str) -> None:
    report = copy.deepcopy(SOUND)
    part, entry = CHANGES[words]
    report[part].append(entry)
    assert problems(report) == [words]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"ran": False, "problem": "vLLM is not installed", "seams": []}, "register() was not checked: vLLM is not"),
        ({"seams": []}, "register() was not checked: no seam was looked at"),
        ({"cuda_initialized": True}, "register() created a CUDA context"),
    ],
)
def test_register_must_have_run_and_left_cuda_alone(problems: Any, change: dict[str, Any], words: str) -> None:
    report = copy.deepcopy(SOUND)
    report["seam_check"] |= change
    (problem,) = problems(report)
    assert problem.startswith(words)
