"""A small HTTP server with the parts of vLLM's API that `rose bench mtp` uses; its drafts are made up by rule."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

SPECULATIVE_TOKENS = 3
MAX_MODEL_LEN = 600


class FakeServer:
    """Each request makes the same steps: 3, 1 and 0 drafts accepted, then 2 for prompts of more than 100 tokens."""

    def __init__(self, *, drafts: bool = True, detailed: bool = False, foreign: int = 0, idle: bool = False) -> None:
        """Args:
        drafts: whether /metrics has the counters.
        detailed: whether answers tell their own steps.
        foreign: tokens that others get meanwhile, at each request.
        idle: whether no step drafts.
        """
        self.drafts, self.detailed, self.foreign, self.idle = drafts, detailed, foreign, idle
        self.count, self.accepted, self.generated = 7, [5, 4, 1], 100  # of earlier requests
        self.bodies: list[dict[str, Any]] = []
        self.keys: set[str | None] = set()
        self._lock = threading.Lock()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                fake.keys.add(self.headers.get("Authorization"))
                self._send(*fake.get(self.path))

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                self._send(*fake.post(self.path, body))

            def _send(self, status: int, content: str) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(content.encode())

            def log_message(self, *args: Any) -> None:
                pass

        self._http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._http.server_port}"
        threading.Thread(target=self._http.serve_forever, daemon=True).start()

    def __enter__(self) -> "FakeServer":
        return self

    def __exit__(self, *args: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def get(self, path: str) -> tuple[int, str]:
        if path == "/v1/models":
            return 200, json.dumps({"data": [{"id": "fake", "max_model_len": MAX_MODEL_LEN}]})
        if path == "/version":
            return 200, json.dumps({"version": "0.0.fake"})
        if path != "/metrics":
            return 404, "no such path"
        with self._lock:
            lines = ["# HELP vllm:generation_tokens_total Tokens.", "# TYPE vllm:generation_tokens_total counter"]
            # Two engines, as with data parallelism: what they count adds up.
            for engine, share in ((0, 0.25), (1, 0.75)):
                labels = f'engine="{engine}",model_name="fake"'
                lines.append(f"vllm:generation_tokens_total{{{labels}}} {self.generated * share}")
                if self.drafts:
                    lines.append(f"vllm:spec_decode_num_drafts_total{{{labels}}} {self.count * share}")
                    for position, count in enumerate(self.accepted):
                        name = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
                        lines.append(f'{name}{{{labels},position="{position}"}} {count * share}')
                        created = name.replace("_total", "_created")
                        lines.append(f'{created}{{{labels},position="{position}"}} 1.7e+09')
        return 200, "\n".join(lines) + "\n"

    def post(self, path: str, body: dict[str, Any]) -> tuple[int, str]:
        if path == "/tokenize":
            text = body["prompt"] if "prompt" in body else "user: " + body["messages"][0]["content"]
            return 200, json.dumps({"tokens": list(map(len, text.split()))})
        if path != "/v1/completions":
            return 404, "no such path"
        steps = [] if self.idle else [3, 1, 0, *([2] if len(body["prompt"]) > 100 else [])]
        generated = min(1 + sum(steps) + len(steps), body["max_tokens"])
        with self._lock:
            self.bodies.append(body)
            self.generated += generated + self.foreign
            self.count += len(steps)
            for accepted in steps:
                for position in range(accepted):
                    self.accepted[position] += 1
        answer: dict[str, Any] = {"usage": {"completion_tokens": generated}}
        if self.detailed:
            drafting: dict[str, Any] = {"num_spec_steps": len(steps)}
            answer["metrics"] = {"speculative_decoding": drafting}
            if steps:
                drafting["per_step_accepted"] = steps
        return 200, json.dumps(answer)
