"""The W8A16 kernel on parts of a weight: its PTX run on the CPU (``sm90_machine``) fills the columns of one result."""

from dataclasses import replace

import pytest
import torch
from sm90_machine import run
from test_domains_run import config_of, ptx_of
from test_stream_k_run import random_operand

from vllm_rose_plugin.kernels.gemm.column_split import plan_split, split_packed
from vllm_rose_plugin.kernels.gemm.tokens import pack_tokens
from vllm_rose_plugin.kernels.gemm.weights import pack_weight


@pytest.mark.slow
@pytest.mark.parametrize(("row_groups", "token_tile"), [(2, 32)])
def test_parts_fill_the_rows_of_the_whole(row_groups, token_tile):
    """Bit by bit; 192 rows to a part, no whole number of tiles of 128; a group without tokens."""
    whole = config_of(1, row_groups=row_groups, token_tile=token_tile)
    part = replace(whole, n=whole.n // 2, out_columns=whole.n)
    weight = pack_weight(random_operand(whole.num_groups, whole.n, whole.k, seed=1), target="sm_90a")
    split = plan_split(n=whole.n, parts=2, target="sm_90a")
    parts = split_packed(split, weight, lambda part, shape, dtype: torch.empty(shape, dtype=dtype))
    counts, offsets = [5, 0, 37], [0, 6, 7, 45]
    launch = {
        "tokens": pack_tokens(random_operand(46, whole.k, seed=5), token_format=whole.token_format),
        "offsets": offsets,
        "counts": counts,
        "bias": torch.zeros(4),
        "together": True,
        "seed": 3,
    }
    expected = run(ptx_of(whole), whole, [weight], grid=2, **launch)
    found = None
    for number, own in enumerate(parts):
        found = run(ptx_of(part), part, [own], grid=1, into=found, column=number * part.n, **launch)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
