"""A `vllm serve` of our own for tests: start it, talk to it over HTTP, end it and see that nothing is left."""

import contextlib
import ctypes
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))
from engine_output import first_errors

HOST = "127.0.0.1"
MODEL = "tiny"
"""The model's name in requests."""
READY_SECONDS = 400.0
ENGINE_SECONDS = 480.0
"""Until a program with an engine counts as one that hangs."""
RESULT = "RESULT "
STOP_SECONDS = 60.0
_OWN = {"VLLM_PLUGINS": "rose", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
ROSE_FLAGS = ("--moe-backend", "rose_cutedsl", "--linear-backend", "rose_cutedsl")


NO_MULTICAST = {
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_ALLREDUCE_USE_FLASHINFER": "0",  # its mnnvl backend makes a multicast object
}
"""Every use of NVLink multicast that is known is off: a host's GPUs may be shared."""


def script(name: str, module: str) -> list[str]:
    """How a package's command is run; where packages have no scripts beside Python, by its module."""
    path = Path(sys.executable).with_name(name)
    return [str(path)] if path.exists() else [sys.executable, "-m", module]


def serve_command(model: Path, arguments: tuple[str, ...], *, port: int) -> list[str]:
    """The command line of a server."""
    vllm = script("vllm", "vllm.entrypoints.cli.main")
    return [*vllm, "serve", str(model), "--served-model-name", MODEL, "--host", HOST, "--port", str(port), *arguments]


def gpu_environment(cache: Path) -> dict[str, str]:
    """A server's on GPUs: what this machine says about vLLM stays, such as VLLM_USE_FLASHINFER_SAMPLER=0.

    Of the plugin's variables only the folder of compiled kernels does.
    """
    environment = {name: value for name, value in os.environ.items() if not name.startswith("ROSE_")}
    if folder := os.environ.get("ROSE_CACHE_DIR"):
        environment["ROSE_CACHE_DIR"] = folder
    return environment | NO_MULTICAST | _OWN | {"VLLM_CACHE_ROOT": str(cache)}


def serve_environment(cache: Path, ranks: int = 1) -> dict[str, str]:
    """Its environment: a compile cache of the test run's own, one core for each rank."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("VLLM_", "ROSE_"))}
    environment |= _OWN | {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CACHE_ROOT": str(cache)}
    if ranks > 1:
        cores = sorted(os.sched_getaffinity(0))
        assert len(cores) >= ranks, f"{ranks} ranks need {ranks} cores, this process may use {cores}"
        environment["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(map(str, cores[:ranks]))
    return environment


def free_port() -> int:
    """A TCP port that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        return probe.getsockname()[1]


def start_session(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, its output in ``log``; a test run that is killed takes it along."""
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=_end_with_parent,
        )


def _end_with_parent() -> None:
    """In the child: ask Linux for SIGTERM when the parent dies."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


def tail(log: Path, lines: int = 40) -> str:
    """The first errors of a log, which are the cause of later ones, and its end."""
    return first_errors(log.read_text(errors="replace"), lines)


class Server:
    """One running server in a session of its own.

    Args:
        model: checkpoint directory.
        arguments: of `vllm serve`, beyond model, name and address.
        environment: see serve_environment.
        log: file for its output.
    """

    def __init__(self, *, model: Path, arguments: tuple[str, ...], environment: dict[str, str], log: Path) -> None:
        self.port = free_port()
        self.log = log
        self.process = start_session(serve_command(model, arguments, port=self.port), environment, log)

    def wait_ready(self) -> float:
        """Seconds until /health answers; fails with the log's tail when the server ends first or takes too long."""
        start = time.monotonic()
        while True:
            code = self.process.poll()
            assert code is None, f"the server ended with exit code {code} before it was ready:\n{tail(self.log)}"
            with contextlib.suppress(OSError):
                if self.request("GET", "/health", timeout=5)[0] == 200:
                    return time.monotonic() - start
            waited = time.monotonic() - start
            assert waited < READY_SECONDS, f"not ready after {waited:.0f} s:\n{tail(self.log)}"
            time.sleep(0.25)

    def request(self, method: str, path: str, body: Any = None, *, timeout: float = 120.0) -> tuple[int, bytes]:
        """Status and body of one exchange."""
        connection = http.client.HTTPConnection(HOST, self.port, timeout=timeout)
        try:
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, path, content, {"Content-Type": "application/json"})
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def get(self, path: str) -> Any:
        """The JSON at a path."""
        return self._json(path, *self.request("GET", path))

    def post(self, path: str, **body: Any) -> Any:
        """The JSON answer; the request is greedy unless it says otherwise."""
        return self._json(path, *self.request("POST", path, {"model": MODEL, "temperature": 0, **body}))

    def _json(self, path: str, status: int, content: bytes) -> Any:
        assert status == 200, f"{path} answered {status}: {content[:2000]!r}\n{tail(self.log)}"
        return json.loads(content)

    def metric(self, name: str, label: str = "") -> float:
        """The sum of a Prometheus metric over its labels, or over those that hold ``label``, such as `source="x"`."""
        status, content = self.request("GET", "/metrics")
        assert status == 200, content
        lines = re.findall(rf"^{re.escape(name)}({{.*}})? (\S+)$", content.decode(), re.MULTILINE)
        values = [float(value) for labels, value in lines if label in labels]
        assert values, f"/metrics has no {name} with {label or 'any label'}"
        return sum(values)

    def processes(self) -> list[str]:
        """What runs in the server's session, as `pid command`."""
        return session_processes(self.process.pid)

    def stop(self) -> None:
        """Ask it to end; a process that is still there after that is killed and fails the test."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + STOP_SECONDS
        while self.processes() and time.monotonic() < deadline:
            self.process.poll()
            time.sleep(0.1)
        left = self.processes()
        kill_session(self.process.pid)
        self.process.wait(timeout=10)
        assert not left, f"left {STOP_SECONDS:.0f} s after SIGTERM: {left}\n{tail(self.log)}"


def session_processes(session: int) -> list[str]:
    """The living processes of a session, zombies left out."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        with contextlib.suppress(OSError):
            command, _, rest = (entry / "stat").read_text().partition("(")[2].rpartition(")")
            state, _parent, _group, of_session = rest.split()[:4]
            if int(of_session) == session and state != "Z":
                found.append(f"{entry.name} {command}")
    return found


def kill_session(session: int) -> None:
    """End what is left of a session by force."""
    for process in session_processes(session):
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(process.split()[0]), signal.SIGKILL)


def run_to_end(command: list[str], *, environment: dict[str, str], log: Path, timeout: float) -> tuple[int, str]:
    """Exit code and output of a command that must end by itself and leave no process behind."""
    process = start_session(command, environment, log)
    try:
        code = process.wait(timeout=timeout)
        deadline = time.monotonic() + 10
        while (left := session_processes(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert not left, f"exit code {code}, but still running: {left}\n{tail(log)}"
    except subprocess.TimeoutExpired:
        raise AssertionError(f"still running after {timeout:.0f} s:\n{tail(log)}") from None
    finally:
        kill_session(process.pid)
    return code, log.read_text(errors="replace")


def run_program(program: str, *arguments: str, environment: dict[str, str], folder: Path) -> tuple[Any, str]:
    """The JSON that a Python program printed on a line behind ``RESULT ``, and all its output, kept in a folder.

    Fails with the program's first errors where it prints none, ends with another code than 0 or takes too long.
    """
    handle, name = tempfile.mkstemp(suffix=".log", dir=folder)
    os.close(handle)
    log = Path(name)
    process = start_session([sys.executable, "-c", program, *arguments], environment, log)
    try:
        code: int | None = process.wait(timeout=ENGINE_SECONDS)
    except subprocess.TimeoutExpired:
        code = None
    finally:
        kill_session(process.pid)
    ended = f"still running after {ENGINE_SECONDS:.0f} s" if code is None else f"exit code {code}"
    output = log.read_text(errors="replace")
    lines = [line.removeprefix(RESULT) for line in output.splitlines() if line.startswith(RESULT)]
    assert code == 0 and lines, f"{ended}:\n{first_errors(output)}"
    return json.loads(lines[0]), output
