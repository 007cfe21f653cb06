"""What one vLLM's NIXL connector reads, for pairs of tensor parallel sizes; JSON on stdin and stdout."""

import json
import os
import sys

pairs = json.load(sys.stdin)
out = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # vLLM's imports print lines of their own

from vllm.distributed.kv_transfer.kv_connector.utils import TransferTopology  # noqa: E402
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.tp_mapping import compute_tp_mapping  # noqa: E402
from vllm.v1.kv_cache_interface import FullAttentionSpec  # noqa: E402


def mapping(prefill, decode, rank, heads):
    topology = TransferTopology(
        tp_rank=rank,
        tp_size=decode,
        block_size=64,
        engine_id="decode",
        is_mla=False,
        is_mamba=False,
        total_num_kv_heads=heads,
        attn_backends=[],
    )
    plan = compute_tp_mapping(topology, prefill, (FullAttentionSpec,))
    sources = plan.source_ranks_per_group[0]
    # heads // num_kv_head_replicas of the source, as the slots are numbered
    slots = [plan.rank_to_attention_slot[source] for source in sources]
    return {"sources": list(sources), "slots": slots, "offset": plan.rank_offset_factor}


answer = {
    f"{prefill},{decode},{heads}": [mapping(prefill, decode, rank, heads) for rank in range(decode)]
    for prefill, decode, heads in pairs
}
json.dump(answer, out)
out.close()
