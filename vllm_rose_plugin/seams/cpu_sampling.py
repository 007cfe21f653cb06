"""Sampled tokens with speculative decoding on a CPU: the temperature that vLLM forgets.

Replaces: the CPU form of ``expand_kernel``, which spreads a value of each request over its draft tokens.
Why: vLLM's converts its output to int64, fills the copy and drops it, so temperature, top_k and top_p of every draft
token are whatever the memory held, and sampled output doesn't have the target's distribution. Greedy decoding never
gets there, nor does a GPU. Where no draft of ours was built, vLLM's own runs.
Delete when: vllm-project/vllm#55005 is closed.
"""

from collections.abc import Callable
from typing import Any

from vllm_rose_plugin.seams.seam import Seam
from vllm_rose_plugin.seams.targets import wrap

_MODULE = "vllm.utils.cpu_triton_utils"
_TARGET = "_expand_kernel_impl"


def _wrap_expand(original: Callable[..., None]) -> Callable[..., None]:
    def _expand_kernel_impl(
        output: Any,  # (num_tokens,), written
        input_val: Any,  # (batch,) of the same dtype
        cu_num_tokens: Any,  # (batch,) where each request's tokens end
        replace_from: float,
        replace_to: float,
        MAX_NUM_TOKENS: Any = None,
    ) -> None:
        from vllm_rose_plugin.layers.mtp_config import is_built

        if not is_built():
            original(output, input_val, cu_num_tokens, replace_from, replace_to, MAX_NUM_TOKENS)
            return
        values = input_val.masked_fill(input_val == replace_from, replace_to)
        counts = cu_num_tokens.diff(prepend=cu_num_tokens.new_zeros(1))
        output.copy_(values.repeat_interleave(counts))

    return _expand_kernel_impl


SEAMS = (
    Seam(
        name="cpu_sampling",
        module=_MODULE,
        target=_TARGET,
        kind="patch",
        why="with drafting on a CPU, tokens are sampled at the temperature, top_k and top_p of uninitialized memory",
        upstream="https://github.com/vllm-project/vllm/issues/55005",
        apply=lambda: wrap(
            "cpu_sampling",
            _MODULE,
            _TARGET,
            ("output", "input_val", "cu_num_tokens", "replace_from", "replace_to"),
            _wrap_expand,
        ),
    ),
)
