"""Experts' weighted sum + all-reduce over the GPUs of one host, bf16: ours in one launch beside both apart.

    python benchmarks/bench_ep_combine.py [--ranks 2] [--tokens 1 64 4096] [--hidden-size 4096] [--top-k 8]

Experts lie spread over the ranks: a slot is on one of them, at random, and -1 on the others. Apart are a combine, ours
or vLLM's, and an all-reduce, ours, vLLM's custom one or NCCL's; `rose_apart_zero_copy` has the combine write where our
all-reduce reads it, which is what many tokens get. vLLM's combine is ``moe_sum`` over ``[T, top_k, H]``: its expert
layers multiply router weights before and leave zeros for other ranks' experts, so it reads all top_k rows. `rose` is
the fused launch at every size; `rose_b24` and the like have that many blocks. Timing, limit and the care about
multicast are bench_all_reduce.py's. `gb_per_s` is the result's bytes by the time, as there.
"""

import argparse
import contextlib
import tempfile
from collections.abc import Callable

import bench_all_reduce as plain  # first: it sets what NCCL and torch look at
import torch
import torch.distributed as dist
from quantize_timing import Table, buffer_sets

from vllm_rose_plugin.kernels.all_reduce.launch import AllReduce
from vllm_rose_plugin.kernels.all_reduce.tune import tune
from vllm_rose_plugin.kernels.ep_combine.config import choose_ep_plan, in_one_launch
from vllm_rose_plugin.kernels.ep_combine.launch import ep_combine
from vllm_rose_plugin.kernels.ep_combine.reference import ep_combine as reference
from vllm_rose_plugin.kernels.moe_combine.launch import combine_tokens
from vllm_rose_plugin.memory.driver import Driver
from vllm_rose_plugin.memory.rendezvous import group_from_process_group

TOKENS = (1, 4, 16, 64, 128, 256, 1024, 4096)
PEERS = ("nccl", "vllm_custom")
_MOST_SETS = 32
AllReduceCall = Callable[[torch.Tensor], torch.Tensor]


class Inputs:
    """Sets of experts' results that rotate, of this rank; routing is the same in every set."""

    def __init__(self, sets: int, num_tokens: int, hidden_size: int, top_k: int, *, rank: int, ranks: int):
        generator = torch.Generator("cuda").manual_seed(1)
        owner = torch.randint(0, ranks, (num_tokens, top_k), generator=generator, device="cuda")
        self.weights = torch.rand(num_tokens, top_k, generator=generator, device="cuda")
        self.slots_of = [_slots(owner == r) for r in range(ranks)]
        self.rows_of = [int((owner == r).sum()) for r in range(ranks)]
        self.slots, self.mine = self.slots_of[rank], owner == rank
        shape = (sets, max(1, self.rows_of[rank]), hidden_size)
        self.ys = torch.zeros(shape, dtype=torch.bfloat16, device="cuda")
        self.by_token = torch.zeros((sets, num_tokens, top_k, hidden_size), dtype=torch.bfloat16, device="cuda")
        self.outs = torch.zeros((sets, num_tokens, hidden_size), dtype=torch.bfloat16, device="cuda")

    def fill(self, rank: int) -> torch.Tensor:
        """New values in set 0; returns the reference's result."""
        generator = torch.Generator("cuda").manual_seed(2)
        hidden_size = self.ys.shape[2]
        ys = [
            torch.randn(max(1, rows), hidden_size, generator=generator, device="cuda").bfloat16()
            for rows in self.rows_of
        ]
        self.ys[0].copy_(ys[rank])
        self.by_token[0].zero_()
        weighted = ys[rank][self.slots[self.mine].long()].float() * self.weights[self.mine].unsqueeze(-1)
        self.by_token[0][self.mine] = weighted.bfloat16()
        return reference(ys, slots=self.slots_of, topk_weights=self.weights)

    def clear(self) -> None:
        """Replays in place must not grow beyond all numbers."""
        for tensor in (self.ys, self.by_token, self.outs):
            tensor.zero_()


def _slots(mine: torch.Tensor) -> torch.Tensor:
    """Rows in the order of tokens, -1 elsewhere."""
    order = torch.cumsum(mine.flatten(), 0).view(mine.shape) - 1
    return torch.where(mine, order, -1).to(torch.int32)


def vllm_sum() -> Callable[[torch.Tensor, torch.Tensor], None]:
    """vLLM's kernel: (``[T, top_k, H]``, result)."""
    import vllm._custom_ops as ops

    return ops.moe_sum


def reducers(reduce: AllReduce, peers: plain.Peers, x: torch.Tensor) -> dict[str, tuple[AllReduceCall, Callable]]:
    """By name: (an all-reduce, what surrounds the capture of its graph)."""
    found: dict[str, tuple[AllReduceCall, Callable]] = {"rose": (lambda x: reduce(x, out=x), contextlib.nullcontext)}
    if "nccl" in peers.wanted:

        def nccl(x: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(x)
            return x

        found["nccl"] = (nccl, contextlib.nullcontext)
    if peers.custom is not None:
        custom = peers.custom
        if custom.should_custom_ar(x):
            found["vllm_custom"] = (custom.custom_all_reduce, custom.capture)
        else:
            plain.left_out("vllm_custom", f"it doesn't take {x.nbytes} bytes")
    return found


def providers(
    reduce: AllReduce, peers: plain.Peers, moe_sum, inputs: Inputs, part: torch.Tensor, blocks: list[int]
) -> dict[str, plain.Provider]:
    """By name; each call gives the result."""
    ys, outs, slots, weights = inputs.ys, inputs.outs, inputs.slots, inputs.weights

    def ours(**how) -> Callable[[int], torch.Tensor]:
        return lambda i: ep_combine(reduce, ys[i], slots=slots, topk_weights=weights, out=outs[i], **how)

    found = {"rose": plain.Provider(ours(fused=True))}
    for number in blocks:
        found[f"rose_b{number}"] = plain.Provider(ours(fused=True, blocks=number))
    found["rose_apart_zero_copy"] = plain.Provider(ours(fused=False, part=part))

    def combined(i: int) -> torch.Tensor:
        return combine_tokens(ys[i], slots=slots, topk_weights=weights, out=outs[i])

    def summed(i: int) -> torch.Tensor:
        moe_sum(inputs.by_token[i], outs[i])
        return outs[i]

    combines = {"rose": combined} if moe_sum is None else {"rose": combined, "vllm": summed}
    for name, (all_reduce, around) in reducers(reduce, peers, outs[0]).items():
        for of, combine in combines.items():
            call = lambda i, all_reduce=all_reduce, combine=combine: all_reduce(combine(i))  # noqa: E731
            found[f"{of}_sum_{name}"] = plain.Provider(call, around)
    return found


def checked(found: dict[str, plain.Provider], inputs: Inputs, cpu_group, rank: int) -> dict[str, plain.Provider]:
    """Those that are near the reference on all ranks; ours must be."""
    sound = {}
    for name, provider in found.items():
        expected = inputs.fill(rank)
        torch.cuda.synchronize()
        plain.everywhere(True, cpu_group)
        reason: object = "it computed something else"
        must = name in ("rose", "rose_apart_zero_copy", "rose_sum_rose") or name.startswith("rose_b")
        try:
            result = provider.call(0)
            torch.cuda.synchronize()
            right = torch.allclose(result.float(), expected.float(), rtol=2**-5, atol=2**-5)
        except Exception as error:
            if must:
                raise
            right, reason = False, error
        if plain.everywhere(right, cpu_group):
            sound[name] = provider
        elif must:
            raise AssertionError(f"{name} computed something else")
        else:
            plain.left_out(name, reason)
    inputs.clear()
    torch.cuda.synchronize()
    return sound


def bench_tokens(reduce, peers, moe_sum, table: Table, heap, cpu_group, num_tokens: int, arguments) -> None:
    """Adds the rows of one number of tokens."""
    rank, ranks, hidden_size, top_k = reduce.group.rank, reduce.group.size, arguments.hidden_size, arguments.top_k
    moved = 2 * num_tokens * hidden_size
    sets = min(_MOST_SETS, buffer_sets((top_k / ranks + top_k + 1) * moved, rotate=True))
    inputs = Inputs(sets, num_tokens, hidden_size, top_k, rank=rank, ranks=ranks)
    part = heap[: num_tokens * hidden_size].view(num_tokens, hidden_size)
    plan = choose_ep_plan(
        num_tokens=num_tokens,
        hidden_size=hidden_size,
        top_k=top_k,
        dtype="bfloat16",
        out_dtype="bfloat16",
        weighted=True,
        group_size=ranks,
        access=reduce.access,
        target=reduce.target,
        sm_count=reduce.sm_count,
    )
    blocks = [number for number in arguments.blocks if number < plan.blocks]
    found = checked(providers(reduce, peers, moe_sum, inputs, part, blocks), inputs, cpu_group, rank)
    us = plain.times(found, cpu_group, sets=sets, calls=200 if moved <= plain.MIB else 20)
    reduce.check()
    for name, value in us.items():
        shape = f"T={num_tokens};H={hidden_size};top_k={top_k};ranks={ranks}"
        table.add(case=f"T{num_tokens}", provider=name, shape=shape, us=value, moved=moved)
    if rank == 0:
        table.write()
        one = in_one_launch(num_tokens=num_tokens, hidden_size=hidden_size, group_size=ranks)
        print(
            f"{num_tokens} tokens: {plan.blocks} blocks of {plan.config.threads}; by itself ep_combine takes "
            f"{'one launch' if one else 'two launches'}",
            flush=True,
        )
    del part
    torch.cuda.empty_cache()


def bench(rank: int, store: str, arguments: argparse.Namespace) -> None:
    plain.forbid_multicast()
    ranks = arguments.ranks
    torch.cuda.set_device(rank)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", store=dist.FileStore(store, ranks), rank=rank, world_size=ranks, device_id=device)
    cpu_group = dist.new_group(backend="gloo")
    group = group_from_process_group(cpu_group, address="127.0.0.1", name="bench")
    driver = Driver(device=rank)
    table = Table("ep_combine", plain.peer_copy_limit(driver, group), path=arguments.out)
    table.rows[0]["provider"] = "peer_copy"
    largest = 2 * max(arguments.tokens) * arguments.hidden_size
    peers = plain.Peers(arguments.peers, cpu_group=cpu_group, device=device, rank=rank, ranks=ranks, largest=largest)
    moe_sum = plain.built("moe_sum of vLLM", vllm_sum, cpu_group)
    with AllReduce(driver=driver, group=group, max_bytes=largest, heap_bytes=largest) as reduce:
        if arguments.tune:
            tune(reduce)
        heap = reduce.empty((largest // 2,), torch.bfloat16)
        for num_tokens in sorted(arguments.tokens):
            if plain.late(arguments, cpu_group, f"{num_tokens} tokens"):
                break
            bench_tokens(reduce, peers, moe_sum, table, heap, cpu_group, num_tokens, arguments)
        del heap
    dist.barrier(group=cpu_group)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, nargs="+", default=list(TOKENS))
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--blocks", type=int, nargs="*", default=[16, 33, 48], help="numbers of blocks to try besides")
    parser.add_argument("--tune", action="store_true", help="measure all-reduce's table first, or take it from disk")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    plain.add_common(parser, "ep_combine")
    arguments = plain.parse(parser)
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(bench, (f"{directory}/store", arguments), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
