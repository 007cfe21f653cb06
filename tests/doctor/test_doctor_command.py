"""``rose doctor`` as users and scripts see it: exit codes, the keys of its JSON, a whole run beside a fake driver."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from doctor_facts import cpu_machine, gpu_machine
from fake_cuda import gb200_host, h200_host, rubin_host

from vllm_rose_plugin.cli import main
from vllm_rose_plugin.doctor import collect as collect_module
from vllm_rose_plugin.doctor.facts import Environment, GroupCheck, Imports, Vllm
from vllm_rose_plugin.memory.group_probe import GroupAnswer
from vllm_rose_plugin.memory.probe import HostProbe, probe_host

ROOT = Path(__file__).parents[2]

ATTEMPT = {"works", "step", "error"}
KEYS = {
    "": {
        "schema", "serving", "findings", "plugin_version", "python", "platform", "vllm", "packages", "dsl_problems",
        "environment", "entry_points", "imports", "seam_check", "driver", "driver_module", "gpus", "imex", "host",
        "kv_transport", "device_kernels", "group",
    },
    "findings[]": {"level", "code", "text", "cost", "cure"},
    "vllm": {"distribution", "version", "supported", "cpu_build", "name_version", "problem"},
    "packages[]": {"name", "version", "wanted", "satisfied"},
    "environment": {"disabled", "vllm_plugins", "rose"},
    "entry_points[]": {"group", "value", "distribution", "ours", "problem"},
    "imports": {"torch_cuda", "broken"},
    "seam_check": {"ran", "problem", "cuda_initialized", "settings", "settings_problem", "seams"},
    "seam_check.seams[]": {
        "name", "module", "target", "kind", "importable", "target_found", "state", "problem",
    },
    "driver": {"status", "detail", "cuda_version", "gpus", "multicast"},
    "gpus[]": {"probe", "target", "note"},
    "gpus[].probe": {
        "ordinal", "name", "capability", "sm_count", "memory_bytes", "fabric_attribute", "posix_fd_attribute",
        "multicast_attribute", "fabric", "posix_fd", "context_active", "locality",
    },
    "gpus[].probe.fabric": ATTEMPT,
    "gpus[].probe.posix_fd": ATTEMPT,
    "gpus[].probe.locality": {"domains", "sms_per_domain", "sm_count", "reason"},
    "imex": {"device_registered", "channels", "accessible", "service"},
    "host": {"compiler", "compiler_name", "directories", "kernel_cache"},
    "kv_transport": {"nixl", "rdma_devices", "usable", "ucx"},
}  # fmt: skip
"""Schema 1. A key that goes or changes its name breaks scripts: raise JSON_SCHEMA with it."""


def check_keys(answer):
    for path, keys in KEYS.items():
        values = [answer]
        for part in filter(None, path.split(".")):
            values = [value[part.removesuffix("[]")] for value in values]
            if part.endswith("[]"):
                values = [item for value in values for item in value]
        assert values, path
        for value in values:
            assert set(value) == keys, path


@pytest.fixture
def machine(monkeypatch):
    """Let the command see the facts that a test makes up."""

    def show(facts):
        monkeypatch.setattr(collect_module, "collect", lambda **_: facts)

    return show


@pytest.mark.parametrize(
    ("facts", "code"),
    [
        (cpu_machine(), 0),
        (gpu_machine(gb200_host()), 0),
        (gpu_machine(h200_host(2)), 0),
        (cpu_machine(vllm=Vllm("vllm", "0.30.0", False, True, "0.30.0+cpu", "x")), 1),
        (cpu_machine(environment=Environment(False, "other", {})), 1),
        (gpu_machine(h200_host(), imports=Imports("99.0")), 1),
    ],
)
def test_exit_codes_agree_with_both_outputs(machine, capsys, facts, code):
    machine(facts)
    assert main(["doctor"]) == code
    text = capsys.readouterr().out
    assert main(["doctor", "--json"]) == code
    answer = json.loads(capsys.readouterr().out)
    assert answer["schema"] == 1 and answer["serving"] is (code == 0)
    assert ("error: " in text) == (code == 1)
    for finding in answer["findings"]:
        assert finding["level"] in ("error", "warning", "note")
        assert " ".join(finding["cure"].split()[:4]) in " ".join(text.split())
    for seam in answer["seam_check"]["seams"]:
        assert seam["name"] in text


def test_keys_of_the_json(machine, capsys):
    machine(gpu_machine(h200_host(2)))
    main(["doctor", "--json"])
    check_keys(json.loads(capsys.readouterr().out))


HERE = [GroupAnswer(rank, "", "posix_fd", {"fabric": "no channel"}) for rank in range(2)]


@pytest.mark.parametrize(
    ("group", "code", "words"),
    [
        (GroupCheck(2, True, "", answers=HERE), 0, "2 ranks of this host can share memory"),
        (GroupCheck(2, False, "rank 1 of 2: sick"), 1, "can't share memory: rank 1 of 2: sick"),
        (GroupCheck(2, False, "this machine has no NVIDIA driver", tried=False), 1, "has no NVIDIA driver"),
        (GroupCheck(2, True, "", answers=[GroupAnswer(0, "", "fabric", multicast="no NVSwitch")]), 0, "no NVSwitch"),
    ],
)
def test_report_and_exit_code_with_a_group(machine, capsys, group, code, words):
    machine(cpu_machine(group=group))
    assert main(["doctor", "--group", "2"]) == code
    assert words in " ".join(capsys.readouterr().out.split())
    assert main(["doctor", "--group", "2", "--json"]) == code
    answer = json.loads(capsys.readouterr().out)
    assert answer["group"]["works"] is group.works and answer["serving"] is True


def test_a_group_of_one_is_refused(capsys):
    assert main(["doctor", "--group", "1"]) == 2
    assert "--group 1: a group has 2 ranks or more" in capsys.readouterr().err


def test_multicast_is_asked_for_by_its_flag_only(monkeypatch):
    asked = []
    monkeypatch.setattr(collect_module, "collect", lambda **arguments: asked.append(arguments) or cpu_machine())
    main(["doctor"])
    main(["doctor", "--probe-multicast"])
    assert asked == [{"try_multicast": False, "group_size": None}, {"try_multicast": True, "group_size": None}]
    commands = []

    def answer(module, *arguments, timeout):
        commands.append((module, *arguments))
        return {"status": "no_driver", "detail": "", "cuda_version": None, "gpus": [], "multicast": None}

    monkeypatch.setattr(collect_module, "run_module", answer)
    collect_module._probe(False)
    collect_module._probe(True)
    assert commands == [("vllm_rose_plugin.memory.probe",), ("vllm_rose_plugin.memory.probe", "--multicast")]


def test_the_probe_survives_its_way_through_json():
    from dataclasses import asdict

    for driver, multicast in ((h200_host(2), False), (gb200_host(2), True), (rubin_host(2), False)):
        host = probe_host(driver=driver, try_multicast=multicast)
        assert collect_module.host_probe_from(json.loads(json.dumps(asdict(host)))) == host


@pytest.mark.parametrize(
    ("host", "line"),
    [
        (h200_host(), "locality domains not here: the driver serves CUDA 13.0, locality domains need 13.4: update"),
        (rubin_host(), "locality domains 2, each with 100 of 212 SMs; experts use them as the setting locality says"),
    ],
)
def test_locality_domains_and_their_sms(machine, capsys, host, line):
    machine(gpu_machine(host))
    main(["doctor"])
    assert line in " ".join(capsys.readouterr().out.split())


def test_without_vllm(monkeypatch, capsys):
    """A machine with torch only: the doctor works, says so and ends with 1; no child tries to import vLLM."""
    monkeypatch.setattr("vllm_rose_plugin.doctor.packages.installed", lambda name: None)
    monkeypatch.setattr(collect_module.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(collect_module, "_imports", lambda: Imports("13.0"))
    monkeypatch.setattr(collect_module, "_probe", lambda _: HostProbe("no_driver"))
    assert main(["doctor", "--json"]) == 1
    answer = json.loads(capsys.readouterr().out)
    assert "vllm_missing" in [finding["code"] for finding in answer["findings"]]
    assert answer["seam_check"]["seams"] == [] and answer["seam_check"]["ran"] is False
    assert "register" not in [finding["code"] for finding in answer["findings"]]


@pytest.mark.slow
def test_a_whole_run_beside_a_fake_driver(tmp_path):
    """Real vLLM, real children; the GPU is a fake. The doctor's own process imports neither torch, vLLM nor CUDA."""
    bindings = tmp_path / "cuda/bindings"
    bindings.mkdir(parents=True)
    (tmp_path / "cuda/__init__.py").write_text(  # for the probe only: vLLM would take it for real bindings
        "import sys\nif 'torch' in sys.modules:\n    raise ModuleNotFoundError('no bindings', name='cuda')\n"
    )
    (bindings / "__init__.py").touch()
    (bindings / "driver.py").write_text(
        "import fake_cuda\nfake = fake_cuda.h200_host(2)\n"
        "globals().update({name: getattr(fake, name) for name in dir(fake) if name[:2].lower() == 'cu'})\n"
    )
    program = (
        "import sys\nfrom vllm_rose_plugin.cli import main\ncode = main(['doctor', '--json'])\n"
        "heavy = {'torch', 'vllm', 'cuda.bindings'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else code)\n"
    )
    paths = [str(tmp_path), str(Path(__file__).parent), str(ROOT)]
    environ = {k: v for k, v in os.environ.items() if not k.startswith(("ROSE_", "VLLM_"))}
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**environ, "PYTHONPATH": os.pathsep.join(paths), "VLLM_PLUGINS": "rose", "ROSE_ROUNDING": "floor"},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    check_keys(answer)
    assert {seam["state"] for seam in answer["seam_check"]["seams"]} == {"applied"}
    assert all(seam["importable"] and seam["target_found"] for seam in answer["seam_check"]["seams"])
    assert answer["seam_check"]["cuda_initialized"] is False
    settings = {"activation": "mxfp8", "rounding": "floor", "qk_norm": "auto", "all_reduce": "off", "tune": "False"}
    settings |= {"all_reduce_timeout": "60.0", "all_reduce_norm": "off", "all_to_all_timeout": "60.0"}
    settings |= {"locality": "auto", "locality_force_domains": "0", "locality_linear": "False"}
    assert answer["seam_check"]["settings"] == settings
    assert [gpu["probe"]["fabric"]["step"] for gpu in answer["gpus"]] == ["cuMemCreate"] * 2
    assert [gpu["target"] for gpu in answer["gpus"]] == ["sm_90a"] * 2
    codes = {finding["code"] for finding in answer["findings"]}
    assert {"no_fabric", "cpu_build_with_gpu"} <= codes
