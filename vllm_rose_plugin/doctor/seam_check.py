"""Child of ``rose doctor``: ``register()`` as vLLM calls it, then every module that a seam attaches to.

No CUDA context may come of it; the answer says whether torch has one afterwards.
"""

import importlib
import json
from dataclasses import asdict

import vllm_rose_plugin
from vllm_rose_plugin.doctor.facts import SeamCheck, SeamState
from vllm_rose_plugin.seams.install import state
from vllm_rose_plugin.seams.seam import Seam, vllm_minor
from vllm_rose_plugin.seams.table import seams
from vllm_rose_plugin.seams.targets import find


def check() -> SeamCheck:
    """Attach the plugin in this process and look at the result."""
    try:
        import vllm

        version = vllm.__version__
    except Exception as error:
        return SeamCheck(True, f"vLLM can't be imported: {type(error).__name__}: {error}")
    settings, settings_problem = _settings()
    try:
        vllm_rose_plugin.register()
    except Exception as error:
        return SeamCheck(True, str(error), _cuda_initialized(), settings, settings_problem)
    try:
        minor = vllm_minor(version)
    except RuntimeError as error:  # switched off, so register didn't refuse
        return SeamCheck(True, str(error), _cuda_initialized(), settings, settings_problem)
    table = seams(minor)
    import_problems = {seam.module: _import_problem(seam.module) for seam in table}
    states = [_state(seam, import_problems[seam.module]) for seam in table]
    return SeamCheck(True, "", _cuda_initialized(), settings, settings_problem, states)


def _settings() -> tuple[dict[str, str] | None, str]:
    from vllm_rose_plugin.config import RoseConfig

    try:
        return {key: str(value) for key, value in RoseConfig.load().model_dump().items()}, ""
    except ValueError as error:
        return None, str(error)


def _import_problem(module: str) -> str:
    try:
        importlib.import_module(module)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def _state(seam: Seam, import_problem: str) -> SeamState:
    problem = import_problem
    if not problem:
        try:
            for name in seam.target.split(", "):
                find(seam.name, seam.module, name)
        except Exception as error:
            problem = str(error)
    return SeamState(
        name=seam.name,
        module=seam.module,
        target=seam.target,
        kind=seam.kind,
        importable=not import_problem,
        target_found=not problem,
        state=state(seam),
        problem=problem,
    )


def _cuda_initialized() -> bool:
    import torch

    return torch.cuda.is_initialized()


def main() -> int:
    """Print the check as one line of JSON."""
    print(json.dumps(asdict(check())), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
