"""Child of ``rose doctor``: import torch and the packages that are compiled against it."""

import importlib
import importlib.util
import json
from typing import Any

COMPANIONS = ("torchvision", "torchaudio", "torchcodec")


def main() -> int:
    """Print what :class:`vllm_rose_plugin.doctor.facts.Imports` holds as one line of JSON."""
    answer: dict[str, Any] = {"torch_cuda": None, "broken": {}}
    for name in ("torch", *COMPANIONS):
        if importlib.util.find_spec(name) is None:
            continue
        try:
            module = importlib.import_module(name)
        except Exception as error:  # any of them ends vLLM's import
            answer["broken"][name] = f"{type(error).__name__}: {' '.join(str(error).split())}"
            continue
        if name == "torch":
            answer["torch_cuda"] = module.version.cuda
    print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
