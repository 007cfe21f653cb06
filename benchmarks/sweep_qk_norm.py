"""Times launch shapes of the QK-norm kernel beside each other: which one the heuristic of its config should choose.

python benchmarks/sweep_qk_norm.py [--tokens 64 4096]
"""

import argparse
import dataclasses
import itertools

import torch
from bench_qk_norm import EPS, HEAD_DIM, KV_HEADS, Q_HEADS, Buffers
from quantize_timing import copy_calls, times

from vllm_rose_plugin.kernels.qk_norm.config import choose_config
from vllm_rose_plugin.kernels.qk_norm.launch import compile_config


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[64, 128, 4096, 16384])
    for tokens in parser.parse_args().tokens:
        b = Buffers(tokens)
        base = choose_config(
            num_tokens=tokens,
            num_q_heads=Q_HEADS,
            num_kv_heads=KV_HEADS,
            head_dim=HEAD_DIM,
            dtype=torch.bfloat16,
            weight_dtype=torch.bfloat16,
            eps=EPS,
            weight_offset=0.0,
            alignment=16,
            widest_load_bits=128,
            sm_count=torch.cuda.get_device_properties(0).multi_processor_count,
        )
        providers = {"copy of the same bytes": copy_calls(b.bytes, sets=b.sets)}
        for heads, threads in itertools.product((1, 2, 4, 8), (64, 128, 256, 512)):
            config = dataclasses.replace(base, heads_per_lane=heads, threads=threads)
            kernel = compile_config(config)

            def call(i, kernel=kernel, b=b):
                kernel(b.q[i], b.k[i], b.q[i], b.k[i], b.q_weight, b.k_weight, None, None)

            name = f"heads_per_lane={heads} threads={threads}"
            providers[name + (" (chosen)" if config == base else "")] = call
        measured = times(providers, sets=b.sets, calls=max(16, min(256, 4 * b.sets)))
        print(f"T={tokens}, {b.bytes / 1e6:.1f} MB")
        for name, us in sorted(measured.items(), key=lambda item: item[1]):
            print(f"  {us:9.2f} us  {b.bytes / us / 1e3:7.0f} GB/s  {name}")


if __name__ == "__main__":
    with torch.inference_mode():
        main()
