"""Two ranks without expert parallelism: every expert, and the scales of its weights, cut in two."""

import pytest
from e2e_setup import PLAIN_TP2, Served
from test_accuracy import EXCERPT_TOKENS, KL_LIMIT, divergences, served_logprobs
from torch_forward import TorchModel

pytestmark = [pytest.mark.slow, pytest.mark.parametrize("served", [PLAIN_TP2.name], indirect=True)]


def test_logprobs_agree_with_a_torch_forward_of_the_dequantized_weights(
    served: Served, validation_tokens: list[int], plain_forward: TorchModel
) -> None:
    documents = [position for position, token in enumerate(validation_tokens) if token == 0]
    excerpts = [validation_tokens[start : start + EXCERPT_TOKENS] for start in documents[::33]]
    answers = [(excerpt, served_logprobs(served.server, excerpt)) for excerpt in excerpts]
    mean = divergences(plain_forward, answers).mean().item()
    print(f"\n{served.configuration.name}: mean KL {mean:.2e}")
    assert mean < KL_LIMIT[served.configuration.activation]
