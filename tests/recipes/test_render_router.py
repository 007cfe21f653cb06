"""The rendered command lines of vllm-router, run by vllm-router itself in front of servers that are not vLLM."""

import json
import os
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path

import pytest
import yaml
from render_cases import OPTIONS, aggregated, split

from vllm_rose_plugin.recipes.render.common import place
from vllm_rose_plugin.recipes.render.kubernetes import render_kubernetes
from vllm_rose_plugin.recipes.render.router import VERSION, static_router

ROUTER = Path(sys.executable).with_name("vllm-router")
TAKEN = {"remote_engine_id": "engine", "remote_block_ids": [1], "remote_host": "10.0.0.1", "remote_port": 5600}


class _Server(BaseHTTPRequestHandler):
    """Answers like a vLLM server that was asked for KV, and keeps what it was asked."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def answer(self, data):
        body = json.dumps(data).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.answer({"object": "list", "data": [{"id": "m"}]})

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append(body)
        choice = {"index": 0, "text": self.server.role, "finish_reason": "stop"}
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        answer = {"id": "1", "object": "text_completion", "model": "m", "choices": [choice], "usage": usage}
        self.answer(answer | {"kv_transfer_params": TAKEN})


class _ClusterApi(_Server):
    """The two calls of Kubernetes' API that watch pods."""

    def do_GET(self):
        path, _, query = self.path.partition("?")
        self.server.asked.append(path)
        if "watch=true" in query:
            self.send_response(200)
            self.send_header("Content-Type", "application/json")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            self.server.closing.wait(30)
        else:
            listing = {"kind": "PodList", "apiVersion": "v1", "metadata": {"resourceVersion": "1"}}
            self.answer(listing | {"items": self.server.pods})


@contextmanager
def _serving(handler, role, address="127.0.0.1", port=0) -> Iterator[ThreadingHTTPServer]:
    with ThreadingHTTPServer((address, port), handler) as server:
        server.role, server.asked, server.closing = role, [], threading.Event()
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.closing.set()
        server.shutdown()


def _free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def _routing(words, folder, **environment):
    """The router with ports of ours in place of the rendered ones; yields a function that asks it."""
    words = list(words)
    port = _free_port()
    for flag, value in (("--host", "127.0.0.1"), ("--port", port), ("--prometheus-port", _free_port())):
        words[words.index(flag) + 1] = str(value)
    log = folder / "router.log"
    with log.open("w") as out:
        process = subprocess.Popen([ROUTER, *words[1:]], env=os.environ | environment, stdout=out, stderr=out)

    def ask():
        data = json.dumps({"model": "m", "prompt": "hello", "max_tokens": 5}).encode()
        url = f"http://127.0.0.1:{port}/v1/completions"
        request = urllib.request.Request(url, data, {"Content-Type": "application/json"})
        until = time.monotonic() + 40
        while True:
            try:
                with urllib.request.urlopen(request, timeout=10) as answer:
                    return json.load(answer)["choices"][0]["text"]
            except OSError:
                assert process.poll() is None and time.monotonic() < until, log.read_text()[-3000:]
                time.sleep(0.2)

    def alive():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/liveness", timeout=5) as answer:
            return answer.status

    try:
        yield ask, alive
    finally:
        process.kill()
        process.wait()


def _check_handover(prefill, decode):
    (first,) = prefill.asked
    assert first["max_tokens"] == 1
    assert first["kv_transfer_params"]["do_remote_decode"] is True
    (second,) = decode.asked
    assert second["max_tokens"] == 5
    assert second["kv_transfer_params"] == TAKEN


def test_it_is_the_router_that_the_flags_are_from():
    assert version("vllm-router") == VERSION


@pytest.mark.slow
def test_prefill_then_decode(tmp_path):
    deployment = place(split(tmp_path), OPTIONS, leader=str, own=str)
    with _serving(_Server, "prefill") as prefill, _serving(_Server, "decode") as decode:
        urls = {s.role: [f"http://127.0.0.1:{s.server_port}"] for s in (prefill, decode)}
        with _routing(static_router(deployment, urls), tmp_path) as (ask, _):
            assert ask() == "decode"
        _check_handover(prefill, decode)


@pytest.mark.slow
def test_two_whole_servers(tmp_path):
    router = {"kind": "vllm-router", "policy": "round_robin"}
    recipe = aggregated(tmp_path, {"gpus": 1, "replicas": 2, "args": {}}, router=router)
    deployment = place(recipe, OPTIONS, leader=str, own=str)
    with _serving(_Server, "one") as one, _serving(_Server, "two") as two:
        urls = {"serve": [f"http://127.0.0.1:{s.server_port}" for s in (one, two)]}
        with _routing(static_router(deployment, urls), tmp_path) as (ask, _):
            assert {ask(), ask(), ask(), ask()} == {"one", "two"}


def _pod(name, address, template, *, ready=True):
    """A pod of a rendered template as the API would show it."""
    metadata = {"name": name, "namespace": "here", "uid": name, "labels": template["metadata"]["labels"]}
    status = {"phase": "Running", "podIP": address}
    conditions = [{"type": "Ready", "status": "True" if ready else "False"}]
    return {"metadata": metadata, "spec": {"containers": []}, "status": status | {"conditions": conditions}}


@pytest.mark.slow
def test_kubernetes_router_finds_the_rendered_pods(tmp_path):
    """Leaders of both roles are found by their labels; a headless worker and a pod that isn't ready get nothing."""
    roles = {
        "prefill": {"gpus": 4, "args": {"tensor-parallel-size": 4}},
        "decode": {"gpus": 8, "args": {"port": 8200, "data-parallel-size": 8}},
    }
    rack = {"gpu": "GB200", "nodes": 3, "gpus_per_node": 4}
    recipe = split(tmp_path, hardware=rack, roles=roles, router={"policy": "round_robin"})
    (text,) = render_kubernetes(recipe, OPTIONS).values()
    objects = list(yaml.safe_load_all(text))
    sets = {o["metadata"]["name"]: o["spec"]["leaderWorkerTemplate"] for o in objects if o["kind"] == "LeaderWorkerSet"}
    (deployment,) = [o for o in objects if o["kind"] == "Deployment"]
    container = deployment["spec"]["template"]["spec"]["containers"][0]
    words = [word.replace("$(POD_NAMESPACE)", "here") for word in container["command"] + container["args"]]
    port = _free_port()
    words[words.index("--service-discovery-port") + 1] = str(port)
    leaders = {
        "prefill": ("127.0.0.2", sets["split-prefill"]["workerTemplate"]),
        "decode": ("127.0.0.3", sets["split-decode"]["leaderTemplate"]),
    }
    others = [
        _pod("decode-0-1", "127.0.0.4", sets["split-decode"]["workerTemplate"]),
        _pod("prefill-1", "127.0.0.5", sets["split-prefill"]["workerTemplate"], ready=False),
    ]
    with ExitStack() as stack:
        servers = {
            name: stack.enter_context(_serving(_Server, name, address, port)) for name, (address, _) in leaders.items()
        }
        idle = [stack.enter_context(_serving(_Server, "idle", pod["status"]["podIP"], port)) for pod in others]
        api = stack.enter_context(_serving(_ClusterApi, "api"))
        api.pods = others + [_pod(name, *place_) for name, place_ in leaders.items()]
        access = tmp_path / "cluster.json"
        cluster = {"name": "c", "cluster": {"server": f"http://127.0.0.1:{api.server_port}"}}
        context = {"name": "c", "context": {"cluster": "c", "user": "u"}}
        users = [{"name": "u", "user": {}}]
        config = {"apiVersion": "v1", "kind": "Config", "current-context": "c", "users": users}
        access.write_text(json.dumps(config | {"clusters": [cluster], "contexts": [context]}))
        ask, alive = stack.enter_context(_routing(words, tmp_path, KUBECONFIG=str(access)))
        assert ask() == "decode"
        _check_handover(servers["prefill"], servers["decode"])
        assert {ask() for _ in range(4)} == {"decode"}
        assert alive() == 200
        assert [server.asked for server in idle] == [[], []]
        assert set(api.asked) == {"/api/v1/namespaces/here/pods"}
