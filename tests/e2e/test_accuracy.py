"""What a server answers against plain torch, for every configuration; the printed figures are in docs/accuracy.md."""

import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from e2e_setup import ANSWER_TOKENS, CONFIGURATIONS, Served
from torch_forward import TorchModel
from vllm_server import Server

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("served", CONFIGURATIONS, indirect=True)]

KL_LIMIT = {"bf16": 1e-3, "mxfp8": 1e-2}
"""Mean KL divergence from the plain forward, nats."""
OWN_ROUNDING = (0.5, 2.0)
"""W8A8: the median divergence, over that of a torch forward that rounds activations itself. The two can't be compared
position by position: a last bit of bf16 moves an activation to the next E4M3 step, and three layers amplify it."""
PERPLEXITY_MARGIN = 1e-2
"""Relative; measured differences are below 3e-3."""
SAME_ANSWERS = 18
"""Of 20; all 20 were measured."""
EXCERPT_TOKENS = 64
VOCABULARY = 4096


def served_logprobs(server: Server, token_ids: list[int]) -> torch.Tensor:
    """``[len(token_ids) - 1, vocab]`` float64 over HTTP; row i predicts token i + 1."""
    answer = server.post("/v1/completions", prompt=token_ids, max_tokens=1, prompt_logprobs=-1)
    first, *rows = answer["choices"][0]["prompt_logprobs"]
    assert first is None and len(rows) == len(token_ids) - 1
    out = torch.full((len(rows), VOCABULARY), math.nan, dtype=torch.float64)
    for row, entries in zip(out, rows, strict=True):
        row[[int(token) for token in entries]] = torch.tensor([e["logprob"] for e in entries.values()]).double()
    assert not out.isnan().any(), "the server left tokens out"
    return out


def divergences(expected: TorchModel, answers: list[tuple[list[int], torch.Tensor]]) -> torch.Tensor:
    """KL(expected || answer) at every position, nats, over the whole vocabulary."""
    out = []
    for excerpt, answer in answers:
        logprobs = expected.logprobs(excerpt)[:-1]
        out.append((logprobs.exp() * (logprobs - answer)).sum(-1))
    return torch.cat(out)


def test_logprobs_agree_with_a_torch_forward_of_the_dequantized_weights(
    served: Served, validation_tokens: list[int], plain_forward: TorchModel, rounding_forward: TorchModel
) -> None:
    """The first 64 tokens of four documents of the validation text."""
    documents = [position for position, token in enumerate(validation_tokens) if token == 0]
    excerpts = [validation_tokens[start : start + EXCERPT_TOKENS] for start in documents[::33]]
    assert [len(excerpt) for excerpt in excerpts] == [EXCERPT_TOKENS] * 4
    answers = [(excerpt, served_logprobs(served.server, excerpt)) for excerpt in excerpts]
    plain = divergences(plain_forward, answers)
    rounding = divergences(rounding_forward, answers)
    own = divergences(plain_forward, [(e, rounding_forward.logprobs(e)[:-1]) for e in excerpts])
    for name, values in (("plain", plain), ("rounding", rounding), ("plain by the rounding", own)):
        print(
            f"\n{served.configuration.name}: KL from {name} forward at {len(values)} positions: "
            f"mean {values.mean():.2e}, median {values.median():.2e}, max {values.max():.2e}"
        )
    activation = served.configuration.activation
    assert plain.mean() < KL_LIMIT[activation]
    if activation == "mxfp8":
        low, high = OWN_ROUNDING
        assert low < plain.median() / own.median() < high


def test_greedy_answers_are_those_of_the_bf16_model(
    served: Served, questions: list[str], bf16_answers: list[str]
) -> None:
    """The 20 questions of the example through the chat API."""

    def ask(question: str) -> str:
        chat = [{"role": "user", "content": question}]
        answer = served.server.post("/v1/chat/completions", messages=chat, max_tokens=ANSWER_TOKENS)
        return answer["choices"][0]["message"]["content"]

    with ThreadPoolExecutor(4) as pool:  # a few at a time, to save time
        answers = list(pool.map(ask, questions))
    same = sum(answer == expected for answer, expected in zip(answers, bf16_answers, strict=True))
    print(f"\n{served.configuration.name}: {same} of {len(questions)} greedy answers are the BF16 model's")
    assert len(set(answers)) == len(questions) and all(len(answer) > 20 for answer in answers)
    assert same >= SAME_ANSWERS, [pair for pair in zip(answers, bf16_answers, strict=True) if pair[0] != pair[1]]


def test_validation_perplexity_is_that_of_the_bf16_model(
    served: Served, windows: list[list[int]], bf16_nll: float
) -> None:
    """Windows of 1024 tokens, as in the example's README."""
    total, predictions = 0.0, 0
    for window in windows:
        answer = served.server.post("/v1/completions", prompt=window, max_tokens=1, prompt_logprobs=0)
        rows = answer["choices"][0]["prompt_logprobs"][1:]
        assert len(rows) == len(window) - 1
        total -= sum(row[str(token)]["logprob"] for row, token in zip(rows, window[1:], strict=True))
        predictions += len(rows)
    nll = total / predictions
    print(
        f"\n{served.configuration.name}: perplexity {math.exp(nll):.3f}, BF16 {math.exp(bf16_nll):.3f} "
        f"({math.expm1(nll - bf16_nll):+.2%}) over {predictions} predictions"
    )
    assert abs(math.expm1(nll - bf16_nll)) < PERPLEXITY_MARGIN
