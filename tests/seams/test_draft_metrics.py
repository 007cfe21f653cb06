"""The counters of drafting by context length, in both vLLM versions."""

import pytest
from vllm_probe import VERSIONS, run_probe


@pytest.mark.parametrize("version", VERSIONS)
def test_drafts_are_counted_where_their_context_lies(version: str) -> None:
    found = run_probe(version, "draft_metrics", VLLM_PLUGINS="rose")
    assert found["version"].startswith(version)
    assert found["finished"] == [1, 1, 1, 0, 1]  # vLLM's own count goes on
    drafts = {context: found["samples"][f'rose:spec_decode_drafts_total{{context="{context}"}}'] for context in RANGES}
    assert drafts == {"0-127": 1, "128-511": 2, "512-2047": 2}
    accepted = {
        (context, position): found["samples"][
            f'rose:spec_decode_accepted_tokens_total{{context="{context}",position="{position}"}}'
        ]
        for context in RANGES
        for position in range(3)
    }
    assert list(accepted.values()) == [1, 1, 1, 1, 0, 0, 2, 2, 0]
    assert len(found["samples"]) == 3 + 9


RANGES = ("0-127", "128-511", "512-2047")
