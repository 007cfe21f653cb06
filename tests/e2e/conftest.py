"""Fixtures of the end-to-end tests: checkpoints, torch models, and one running server at a time.

Tests are sorted by the server they ask for, so that each starts once.
"""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from e2e_setup import ANSWER_TOKENS, EVERY_SERVER, EXAMPLE, FIRST, HERE, Configuration, Served
from torch_forward import WINDOW, TorchModel, dequantized_checkpoint
from transformers import AutoTokenizer
from vllm_cache import vllm_cache
from vllm_server import ROSE_FLAGS, Server, serve_environment


def server_of(item: pytest.Item) -> str | None:
    """The name of the server that a test asks for."""
    if "served" not in getattr(item, "fixturenames", ()):
        return None
    parameters = item.callspec.params if hasattr(item, "callspec") else {}
    return parameters.get("served", FIRST)


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of one server next to each other, and those without a server last."""
    names = list(EVERY_SERVER)

    def rank(item: pytest.Item) -> int:
        name = server_of(item)
        return len(names) if name is None else names.index(name)

    positions = [i for i, item in enumerate(items) if HERE in item.path.parents]
    ordered = sorted((items[i] for i in positions), key=rank)
    for position, item in zip(positions, ordered, strict=True):
        items[position] = item


class Servers:
    """Starts servers on demand and keeps the last one.

    Starting one takes longer than its tests and leaves a core idle. So the next one starts meanwhile, unless the ranks
    of the running one take both cores.

    Args:
        needed: names of the servers that the collected tests ask for, in their order.
    """

    def __init__(self, model: Path, cache: Path, directory: Path, needed: list[str]) -> None:
        self._model, self._cache, self._directory, self._needed = model, cache, directory, needed
        self._servers: dict[str, Server] = {}
        self._name: str | None = None

    def get(self, configuration: Configuration, meanwhile: Callable[[], object] = lambda: None) -> Server:
        """The running server of this configuration; another one is stopped first.

        Args:
            meanwhile: what to do while it starts.
        """
        name = configuration.name
        if self._name != name:
            self.stop(but=name)
            self._start(configuration)
            try:
                meanwhile()
                seconds = self._servers[name].wait_ready()
            except BaseException:
                self.stop()
                raise
            self._name = name
            print(f"\n{name}: ready after another {seconds:.0f} s")
            if configuration.ranks == 1 and name in self._needed[:-1]:
                self._start(EVERY_SERVER[self._needed[self._needed.index(name) + 1]])
        return self._servers[name]

    def _start(self, configuration: Configuration) -> None:
        if configuration.name not in self._servers:
            self._servers[configuration.name] = Server(
                model=self._model,
                arguments=(*ROSE_FLAGS, "--max-logprobs", "-1", *configuration.arguments),
                environment=serve_environment(self._cache, configuration.ranks),
                log=self._directory / f"{configuration.name}.log",
            )

    def stop(self, but: str | None = None) -> None:
        """Stop what runs, except for one that may have been started already."""
        self._name = None
        for name in [name for name in self._servers if name != but]:
            self._servers.pop(name).stop()


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example model, converted to MXFP8 by our own command."""
    from vllm_rose_plugin.cli import main

    destination = tmp_path_factory.mktemp("checkpoints") / "modelopt"
    assert main(["quantize", str(EXAMPLE / "target"), str(destination)]) == 0
    return destination


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """vLLM's cache of the test run's own, but for what it finds out about model classes."""
    folder = tmp_path_factory.mktemp("cache")
    shared = vllm_cache("0.32") / "modelinfos"
    shared.mkdir(parents=True, exist_ok=True)
    (folder / "modelinfos").symlink_to(shared)
    return folder


@pytest.fixture(scope="session")
def servers(
    request: pytest.FixtureRequest, checkpoint: Path, cache: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Servers]:
    """The pool; its end asserts that no process is left."""
    asked = {server_of(item) for item in request.session.items}
    pool = Servers(
        checkpoint, cache, tmp_path_factory.mktemp("servers"), [name for name in EVERY_SERVER if name in asked]
    )
    yield pool
    pool.stop()


@pytest.fixture
def served(request: pytest.FixtureRequest, servers: Servers) -> Served:
    """The server that the test is parametrized with, the eager one by default."""
    configuration = EVERY_SERVER[getattr(request, "param", FIRST)]
    asked = {name for item in request.session.items for name in getattr(item, "fixturenames", ())}

    def references() -> None:
        for name in ("bf16_answers", "bf16_nll", "plain_forward", "rounding_forward"):
            if name in asked:
                request.getfixturevalue(name)

    return Served(servers.get(configuration, meanwhile=references), configuration)


# ---- what answers are compared with ----


@pytest.fixture(scope="session")
def tokenizer():
    """The example's tokenizer."""
    return AutoTokenizer.from_pretrained(EXAMPLE / "target")


@pytest.fixture(scope="session")
def validation_tokens(tokenizer) -> list[int]:
    """Token ids of the held-out text."""
    text = (EXAMPLE / "validation.txt").read_text(encoding="utf-8")
    return tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]


@pytest.fixture(scope="session")
def windows(validation_tokens: list[int]) -> list[list[int]]:
    """Every third of the 51 windows that the example's README takes the perplexity from: 17 x 1023 predictions."""
    starts = range(0, len(validation_tokens) - WINDOW + 1, 3 * WINDOW)
    return [validation_tokens[start : start + WINDOW] for start in starts]


@pytest.fixture(scope="session")
def questions() -> list[str]:
    """The 20 questions with stable answers."""
    return (EXAMPLE / "prompts.txt").read_text(encoding="utf-8").split("\n")[:20]


@pytest.fixture(scope="session")
def question_tokens(tokenizer, questions: list[str]) -> list[list[int]]:
    """Token ids of the questions in the chat template."""
    chats = [[{"role": "user", "content": question}] for question in questions]
    return [tokenizer.apply_chat_template(c, add_generation_prompt=True, return_dict=True)["input_ids"] for c in chats]


@pytest.fixture(scope="session")
def bf16_model() -> TorchModel:
    """The unquantized model as it is served: bf16."""
    return TorchModel(EXAMPLE / "target", dtype=torch.bfloat16)


@pytest.fixture(scope="session")
def bf16_answers(bf16_model: TorchModel, tokenizer, question_tokens: list[list[int]]) -> list[str]:
    """What the BF16 model answers to the questions, greedily."""
    return [tokenizer.decode(answer) for answer in bf16_model.greedy(question_tokens, max_tokens=ANSWER_TOKENS)]


@pytest.fixture(scope="session")
def bf16_nll(bf16_model: TorchModel, windows: list[list[int]]) -> float:
    """Its mean negative log-likelihood of the windows."""
    return bf16_model.mean_nll(windows)


@pytest.fixture(scope="session")
def dequantized(checkpoint: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The MXFP8 checkpoint as an unquantized one."""
    return dequantized_checkpoint(
        source=checkpoint, destination=tmp_path_factory.mktemp("dequantized") / "modelopt_dequantized"
    )


@pytest.fixture(scope="session")
def plain_forward(dequantized: Path) -> TorchModel:
    """float32 forward of the dequantized weights: the truth that W8A16 serving rounds."""
    return TorchModel(dequantized, dtype=torch.float32)


@pytest.fixture(scope="session")
def rounding_forward(dequantized: Path) -> TorchModel:
    """The same with activations through MXFP8, as W8A8 defines them."""
    return TorchModel(dequantized, dtype=torch.float32, round_activations=True)


@pytest.fixture(scope="session")
def offline_environment(cache: Path) -> dict[str, str]:
    """For a vLLM engine inside one process: with one thread, since two wait for each other most of the time there."""
    return serve_environment(cache) | {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "OMP_NUM_THREADS": "1"}
