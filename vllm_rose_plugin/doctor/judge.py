"""What the facts mean for serving through the plugin: each missing thing with its cost and its cure."""

import difflib
from collections.abc import Iterator

from vllm_rose_plugin.doctor.facts import Facts
from vllm_rose_plugin.doctor.finding import LEVELS, Finding, Level
from vllm_rose_plugin.doctor.judge_gpu import gpu_findings, group_findings
from vllm_rose_plugin.doctor.judge_kv import kv_findings
from vllm_rose_plugin.seams.seam import SUPPORTED_VLLM

EXPECT_VERSION = "ROSE_EXPECT_VERSION"
"""Variable with the plugin's version that a deployment was checked with."""
_NO_PLUGIN = "vLLM starts without the plugin and rejects --moe-backend rose_cutedsl"


def judge(facts: Facts) -> list[Finding]:
    """All findings, errors first."""
    findings = [
        *_vllm(facts),
        *_loading(facts),
        *_image(facts),
        *_settings(facts),
        *_seams(facts),
        *_imports(facts),
        *_packages(facts),
        *_host(facts),
        *gpu_findings(facts),
        *group_findings(facts),
        *kv_findings(facts),
    ]
    return sorted(findings, key=lambda finding: LEVELS.index(finding.level))


def serving_can_work(findings: list[Finding]) -> bool:
    """Whether nothing stands in the way of ``vllm serve`` with a rose backend."""
    return not any(finding.level == "error" for finding in findings)


def _vllm(facts: Facts) -> Iterator[Finding]:
    vllm = facts.vllm
    if vllm.distribution is None:
        yield Finding(
            "error",
            "vllm_missing",
            "vLLM is not installed",
            "nothing can be served",
            "install this package with its extra `cpu` (no GPU) or `cuda`: `pip install 'vllm-rose-plugin[cpu]'`",
        )
        return
    if not vllm.supported:
        yield Finding(
            "error",
            "vllm_unsupported",
            f"{vllm.distribution} {vllm.version} is not supported",
            "start-up ends with an error that names the plugin",
            f"install vLLM {' or '.join(SUPPORTED_VLLM)}, or set VLLM_ROSE_DISABLE=1 to run without the plugin",
        )
    if vllm.distribution == "vllm-cpu" and "cpu" not in (vllm.name_version or ""):
        found = f"is {vllm.name_version}" if vllm.name_version else "is missing"
        yield Finding(
            "error",
            "vllm_name",
            f"vllm-cpu is installed, the distribution named `vllm` {found}",
            "`vllm serve` asks for that name and ends; its version must hold `cpu` for vLLM to choose the CPU",
            "`make install`, or in a source tree `pip install ./packaging/vllm-cpu-name`; "
            "VLLM_TARGET_DEVICE=cpu with `python -m vllm.entrypoints.openai.api_server` works without it",
        )
    no_gpu = facts.driver.status in ("no_driver", "no_gpu")
    if no_gpu and not vllm.cpu_build:
        yield Finding(
            "error",
            "cuda_build_without_gpu",
            f"{vllm.distribution} {vllm.version} is the CUDA build, and {facts.driver.detail or 'there is no GPU'}",
            "vLLM finds no platform to run on",
            "install the NVIDIA driver or pass the GPU into the container; without a GPU install the extra `cpu`",
        )


def _loading(facts: Facts) -> Iterator[Finding]:
    environment = facts.environment
    if environment.disabled:
        yield Finding(
            "error",
            "disabled",
            f"VLLM_ROSE_DISABLE={environment.rose['VLLM_ROSE_DISABLE']} switches the plugin off",
            _NO_PLUGIN,
            "unset VLLM_ROSE_DISABLE",
        )
    allowed = environment.vllm_plugins
    if allowed is None:
        yield Finding(
            "note",
            "endpoint_not_allowed",
            "VLLM_PLUGINS is not set, so vLLM loads general plugins and no endpoint plugin",
            "GET /rose/stats is not served",
            "set VLLM_PLUGINS=rose, with the names of your other plugins behind commas",
        )
    elif "rose" not in allowed.split(","):  # vLLM strips no blanks
        blank = " (vLLM takes the blank as part of the name)" if "rose" in map(str.strip, allowed.split(",")) else ""
        yield Finding(
            "error",
            "plugin_not_allowed",
            f"VLLM_PLUGINS={allowed!r} doesn't name rose{blank}",
            _NO_PLUGIN,
            "add rose to VLLM_PLUGINS, comma and no blank, or unset it",
        )
    general = [point for point in facts.entry_points if point.group == "vllm.general_plugins"]
    if not any(point.ours for point in general):
        reasons = "; ".join(f"{point.value} of {point.distribution} {point.problem}" for point in general)
        yield Finding(
            "error",
            "entry_point",
            "no entry point vllm.general_plugins: rose leads to this package" + (f" ({reasons})" if reasons else ""),
            _NO_PLUGIN,
            "install the package (in a source tree `pip install -e .`); reading it from PYTHONPATH isn't enough",
        )
    elif len(general) > 1:
        yield Finding(
            "warning",
            "entry_point_twice",
            "several entry points are named rose: " + ", ".join(f"{p.value} of {p.distribution}" for p in general),
            "vLLM keeps only one of them",
            "uninstall the others",
        )


def _image(facts: Facts) -> Iterator[Finding]:
    expected = facts.environment.rose.get(EXPECT_VERSION)
    if expected and expected != facts.plugin_version:
        yield Finding(
            "error",
            "stale_image",
            f"{EXPECT_VERSION}={expected}, and this is plugin {facts.plugin_version}",
            "the server runs other code than the deployment was checked with",
            "name the image by its digest, so that no host takes an older one of the same tag from its own store; or "
            f"mend {EXPECT_VERSION}",
        )


def _settings(facts: Facts) -> Iterator[Finding]:
    if facts.seam_check.settings_problem:
        yield Finding(
            "error",
            "settings",
            facts.seam_check.settings_problem,
            "start-up with a rose backend ends with this error",
            "mend or unset the variable",
        )
    known = ["VLLM_ROSE_DISABLE", EXPECT_VERSION, *(f"ROSE_{key.upper()}" for key in facts.seam_check.settings or {})]
    for name, value in facts.environment.rose.items():
        # Other tools have ROSE_* variables too, so only what looks like a slip of the pen is worth a word.
        close = difflib.get_close_matches(name, known, n=1, cutoff=0.85)
        if name not in known and close:
            yield Finding(
                "warning",
                "unknown_variable",
                f"{name}={value} is not read",
                "it has no effect",
                f"did you mean {close[0]}?",
            )


def _seams(facts: Facts) -> Iterator[Finding]:
    check = facts.seam_check
    if facts.vllm.distribution is None and not check.ran:
        return  # said already
    if check.problem:
        if facts.vllm.supported:  # otherwise said already
            yield Finding(
                "error", "register", check.problem, "vLLM's start-up ends with this error", "see the findings beside it"
            )
        return
    if check.cuda_initialized:
        yield Finding(
            "warning",
            "cuda_initialized",
            "attaching the plugin initialized CUDA",
            "vLLM can't fork its workers any more and spawns them",
            "report this as a fault of the plugin",
        )
    wrong = [s for s in check.seams if s.problem or (s.state != "applied" and not facts.environment.disabled)]
    causes = dict.fromkeys((seam.problem, seam.importable) for seam in wrong)  # one broken import stops many seams
    for problem, importable in causes:
        seams = [seam for seam in wrong if (seam.problem, seam.importable) == (problem, importable)]
        names = ", ".join(seam.name for seam in seams)
        yield Finding(
            "error",
            "seam",
            f"{'seams' if len(seams) > 1 else 'seam'} {names}: "
            + (problem or f"{seams[0].module} is imported, and the seam is {seams[0].state}"),
            "vLLM's start-up ends with an error, or a rose backend can't be chosen",
            f"install an unchanged vLLM {' or '.join(SUPPORTED_VLLM)}"
            if importable
            else f"`python -c 'import {seams[0].module}'` shows where vLLM's own import breaks",
        )


def _imports(facts: Facts) -> Iterator[Finding]:
    for name, error in facts.imports.broken.items():
        if name == "torch":
            cost, cure = "nothing can be served", "install torch again, as vLLM pins it"
        else:
            cost = "vLLM crashes when it imports it"
            cure = f"`pip uninstall {name}`, or install the build that belongs to this torch"
        # transformers, which vLLM imports at start, imports torchvision; the others only with audio and video models.
        level: Level = "error" if name in ("torch", "torchvision") else "warning"
        yield Finding(level, f"import_{name}", f"{name} can't be imported: {error}", cost, cure)


def _packages(facts: Facts) -> Iterator[Finding]:
    for package in facts.packages:
        if package.name == "torch" and package.version is None:
            yield Finding("error", "torch_missing", "torch is not installed", "nothing can be served", "install vLLM")
        elif package.wanted and package.version is None and package.name not in ("vllm", "vllm-cpu"):
            yield Finding(
                "warning",
                "package_missing",
                f"{package.name} is not installed, wanted {package.wanted}",
                "the kernels that need it can't be used",
                f"pip install '{package.name}{package.wanted}'",
            )
        elif package.satisfied is False and facts.vllm.supported:
            yield Finding(
                "warning",
                "package_version",
                f"{package.name} {package.version} is installed, wanted {package.wanted}",
                "this combination was not tested",
                f"pip install '{package.name}{package.wanted}'",
            )
    for problem in facts.dsl_problems:
        yield Finding(
            "warning",
            "cutlass_dsl_mixed",
            f"nvidia-cutlass-dsl is a mixed install: {problem}",
            "kernels may fail to compile, or be built for the wrong CUDA",
            "uninstall everything named nvidia-cutlass-dsl*, then install the version wanted above in one go",
        )


def _host(facts: Facts) -> Iterator[Finding]:
    host = facts.host
    if host.compiler is None:
        if facts.vllm.cpu_build:
            yield Finding(
                "error",
                "compiler",
                f"no C++ compiler: {host.compiler_name} is not on PATH",
                "torch.compile, which vLLM uses unless told otherwise, ends start-up on a CPU",
                "install g++ (Debian: `apt-get install g++`), set CXX, or serve with --enforce-eager",
            )
        else:
            yield Finding(
                "warning",
                "compiler",
                f"no C++ compiler: {host.compiler_name} is not on PATH",
                "Triton and torch.compile build their launchers with one",
                "install g++ or set CXX",
            )
    for directory, problem in host.directories.items():
        if problem:
            yield Finding(
                "error",
                "not_writable",
                f"{directory} can't be written: {problem}",
                "vLLM and torch.compile keep their caches there, and end start-up",
                "set VLLM_CACHE_ROOT and TORCHINDUCTOR_CACHE_DIR (or HOME, TMPDIR) to writable directories",
            )
    for directory, problem in host.kernel_cache.items():
        if problem:
            yield Finding(
                "warning",
                "kernel_cache",
                f"{directory}, for compiled kernels, can't be written: {problem}",
                "every start compiles and checks what isn't there already, and keeps it in memory only",
                "set ROSE_CACHE_DIR to a writable directory, or mount a volume there that this user may write",
            )
