"""A server process of our own: start it, watch it come up, end it with everything it started."""

import contextlib
import ctypes
import http.client
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

MARK = "ROSE_SERVE_ID"
# What vLLM puts before a message: process name, level, date, time, file and line.
_LOG_PREFIX = re.compile(r"^(\(\S.*?\)\s+)?(INFO|WARNING|ERROR)\s+\S+\s+\S+\s+\[[^\]]*\]\s+")
_EXCEPTION = re.compile(r"(?<![\w.])[A-Za-z_][\w.]*(Error|Exception): \S.*")


class ServeError(Exception):
    """Serving failed; the text is what the user sees."""


def say(text: str) -> None:
    """One line of progress."""
    print(f"serve: {text}", flush=True)


def open_local(url: str, *, timeout: float) -> http.client.HTTPResponse:
    """GET ``url`` of this machine, past any proxy of the environment: that can't reach our 127.0.0.1."""
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    answer: http.client.HTTPResponse = opener.open(url, timeout=timeout)
    return answer


def port_error(*, host: str, port: int) -> str | None:
    """Why a server can't listen on the port, in one line, or None."""
    if not 1 <= port <= 65535:
        return f"port {port} is outside 1 to 65535; choose one with PORT=…"
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
            probe.listen(1)
        except OSError as error:
            return f"port {port} can't be used ({error.strerror}); choose another with PORT=…"
    return None


def log_phase(log: Path) -> str:
    """The last message of the server's log, without vLLM's prefix; before there is one, what vLLM does then."""
    with log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - 8192))
        lines = file.read().decode(errors="replace").replace("\r", "\n").splitlines()
    for line in reversed(lines):
        message = _LOG_PREFIX.sub("", line).strip()
        if message and _LOG_PREFIX.match(line):
            return message
    return "importing vLLM"


def root_cause(log: Path) -> str:
    """The first exception in the log, in one line and with a colon before it; later ones only follow from it."""
    for line in log.read_text(errors="replace").splitlines():
        if match := _EXCEPTION.search(_LOG_PREFIX.sub("", line)):
            return f": {match[0][:500]}"
    return ""


def log_tail(log: Path, *, lines: int = 25) -> str:
    """The end of the log."""
    return "\n".join(log.read_text(errors="replace").splitlines()[-lines:])


class Server:
    """One server, its log and every process that it started, in a session of their own.

    Args:
        command: what to run.
        environment: its environment variables; one more marks every process that inherits it.
        log: file for its output, overwritten.
    """

    def __init__(self, *, command: list[str], environment: dict[str, str], log: Path) -> None:
        self.log = log
        self._mark = f"{MARK}={uuid.uuid4().hex}".encode()
        name, _, value = self._mark.decode().partition("=")
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                command,
                env={**environment, name: value},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=_end_with_parent,
            )

    def exit_code(self) -> int | None:
        """The server's exit code, or None while it runs."""
        return self._process.poll()

    def wait_ready(self, *, url: str, timeout: float, progress: Callable[[float, str], None]) -> float:
        """Wait until ``url`` answers 200.

        Returns:
            Seconds waited.

        Raises:
            ServeError: the server ended, or ``timeout`` seconds passed; the log's tail is in the text.
        """
        start = time.monotonic()
        while True:
            waited = time.monotonic() - start
            if (code := self.exit_code()) is not None:
                raise ServeError(
                    f"{log_tail(self.log)}\nthe server ended with exit code {code} before it was ready"
                    f"{root_cause(self.log)}; log: {self.log}"
                )
            with contextlib.suppress(OSError), open_local(url, timeout=2) as answer:
                if answer.status == 200:
                    return waited
            if waited > timeout:
                raise ServeError(
                    f"{log_tail(self.log)}\nthe server was not ready after {timeout:.0f} s; log: {self.log}"
                )
            progress(waited, log_phase(self.log))
            time.sleep(0.5)

    def processes(self) -> list[int]:
        """Ids of the running processes that this server started, itself included."""
        return [pid for pid, environment in _environments() if self._mark in environment.split(b"\0")]

    def stop(self, *, patience: float = 20.0) -> None:
        """End the server: politely, and after ``patience`` seconds by force.

        Raises:
            ServeError: a process is left all the same.
        """
        left: set[int] = set()
        for signal_number, seconds in ((signal.SIGTERM, patience), (signal.SIGKILL, 10.0)):
            # The server first, since it ends its workers itself; by force all at once.
            targets = [self._process.pid] if signal_number == signal.SIGTERM else self.processes()
            for pid in targets:
                if pid != self._process.pid or self.exit_code() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal_number)
            deadline = time.monotonic() + seconds
            while time.monotonic() < deadline:
                # A process on its way out has no environment any more, so the ones seen before are asked for by id.
                left = {pid for pid in left.union(self.processes()) if _is_running(pid)}
                if self.exit_code() is not None and not left:
                    return
                time.sleep(0.1)
        raise ServeError(f"processes left behind: {sorted(left)}")


def _environments() -> Iterator[tuple[int, bytes]]:
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                yield int(entry.name), (entry / "environ").read_bytes()


def _is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def _end_with_parent() -> None:
    """In the child: ask Linux for SIGTERM when the parent dies, so that a parent killed by force leaves no server."""
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGTERM)


class ProgressLine:
    """Elapsed seconds and the last phase: one line rewritten on a terminal, else a line per 10 s or new phase."""

    def __init__(self) -> None:
        self._terminal = sys.stdout.isatty()
        self._shown = (-10.0, "")

    def __call__(self, seconds: float, phase: str) -> None:
        """Show the state."""
        if self._terminal:
            print(f"\r\033[Kserve: starting, {seconds:.0f} s  {phase[:90]}", end="", flush=True)
        elif seconds - self._shown[0] >= 10:
            self._shown = (seconds, phase)
            print(f"serve: starting, {seconds:.0f} s  {phase[:120]}", flush=True)

    def clear(self) -> None:
        """Remove the line from a terminal."""
        if self._terminal:
            print("\r\033[K", end="", flush=True)
