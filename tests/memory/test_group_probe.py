"""What each rank of ``rose doctor --group N`` tries, and what the doctor makes of the answers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from memfd_driver import CUresult
from rank_threads import Held, drivers, run_ranks

from vllm_rose_plugin.doctor import collect as collect_module
from vllm_rose_plugin.doctor.child import ChildError
from vllm_rose_plugin.doctor.collect import check_group
from vllm_rose_plugin.memory.group_probe import GroupAnswer, probe_rank
from vllm_rose_plugin.memory.probe import Attempt, GpuProbe, HostProbe

ROOT = Path(__file__).parents[2]
WORKS = Attempt(True)
GPU = GpuProbe(0, "NVIDIA H200", (9, 0), 132, 150_000_000_000, True, True, True, WORKS, WORKS, False)
NOTHING = {"handles": 0, "reservations": 0, "mappings": 0, "bindings": 0}


def probe(fakes, **arguments):
    before = Held()
    answers = run_ranks(len(fakes), lambda g: probe_rank(group=g, bindings=fakes[g.rank], **arguments))
    assert [fake.ledger() for fake in fakes] == [NOTHING] * len(fakes) and Held() == before
    for fake in fakes:
        assert fake.calls.count("cuDevicePrimaryCtxRetain") == fake.calls.count("cuDevicePrimaryCtxRelease")
    return answers


def test_all_is_well():
    fakes = drivers(3)
    assert probe(fakes) == [GroupAnswer(rank, "", "fabric") for rank in range(3)]
    assert not [call for fake in fakes for call in fake.calls if "Multicast" in call]
    assert [answer.multicast for answer in probe(fakes, try_multicast=True)] == [""] * 3


@pytest.mark.parametrize(
    ("call", "phase"),
    [
        ("cuInit", "driver"),
        ("cuMemSetAccess", "access"),
        ("cuCtxSetCurrent", "context"),
        ("cuMemsetD32", "write to peers"),
        ("cuMemcpyDtoH", "read"),
    ],
)
def test_a_failing_step_is_told_by_all(call, phase):
    answers = probe(drivers(3, 1, fail={call: CUresult.CUDA_ERROR_UNKNOWN}))
    assert len({answer.error for answer in answers}) == 1
    assert f"phase '{phase}' failed on rank 1 of 3: {call}" in answers[0].error


def test_a_write_that_does_not_arrive():
    fakes = drivers(2)
    fakes[0].cuMemsetD32 = lambda *_: (CUresult.CUDA_SUCCESS,)
    answers = probe(fakes)
    assert "rank 0 of 2: rank 0 wrote 1000, 0 is here" in answers[1].error
    assert "rank 1 of 2: rank 0 wrote 1001, 0 is here" in answers[1].error


def test_multicast_that_fails_leaves_the_rest_working():
    answers = probe(drivers(2, 1, fail={"cuMulticastBindMem": CUresult.CUDA_ERROR_UNKNOWN}), try_multicast=True)
    assert [(answer.error, "multicast: bind" in answer.multicast) for answer in answers] == [("", True)] * 2


@pytest.mark.parametrize(
    ("driver", "words"),
    [
        (HostProbe("no_driver"), "no NVIDIA driver"),
        (HostProbe("no_gpu", "0 devices"), "shows no GPU"),
        (HostProbe("failed", "cuInit: sick"), "cuInit: sick"),
        (HostProbe("ok", gpus=[GPU]), "2 ranks need as many GPUs, 1 are here"),
    ],
)
def test_a_machine_that_cant_try_says_so(driver, words):
    check = check_group(2, driver, try_multicast=False)
    assert not check.works and not check.tried and words in check.problem


def test_the_answers_become_one(monkeypatch):
    host = HostProbe("ok", gpus=[GPU, GPU])
    calls = []

    def run(module, *arguments, timeout):
        calls.append(arguments)
        if arguments[1] == "1":
            raise ChildError("killed by SIGKILL")
        return {"rank": 0, "error": "rank 1 didn't arrive", "handle_type": None, "refused": {}, "multicast": None}

    monkeypatch.setattr(collect_module, "run_module", run)
    check = check_group(2, host, try_multicast=True)
    assert check.problem == "rank 1 of 2: killed by SIGKILL; rank 1 didn't arrive" and not check.works and check.tried
    assert [answer.rank for answer in check.answers] == [0] and all("--multicast" in call for call in calls)
    monkeypatch.setattr(collect_module, "run_module", lambda *a, timeout: {"rank": int(a[2]), "handle_type": "fabric"})
    check = check_group(2, host, try_multicast=False)
    assert check.works and check.answers == [GroupAnswer(rank, handle_type="fabric") for rank in range(2)]


def test_the_doctors_processes_beside_a_fake_driver(tmp_path):
    """Real children that meet in a file; the bindings are a fake whose memory is the host's."""
    package = tmp_path / "cuda/bindings"
    package.mkdir(parents=True)
    (tmp_path / "cuda/__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "driver.py").write_text(
        "import memfd_driver as m\nfake = m.MemfdDriver(devices=2, fail={('cuMemCreate', 'FABRIC'): m.CUresult(800)})\n"
        "globals().update({name: getattr(fake, name) for name in dir(fake) if name[:2].lower() == 'cu'})\n"
    )
    program = (
        "import sys, json, dataclasses\n"
        "from vllm_rose_plugin.doctor.collect import check_group\n"
        "from vllm_rose_plugin.memory.probe import *\n"
        "works = Attempt(True)\n"
        "gpu = GpuProbe(0, '', (9, 0), 1, 1, True, True, True, works, works, False)\n"
        "check = check_group(2, HostProbe('ok', gpus=[gpu, gpu]), try_multicast=True)\n"
        "assert 'torch' not in sys.modules\n"
        "print(json.dumps(dataclasses.asdict(check)))\n"
    )
    paths = [str(tmp_path), str(Path(__file__).parent), str(ROOT)]
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    check = json.loads(done.stdout)
    assert check["works"], check
    assert [(a["rank"], a["handle_type"], a["multicast"]) for a in check["answers"]] == [
        (r, "posix_fd", "") for r in (0, 1)
    ]
    assert "CUDA_ERROR_NOT_PERMITTED" in check["answers"][0]["refused"]["fabric"]
    assert [path.name for path in tmp_path.iterdir()] == ["cuda"]
