"""Data parallelism with expert parallelism over our all-to-all, with processes in place of GPUs."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from e2e_setup import ALL_TO_ALL, ANSWER_TOKENS, Served
from test_accuracy import EXCERPT_TOKENS, KL_LIMIT, SAME_ANSWERS, divergences, served_logprobs
from torch_forward import TorchModel
from vllm_server import Server

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("served", [ALL_TO_ALL.name], indirect=True)]


def ask(server: Server, question: str) -> str:
    chat = [{"role": "user", "content": question}]
    answer = server.post("/v1/chat/completions", messages=chat, max_tokens=ANSWER_TOKENS)
    return answer["choices"][0]["message"]["content"]


def test_what_serves_and_how_big_it_is_stands_in_the_log(served: Served) -> None:
    text = served.server.log.read_text()
    lines = [line for line in text.splitlines() if "All-to-all rose_nvlink over shared memory" in line]
    assert len(lines) == 1 and "MiB on each of 2 ranks" in lines[0] and "--max-num-batched-tokens" in lines[0]


def test_both_engines_answer_as_one_does(served: Served, questions: list[str], bf16_answers: list[str]) -> None:
    """A few requests at a time, of different lengths; then alone, while the other engine has nothing to do."""
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(lambda question: ask(served.server, question), questions))
    same = sum(answer == expected for answer, expected in zip(answers, bf16_answers, strict=True))
    print(f"\n{served.configuration.name}: {same} of {len(questions)} greedy answers are the BF16 model's")
    assert same >= SAME_ANSWERS, [pair for pair in zip(answers, bf16_answers, strict=True) if pair[0] != pair[1]]
    for engine in ("0", "1"):
        assert served.server.metric("vllm:generation_tokens_total", f'engine="{engine}"') > 0
    worker = served.server.get("/rose/stats")["workers"][0]
    assert worker["layers"]["experts"] == {"RoseCuteDslExperts": 3}
    assert worker["calls"]["dp_dispatch"] == worker["calls"]["dp_combine"] == worker["calls"]["moe_route"]
    right = [number for number, answer in enumerate(answers) if answer == bf16_answers[number]]
    assert [ask(served.server, questions[number]) for number in right[:2]] == [answers[n] for n in right[:2]]


def test_logprobs_agree_with_a_torch_forward_of_the_dequantized_weights(
    served: Served, validation_tokens: list[int], plain_forward: TorchModel
) -> None:
    documents = [position for position, token in enumerate(validation_tokens) if token == 0]
    excerpts = [validation_tokens[start : start + EXCERPT_TOKENS] for start in documents[::33]]
    answers = [(excerpt, served_logprobs(served.server, excerpt)) for excerpt in excerpts]
    mean = divergences(plain_forward, answers).mean().item()
    print(f"\n{served.configuration.name}: mean KL {mean:.2e}")
    assert mean < KL_LIMIT[served.configuration.activation]
