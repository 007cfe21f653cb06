"""A running vLLM server: its OpenAI API, its tokenizer and its counters, over HTTP."""

import json
import os
import re
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from vllm_rose_plugin.acceptance.measure import AcceptanceError, Answer, Counters
from vllm_rose_plugin.acceptance.tally import Tally

_SAMPLE = re.compile(r"^(vllm:[a-z_]+)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_POSITION = re.compile(r'position="(\d+)"')
_DRAFTS = "vllm:spec_decode_num_drafts_total"
_ACCEPTED = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
_GENERATED = "vllm:generation_tokens_total"
_COUNTERS_SECONDS = 10.0
_REQUEST_SECONDS = 600.0


def read_counters(text: str) -> Counters | None:
    """The counters in the text of ``/metrics``, added up over engines; None where the server has no draft counters."""
    drafts = generated = 0.0
    positions: dict[int, float] = {}
    found = False
    for name, labels, value in _SAMPLE.findall(text):
        if name == _DRAFTS:
            found, drafts = True, drafts + float(value)
        elif name == _GENERATED:
            generated += float(value)
        elif name == _ACCEPTED and (match := _POSITION.search(labels)):
            positions[int(match[1])] = positions.get(int(match[1]), 0.0) + float(value)
    if not found or not positions:
        return None
    accepted = [int(positions.get(position, 0)) for position in range(max(positions) + 1)]
    return Counters(Tally(accepted, int(drafts)), int(generated))


class Server:
    """A server that somebody else started."""

    draft: str | None = None  # it doesn't say

    def __init__(self, url: str, *, concurrency: int) -> None:
        """Args:
            url: such as http://127.0.0.1:8000.
            concurrency: requests at the same time.

        Raises:
            AcceptanceError: nothing answers there, or it is started without a draft.
        """
        self.name = url.rstrip("/")
        self._concurrency = concurrency
        # Not through a proxy: the server is most often on this machine or in its network.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        counters = read_counters(self._request("/metrics").decode())
        if counters is None:
            raise AcceptanceError(
                f"{self.name} drafts nothing: its /metrics has no vllm:spec_decode_* counters. Start it with "
                '--speculative-config \'{"method": "mtp", "num_speculative_tokens": 1}\' and without '
                "--disable-log-stats"
            )
        self.speculative_tokens = len(counters.drafts.accepted)
        card = self._json("/v1/models")["data"][0]
        self.model = str(card["id"])
        self.max_model_len = int(card["max_model_len"])
        self.versions = f"vllm {self._json('/version')['version']}"

    def _request(self, path: str, body: dict[str, Any] | None = None) -> bytes:
        headers = {"Content-Type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        try:
            request = urllib.request.Request(self.name + path, data, headers)
            with self._opener.open(request, timeout=_REQUEST_SECONDS) as answer:
                content: bytes = answer.read()
                return content
        except urllib.error.HTTPError as error:
            text = error.read(500).decode(errors="replace")
            raise AcceptanceError(f"{self.name}{path} answered {error.code}: {text}") from None
        except (OSError, ValueError) as error:
            reason = getattr(error, "reason", error)
            raise AcceptanceError(f"{self.name} can't be reached ({reason}): give --url of a running vLLM") from None

    def _json(self, path: str, body: dict[str, Any] | None = None) -> Any:
        try:
            return json.loads(self._request(path, body))
        except ValueError:
            raise AcceptanceError(f"{self.name}{path} answered no JSON: is it a vLLM server?") from None

    def tokenize(self, text: str) -> list[int]:
        """By the server's own tokenizer."""
        return list(self._json("/tokenize", {"model": self.model, "prompt": text})["tokens"])

    def tokenize_question(self, question: str) -> list[int]:
        """By the server's own chat template."""
        messages = [{"role": "user", "content": question}]
        return list(self._json("/tokenize", {"model": self.model, "messages": messages})["tokens"])

    def answer(self, prompts: Sequence[list[int]], *, max_tokens: int, temperature: float) -> list[Answer]:
        """One request for each prompt."""

        def one(prompt: list[int]) -> Answer:
            body = {"model": self.model, "prompt": prompt, "max_tokens": max_tokens, "temperature": temperature}
            answer = self._json("/v1/completions", body)
            drafting = ((answer.get("metrics") or {}).get("speculative_decoding")) or {}
            steps = drafting.get("per_step_accepted")
            # vLLM leaves the list out where it is empty; num_spec_steps is 0 then.
            if steps is None and drafting.get("num_spec_steps") == 0:
                steps = []
            return Answer(answer["usage"]["completion_tokens"], None if steps is None else tuple(steps))

        with ThreadPoolExecutor(self._concurrency) as pool:
            return list(pool.map(one, prompts))

    def counters(self, *, generated: int) -> Counters | None:
        """Of ``/metrics``, which vLLM may update a moment after an answer."""
        deadline = time.monotonic() + _COUNTERS_SECONDS
        while True:
            counters = read_counters(self._request("/metrics").decode())
            if counters is None or counters.generated >= generated or time.monotonic() > deadline:
                return counters
            time.sleep(0.1)
