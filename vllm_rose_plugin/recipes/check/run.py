"""All checks of some recipes: what `rose check` and `rose render` call."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from vllm_rose_plugin.planner.model_memory import state_bytes_per_sequence
from vllm_rose_plugin.planner.model_shapes import ModelConfigError, family, head_dim, integer, text_config
from vllm_rose_plugin.recipes.check.environment import check_environment
from vllm_rose_plugin.recipes.check.hardware import check_hardware
from vllm_rose_plugin.recipes.check.kv_heads import check_kv_heads
from vllm_rose_plugin.recipes.check.memory import MemoryPlan, check_memory, memory_plan
from vllm_rose_plugin.recipes.check.network import check_kv_transfer, check_ports, check_together
from vllm_rose_plugin.recipes.check.rose_backends import check_rose_backends
from vllm_rose_plugin.recipes.check.shapes import check_shapes
from vllm_rose_plugin.recipes.check.vllm_parser import (
    Answer,
    ask,
    check_answer,
    check_extra_config,
    model_config,
)
from vllm_rose_plugin.recipes.deployment import Process, processes
from vllm_rose_plugin.recipes.finding import Finding, RecipeError
from vllm_rose_plugin.recipes.schema import Recipe, load_recipe

_VERSION = "{version}"


@dataclass
class Report:
    """What was found about one file."""

    path: Path
    overlays: tuple[str, ...] = ()
    recipe: Recipe | None = None
    processes: list[Process] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)
    memory: list[MemoryPlan] = field(default_factory=list)

    @property
    def title(self) -> str:
        """The file, with the overlays that were merged."""
        return str(self.path) + "".join(f" --overlay {name}" for name in self.overlays)

    def add(self, findings: Iterator[Finding] | Sequence[Finding]) -> None:
        """Keep what isn't there yet: processes of one role, and two vLLM versions, tell the same fault."""
        for finding in findings:  # compared, not hashed: a value may be a list or a mapping
            if finding not in self.findings:
                self.findings.append(finding)


def check(
    paths: Sequence[Path],
    *,
    overlays: Sequence[str] = (),
    every_overlay: bool = True,
    together: bool = False,
    sources: Sequence[Path | None] = (None,),
) -> tuple[list[Report], list[str]]:
    """Check recipes with everything there is.

    Args:
        paths: recipe files.
        overlays: merged into every file.
        every_overlay: also check each file with each of its overlays alone.
        together: the files share one rack at the same time.
        sources: which vLLMs to ask, see :func:`vllm_parser.ask`.

    Returns:
        One report per file and overlay, an overlay's with what the plain file doesn't have too, and the vLLM versions
        that were asked.

    Raises:
        VllmMissingError: a vLLM can't be asked.
    """
    reports = [report for path in paths for report in _load(path, overlays, every_overlay)]
    ready = [report for report in reports if report.recipe is not None and report.processes]
    answers = ask([(_recipe(report), report.processes) for report in ready], sources=sources) if ready else []
    for answer in answers:
        said = iter(answer.processes)
        for report in ready:
            _judge(report, answer, [next(said) for _ in report.processes])
    for report in ready:
        report.findings = _joined(report.findings, [answer.version for answer in answers])
    if together:
        # The loaded recipe carries its file, so a finding names the right one.
        base = [report for report in ready if report.overlays == tuple(overlays)]
        for finding in check_together([(_recipe(report), report.processes) for report in base]):
            next(report for report in base if report.path == finding.file).add([finding])
    plain = {report.path: report.findings for report in reports if report.overlays == tuple(overlays)}
    for report in reports:
        if report.overlays != tuple(overlays):  # told once, with the file
            report.findings = [finding for finding in report.findings if finding not in plain[report.path]]
    return reports, [answer.version for answer in answers]


def _joined(findings: Sequence[Finding], versions: Sequence[str]) -> list[Finding]:
    """Findings of one text but for vLLM's version once, with all the versions that have them."""
    told: list[tuple[Finding, list[str]]] = []  # with a mark in the version's place, and the versions
    for finding in findings:
        version = next((one for one in versions if f"vLLM {one}" in finding.problem), "")
        marked = _replaced(finding, version, _VERSION) if version else finding
        same = next((said for other, said in told if version and other == marked), None)
        if same is None:
            told.append((marked, [version]))
        else:
            same.append(version)
    return [_replaced(marked, _VERSION, " and ".join(said)) for marked, said in told]


def _replaced(finding: Finding, old: str, new: str) -> Finding:
    problem, legal, cure = (
        text.replace(f"vLLM {old}", f"vLLM {new}") for text in (finding.problem, finding.legal, finding.cure)
    )
    return replace(finding, problem=problem, legal=legal, cure=cure)


def _load(path: Path, overlays: Sequence[str], every_overlay: bool) -> Iterator[Report]:
    report = _load_one(path, tuple(overlays))
    yield report
    if every_overlay and not overlays and report.recipe is not None:
        for name in report.recipe.overlays:
            yield _load_one(path, (name,))


def _load_one(path: Path, overlays: tuple[str, ...]) -> Report:
    report = Report(path=path, overlays=overlays)
    try:
        report.recipe = recipe = load_recipe(path, overlays=overlays)
        report.add(list(check_hardware(recipe)))
        try:
            config = model_config(recipe)
        except (OSError, ValueError) as error:
            legal, cure = f"a file in {recipe.model_config_path().parent}", "name an existing shape file"
            report.add([recipe.finding(("model", "config"), recipe.model.config, str(error), legal, cure)])
            return report
        report.add(list(check_shapes(recipe, config)))
        report.add(list(check_rose_backends(recipe)))
        here = "127.0.0.1"  # vLLM resolves addresses while it builds a configuration
        report.processes = processes(recipe, leader_address=lambda node: here, own_address=lambda node: here)
        report.add(list(check_ports(recipe, report.processes)))
        report.add(list(_kv_heads(recipe, config)))
    except RecipeError as error:
        report.add(error.findings)
    return report


def _kv_heads(recipe: Recipe, config: dict[str, Any]) -> Iterator[Finding]:
    if recipe.kv_transfer is None:
        return
    try:
        if family(config) == "deepseek":  # one latent vector per token, whole on every rank
            return
        text = text_config(config)
        block = recipe.roles["decode"].args.get("block-size", 16)
        head_bytes = 2 * (block if type(block) is int and block > 0 else 16) * head_dim(text) * 2
        yield from check_kv_heads(recipe, heads=integer(text, "num_key_value_heads"), head_bytes=head_bytes)
    except ModelConfigError:
        return  # check_shapes has said it


def _judge(report: Report, answer: Answer, said: list[dict[str, Any]]) -> None:
    recipe = _recipe(report)
    configs: dict[str, dict[str, Any]] = {}
    for process, words in zip(report.processes, said, strict=True):
        report.add(check_answer(recipe, process, answer, words))
        report.add(
            check_environment(
                recipe,
                process,
                vllm_version=answer.version,
                vllm_variables=answer.environment_variables,
                wrong=words["environment"],
            )
        )
        if "config" in words:
            configs.setdefault(process.role, words["config"])
    report.add(check_extra_config(recipe, answer))
    config = model_config(recipe)
    try:
        plans = [memory_plan(recipe, role, config, resolved) for role, resolved in configs.items()]
        hybrid = state_bytes_per_sequence(config) > 0
    except ModelConfigError as error:
        legal = "what a config.json of this family has"
        report.add([recipe.finding(("model", "config"), recipe.model.config, str(error), legal, "mend the shape file")])
        return
    report.memory = plans
    for plan in plans:
        report.add(check_memory(recipe, plan))
    if recipe.kv_transfer is not None:
        report.add(check_kv_transfer(recipe, report.processes, configs, hybrid=hybrid))


def _recipe(report: Report) -> Recipe:
    assert report.recipe is not None
    return report.recipe
