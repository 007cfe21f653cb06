"""Python programs in processes of their own that need not import torch and transformers first.

Those take most of the seconds of a small program against vLLM. A server imports them once and forks for each program;
of vLLM and of the plugin it knows nothing, so the program imports both as it would in a new process: with its own
environment, working folder and ``sys.path``. Only ``sitecustomize`` is not run again.
"""

import atexit
import importlib
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

PRELOADED = (
    "torch._inductor.lowering",
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.models.auto.image_processing_auto",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "openai.types.responses",
    "aiohttp",
    "cv2",
    "compressed_tensors.quantization",
    "fastapi",
    "opentelemetry.exporter.otlp.proto.grpc.trace_exporter",
    "prometheus_client",
    "pytest",
    "regex",
    "requests",
    "xgrammar",
    "zmq.asyncio",
)
"""What vLLM, in both versions, or the probes import of other packages and takes longest."""


class WarmPython:
    """The server, started by the first program and ended with this process; one program at a time."""

    def __init__(self) -> None:
        self._control: socket.socket | None = None

    def run(
        self, argv: list[str], *, env: dict[str, str], stdin: str = "", cwd: Path | None = None, timeout: float = 300.0
    ) -> subprocess.CompletedProcess[str]:
        """As ``subprocess.run([sys.executable, *argv], text=True, capture_output=True)``.

        Args:
            argv: a script and its arguments, or ``-m``, a module and its arguments.

        Raises:
            subprocess.TimeoutExpired: it ran longer than ``timeout`` seconds, and was killed.
        """
        request = {"argv": argv, "env": env, "cwd": str(cwd or Path.cwd())}
        with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
            given.write(stdin.encode())
            given.seek(0)
            try:
                code = self._exchange(request, [file.fileno() for file in (given, out, err)], timeout)
            except BaseException:  # such as pytest's time limit: its answer must not be taken for the next one's
                if self._control is not None:
                    self._control.close()
                self._control = None
                raise
            texts = []
            for file in (out, err):
                file.seek(0)
                texts.append(file.read().decode(errors="replace"))
        if code is None:
            raise subprocess.TimeoutExpired(argv, timeout)
        return subprocess.CompletedProcess([sys.executable, *argv], code, *texts)

    def _exchange(self, request: dict[str, Any], files: list[int], timeout: float) -> int | None:
        control = self._control = self._control or _start()
        text = json.dumps(request).encode()
        socket.send_fds(control, [_number(len(text))], files)
        control.sendall(text)
        pid = _receive_number(control)
        control.settimeout(timeout)
        try:
            return _receive_number(control)
        except TimeoutError:
            os.kill(pid, signal.SIGKILL)
            control.settimeout(None)
            _receive_number(control)
            return None
        finally:
            control.settimeout(None)


WARM = WarmPython()
"""Of this process."""


def _start() -> socket.socket:
    ours, theirs = socket.socketpair()
    with theirs:
        server = subprocess.Popen(
            [sys.executable, str(Path(__file__)), str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            # The hub's variable is read by an import; each program has a PYTHONPATH of its own.
            env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"HF_HUB_OFFLINE": "1"},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
        )

    def end() -> None:
        ours.close()
        server.terminate()
        server.wait()

    atexit.register(end)
    return ours


def _number(value: int) -> bytes:
    return value.to_bytes(8, "little", signed=True)


def _receive(control: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = control.recv(size - len(data))
        if not more:
            raise EOFError("the server, or the process that started it, has ended")
        data += more
    return data


def _receive_number(control: socket.socket) -> int:
    return int.from_bytes(_receive(control, 8), "little", signed=True)


# ---- the server ----


def _next_program(control: socket.socket) -> list[str] | None:
    """Serves until there is nothing more to do (None), and returns in each child with what it has to run."""
    while True:
        size, files, _, _ = socket.recv_fds(control, 8, 3)
        if not size:
            return None
        request = json.loads(_receive(control, int.from_bytes(size, "little", signed=True)))
        pid = os.fork()
        if pid == 0:
            control.close()
            _become(request, files)
            return request["argv"]
        for file in files:
            os.close(file)
        control.sendall(_number(pid))
        control.sendall(_number(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])))


def _become(request: dict[str, Any], files: list[int]) -> None:
    """What Python sets up when it starts."""
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    script = request["argv"][0]
    sys.path[0] = request["cwd"] if script == "-m" else str(Path(script).parent)
    # PYTHONPATH stands before the standard library, whose first entry is this one.
    at = [Path(entry).name for entry in sys.path].index("python{}{}.zip".format(*sys.version_info))
    sys.path[at:at] = filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep))
    importlib.invalidate_caches()


def _run(argv: list[str]) -> None:
    if argv[0] == "-m":
        sys.argv = argv[1:]
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
    else:
        sys.argv = argv
        runpy.run_path(argv[0], run_name="__main__")


if __name__ == "__main__":
    for name in PRELOADED:
        importlib.import_module(name)
    program = _next_program(socket.socket(fileno=int(sys.argv[1])))
    if program is not None:
        _run(program)
