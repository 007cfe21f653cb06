"""A prefill server, a decode server and vLLM's router in front of them; KV goes through NIXL over UCX, or files."""

import contextlib
import json
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from vllm_server import HOST, MODEL, ROSE_FLAGS, Server, free_port, script, start_session, tail

PROMPT_TOKENS = "vllm:prompt_tokens_by_source_total"
COMPUTED, TRANSFERRED = 'source="local_compute"', 'source="external_kv_transfer"'
# The first request makes the two sides shake hands, for which vLLM allows 5 s; every NIXL agent keeps a core busy with
# polling, so on a machine with few cores that can be too short once.
HANDSHAKES = 4
# Prefill keeps KV for 30 s unless it is told otherwise; where pollers take the cores, decode may come later.
LEASE_SECONDS = 600


def through_nixl(buffer: str) -> dict[str, Any]:
    """`--kv-transfer-config` without the role; NIXL's buffers lie on the `cpu` or in `cuda` memory."""
    extra = {"kv_lease_duration": LEASE_SECONDS}
    return {"kv_connector": "NixlConnector", "kv_buffer_device": buffer, "kv_connector_extra_config": extra}


def through_files(directory: Path) -> dict[str, Any]:
    """The same for vLLM's ExampleConnector: whole blocks of KV become files, which nobody polls for."""
    extra = {"shared_storage_path": str(directory)}
    return {"kv_connector": "ExampleConnector", "kv_connector_extra_config": extra}


@dataclass(frozen=True)
class Role:
    """How one of the two servers is started.

    Args:
        kv_role: `kv_producer` or `kv_consumer`.
        arguments: of `vllm serve`, beyond those that both share.
        environment: its own variables.
    """

    kv_role: str
    arguments: tuple[str, ...]
    environment: dict[str, str]


class Router(Server):
    """vLLM's router, which asks the prefill server for one token and then the decode server for all of them."""

    def __init__(self, *, prefill: Server, decode: Server, environment: dict[str, str], log: Path) -> None:
        self.port = free_port()
        self.log = log
        command = [*script("vllm-router", "vllm_router.launch_router"), "--vllm-pd-disaggregation"]
        command += ["--prefill", f"http://{HOST}:{prefill.port}", "--decode", f"http://{HOST}:{decode.port}"]
        command += ["--policy", "round_robin", "--worker-startup-check-interval", "1", "--disable-retries"]
        command += ["--host", HOST, "--port", str(self.port), "--prometheus-port", str(free_port())]
        self.process = start_session(command, environment, log)


class Disaggregated:
    """The three processes; a context manager that leaves none of them behind.

    Args:
        model: MXFP8 checkpoint.
        prefill, decode: the two servers.
        transfer: see through_nixl and through_files.
        environment: of all three.
        directory: for the logs.
    """

    def __init__(
        self,
        *,
        model: Path,
        prefill: Role,
        decode: Role,
        transfer: dict[str, Any],
        environment: dict[str, str],
        directory: Path,
    ) -> None:
        self._model, self._roles, self._transfer = model, {"prefill": prefill, "decode": decode}, transfer
        self._environment, self._directory = environment, directory
        self._running = contextlib.ExitStack()

    def __enter__(self) -> "Disaggregated":
        with contextlib.ExitStack() as stack:
            self.prefill, self.decode = (self._start(name, stack) for name in self._roles)
            seconds = max(server.wait_ready() for server in (self.prefill, self.decode))
            self.router = Router(
                prefill=self.prefill,
                decode=self.decode,
                environment=self._environment,
                log=self._directory / "router.log",
            )
            stack.callback(self.router.stop)
            self.router.wait_ready()
            self._shake_hands()
            self._running = stack.pop_all()
        print(f"\nprefill and decode: ready after {seconds:.0f} s")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._running.close()

    def _start(self, name: str, stack: contextlib.ExitStack) -> Server:
        role = self._roles[name]
        transfer = self._transfer | {"kv_role": role.kv_role}
        # Each server listens on a port of its own for the other's handshake.
        side = {"VLLM_NIXL_SIDE_CHANNEL_HOST": HOST, "VLLM_NIXL_SIDE_CHANNEL_PORT": str(free_port())}
        server = Server(
            model=self._model,
            arguments=(*ROSE_FLAGS, "--kv-transfer-config", json.dumps(transfer), *role.arguments),
            environment=self._environment | side | role.environment,
            log=self._directory / f"{name}.log",
        )
        stack.callback(server.stop)
        return server

    def _shake_hands(self) -> None:
        for _ in range(HANDSHAKES):
            # Two tokens: of a prompt with one, ExampleConnector (vLLM 0.32) says that -128 tokens are stored.
            body = {"model": MODEL, "prompt": [1, 1], "max_tokens": 1}
            if self.router.request("POST", "/v1/completions", body)[0] == 200:
                return
        logs = "\n".join(
            f"{server.log.name}:\n{tail(server.log)}" for server in (self.prefill, self.decode, self.router)
        )
        raise AssertionError(f"no transfer worked:\n{logs}")


@dataclass(frozen=True)
class Counts:
    """What the two servers have counted so far."""

    prefill_computed: float
    prefill_generated: float
    decode_computed: float
    decode_transferred: float
    kv_bytes: float
    failures: float

    @classmethod
    def of(cls, servers: Disaggregated) -> "Counts":
        """Read from their metrics."""
        prefill, decode = servers.prefill, servers.decode
        failed = ("vllm:nixl_num_failed_transfers_total", "vllm:nixl_num_failed_notifications_total")
        return cls(
            prefill_computed=prefill.metric(PROMPT_TOKENS, COMPUTED),
            prefill_generated=prefill.metric("vllm:generation_tokens_total"),
            decode_computed=decode.metric(PROMPT_TOKENS, COMPUTED),
            decode_transferred=decode.metric(PROMPT_TOKENS, TRANSFERRED),
            kv_bytes=decode.metric("vllm:nixl_bytes_transferred_sum"),
            failures=sum(decode.metric(name) for name in failed),
        )

    def since(self, earlier: "Counts") -> "Counts":
        """The difference."""
        return Counts(*(now - then for now, then in zip(vars(self).values(), vars(earlier).values(), strict=True)))
