"""scripts/serve_example.py and scripts/server.py against small servers of our own instead of vLLM."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "scripts"))

import serve_example  # noqa: E402
import server as server_module  # noqa: E402

# A server with a child that ignores SIGTERM and leaves its session.
STUBBORN = """
import http.server, os, signal, subprocess, sys, time
child = [sys.executable, "-c", "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(60)"]
subprocess.Popen(child, start_new_session=True)
print("(APIServer pid=1) INFO 01-01 00:00:00 [core.py:133] Loading weights", flush=True)
time.sleep(1)
print("a line without a level", flush=True)
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


@pytest.fixture
def port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def start(code: str, tmp_path: Path, *arguments: str) -> server_module.Server:
    command = [sys.executable, "-c", code, *arguments]
    return server_module.Server(command=command, environment=dict(os.environ), log=tmp_path / "log")


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_ready_with_progress_then_nothing_left(tmp_path: Path, port: int) -> None:
    server = start(STUBBORN, tmp_path, str(port))
    phases: list[str] = []
    waited = server.wait_ready(
        url=f"http://127.0.0.1:{port}/", timeout=20, progress=lambda _seconds, phase: phases.append(phase)
    )
    assert waited > 0.5 and phases[-1] == "Loading weights"
    pids = server.processes()
    assert len(pids) == 2 and all(map(is_running, pids))
    server.stop(patience=1)
    assert server.processes() == [] and not any(map(is_running, pids))


def test_a_server_that_dies_ends_the_wait_at_once_with_its_log(tmp_path: Path, port: int) -> None:
    lines = ["(W pid=1) ERROR 01-01 00:00:00 [a.py:1] ValueError: no such model", "RuntimeError: see above"]
    server = start(f"import sys; print(*{lines!r}, sep='\\n'); sys.exit(3)", tmp_path)
    begun = time.monotonic()
    message = r"(?s)see above.*exit code 3 before it was ready: ValueError: no such model; log: "
    with pytest.raises(server_module.ServeError, match=message):
        server.wait_ready(url=f"http://127.0.0.1:{port}/", timeout=60, progress=lambda *_: None)
    assert time.monotonic() - begun < 10
    server.stop()


def test_a_server_that_never_answers_is_given_up(tmp_path: Path, port: int) -> None:
    server = start("import time; time.sleep(60)", tmp_path)
    with pytest.raises(server_module.ServeError, match="not ready after 1 s"):
        server.wait_ready(url=f"http://127.0.0.1:{port}/", timeout=1, progress=lambda *_: None)
    server.stop()
    assert server.processes() == []


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_server_ends_with_the_script_that_started_it(tmp_path: Path, port: int, number: signal.Signals) -> None:
    code = f"""
import sys; sys.path.insert(0, {str(ROOT / "scripts")!r})
from pathlib import Path
import os, server, time
s = server.Server(command=["sleep", "60"], environment=dict(os.environ), log=Path({str(tmp_path / "log")!r}))
print(*s.processes(), flush=True)
time.sleep(60)
"""
    script = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert script.stdout is not None
    pids = [int(pid) for pid in script.stdout.readline().split()]
    assert len(pids) == 1
    script.send_signal(number)
    script.communicate(timeout=20)
    deadline = time.monotonic() + 10
    while any(map(is_running, pids)):
        assert time.monotonic() < deadline
        time.sleep(0.05)


# Answers as vLLM and our endpoint do.
ANSWERING = """
import http.server, json, sys
answers = {
    "/health": {}, "/rose/stats": {"workers": []}, "/v1/models": {"object": "list", "data": [{"id": "tiny"}]},
    "/v1/chat/completions": {"id": "1", "object": "chat.completion", "created": 0, "model": "tiny",
        "usage": {"completion_tokens": 3, "prompt_tokens": 1, "total_tokens": 4},
        "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "It answers."}}]},
}
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.rfile.read(int(self.headers.get("Content-Length", 0)))
        self.send_response(200); self.send_header("Content-Type", "application/json"); self.end_headers()
        self.wfile.write(json.dumps(answers[self.path]).encode())
    do_POST = do_GET
    def log_message(self, *_): pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_a_proxy_of_the_environment_is_not_asked_for_our_own_server(
    tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    server = start(ANSWERING, tmp_path, str(port))
    url = f"http://127.0.0.1:{port}"
    try:
        server.wait_ready(url=f"{url}/health", timeout=10, progress=lambda *_: None)
        assert serve_example.get_json(f"{url}/rose/stats") == {"workers": []}
        serve_example.ask(url, "Who?")
    finally:
        server.stop()
    assert "Q: Who?\nA: It answers." in capsys.readouterr().out


@pytest.mark.parametrize("given", ["99999", "0", "http", "²", "-1", "", "9" * 5000])
def test_a_port_that_is_none_is_refused(given: str) -> None:
    result = check_port(given)
    assert result.returncode == 1 and result.stderr.startswith("serve: error: port ") and "PORT=" in result.stderr


@pytest.mark.parametrize(
    ("variable", "message"),
    [
        ("ONCE=yes", "ONCE=yes is neither 1 (stop after the answer) nor 0 (keep serving)"),
        (
            "MODEL=/nowhere",
            "/nowhere is no checkpoint (config.json: No such file or directory); choose one with MODEL=",
        ),
        ("SERVE_ARGS='--seed", "SERVE_ARGS='--seed can't be split into arguments: No closing quotation"),
    ],
)
def test_a_wrong_variable_is_named_before_anything_is_installed(
    checkout, port: int, variable: str, message: str
) -> None:
    result = checkout.run("make", "serve", f"PORT={port}", variable)
    assert result.returncode != 0 and checkout.calls() == []
    assert result.stderr.splitlines()[0].startswith(f"serve: error: {message}")


def test_variables_reach_the_script_as_they_are(checkout, port: int) -> None:
    """A dash in front, quotes: what an argument of the shell or of argparse would trip over."""
    model = checkout.folder / 'a "model"'
    model.mkdir()
    (model / "config.json").write_text("{}")
    given = ["SERVE_ARGS=--no-enforce-eager", 'QUESTION=-v is "what"?', f"MODEL={model}", "ONCE=1", f"PORT={port}"]
    (checkout.folder / "scripts/serve_example.py").write_text("import json, sys; print(json.dumps(sys.argv[1:]))")
    result = checkout.run("make", "serve", *given)
    checked, _installed, ran = result.stdout.partition("install: ")
    options = {"--port": port, "--once": 1, "--mtp": 0, "--model": model, "--question": '-v is "what"?'}
    options |= {"--vllm-args": "--no-enforce-eager"}
    expected = [f"{name}={value}" for name, value in options.items()]
    assert json.loads(checked) == ["--check", *expected]
    assert json.loads(ran.splitlines()[-1]) == expected


def test_two_runs_on_one_port_do_not_share_a_log(tmp_path: Path, port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve_example, "ROOT", tmp_path)
    (tmp_path / "build").mkdir()
    args = serve_example.argparse.Namespace(port=str(port), model=tmp_path)
    with (
        serve_example.held(tmp_path / f"build/serve-{port}.lock", otherwise=pytest.fail),
        pytest.raises(serve_example.ServeError, match=f"port {port} is taken by another make serve"),
    ):
        serve_example.serve(args)


def test_a_port_in_use_is_refused_before_anything_is_installed(checkout) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        number = taken.getsockname()[1]
        result = checkout.run("make", "serve", f"PORT={number}")
    assert result.returncode != 0 and checkout.calls() == []
    assert result.stderr.splitlines()[0] == (
        f"serve: error: port {number} can't be used (Address already in use); choose another with PORT=…"
    )
    assert "port" not in check_port(str(number)).stderr  # free again


def check_port(port: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts/serve_example.py"), "--check", f"--port={port}"]
    return subprocess.run(command, capture_output=True, text=True)


def stats(**changes: object) -> dict:
    worker = {
        "rank": 0,
        "pid": 1,
        "plugin_version": "0.1.0",
        "layers": {"experts": {"RoseCuteDslExperts": 3}, "linear": {"RoseCuteDslMxfp8LinearKernel": 6}},
        "calls": {"grouped_gemm": {"reference": 120}, "mxfp8_linear": {"reference": 240}},
    }
    return {"workers": [worker, {**worker, "rank": 1, **changes}]}


def test_the_summary_names_classes_and_calls(capsys: pytest.CaptureFixture[str]) -> None:
    serve_example.check_stats(stats())
    printed = capsys.readouterr().out
    assert "experts: RoseCuteDslExperts in 3 layers" in printed and "mxfp8_linear: 240 calls of reference" in printed


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"workers": []}, "names no worker"),
        (stats(calls={"grouped_gemm": {"reference": 0}, "mxfp8_linear": {"reference": 9}}), "one call of grouped_gemm"),
        (stats(calls={"grouped_gemm": {"reference": 9}}), "one call of mxfp8_linear"),
        (stats(layers={"experts": {"TritonExperts": 3}, "linear": {}}), r"experts with \['TritonExperts'\]"),
        (
            stats(layers={"experts": {"RoseCuteDslExperts": 3}, "linear": {"RoseCuteDslMxfp8LinearKernel": 5, "X": 1}}),
            "serves linear with .*'X'",
        ),
    ],
)
def test_an_answer_by_other_kernels_is_an_error(broken: dict, message: str) -> None:
    with pytest.raises(serve_example.ServeError, match=message):
        serve_example.check_stats(broken)


@pytest.mark.parametrize(
    ("mtp", "config", "expected"),
    [
        ("0", {}, None),
        ("", {"num_nextn_predict_layers": 1}, None),
        ("1", {}, {"model": "{root}/mtp"}),
        ("1", {"num_nextn_predict_layers": 1}, {}),
        ("{root}/other", {"num_nextn_predict_layers": 1}, {"model": "{root}/other"}),
    ],
)
def test_which_draft_is_served(tmp_path: Path, mtp: str, config: dict, expected: dict | None) -> None:
    for name in ("target", "mtp", "other"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    arguments = {"mtp": mtp.format(root=tmp_path), "model": tmp_path / "target", "port": "1", "vllm_args": ""}
    args = serve_example.argparse.Namespace(**arguments)
    found = serve_example.speculation(args)
    command = serve_example.serve_command(args, tmp_path / "target")
    if expected is None:
        assert found is None and "--speculative-config" not in command
        return
    expected = {key: value.format(root=tmp_path) for key, value in expected.items()}
    assert found == {"method": "mtp", "num_speculative_tokens": serve_example.DRAFT_TOKENS, **expected}
    assert json.loads(command[command.index("--speculative-config") + 1]) == found


@pytest.mark.parametrize("mtp", ["1", "/nowhere"])
def test_a_draft_that_is_not_there_is_named(tmp_path: Path, mtp: str) -> None:
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(serve_example.ServeError, match=rf"MTP={mtp}: .* is no draft directory \(no config.json\)"):
        serve_example.speculation(serve_example.argparse.Namespace(mtp=mtp, model=tmp_path))


@pytest.mark.parametrize(("drafted", "says"), [(9, "MTP: 6 of 9 drafted tokens accepted (67%)"), (0, "not one token")])
def test_the_summary_says_how_many_drafts_were_accepted(
    tmp_path: Path, port: int, capsys: pytest.CaptureFixture[str], drafted: int, says: str
) -> None:
    names = {"draft_tokens": drafted, "accepted_tokens": 6 if drafted else 0}
    lines = [f'vllm:spec_decode_num_{name}_total{{engine="0"}} {count}.0' for name, count in names.items()]
    (tmp_path / "metrics").write_text("\n".join(lines))
    code = "import http.server as h, sys; h.test(h.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind='127.0.0.1')"
    server = server_module.Server(
        command=[sys.executable, "-c", f"import os; os.chdir({str(tmp_path)!r}); {code}", str(port)],
        environment=dict(os.environ),
        log=tmp_path / "log",
    )
    url = f"http://127.0.0.1:{port}/metrics"
    try:
        server.wait_ready(url=url, timeout=20, progress=lambda *_: None)
        if drafted:
            serve_example.check_drafting(url)
            assert says in capsys.readouterr().out
        else:
            with pytest.raises(serve_example.ServeError, match=says):
                serve_example.check_drafting(url)
    finally:
        server.stop()
