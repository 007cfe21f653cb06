"""All-reduce + residual + RMS norm over the GPUs of one host, bf16: ours in one launch beside unfused sequences.

    python benchmarks/bench_all_reduce_norm.py [--ranks 2] [--rows 1 64 4096] [--hidden-size 4096] [--blocks 24 48 66]

Unfused are an all-reduce (ours, NCCL's, vLLM's custom one) and vLLM's ``fused_add_rms_norm``; FlashInfer fuses both, as
vLLM's compile pass calls it. Cases that end in ``_packed`` go on to the tokens of our linear layer on this device: in
the same launch for ours, by our quantizer behind every other. ``rose_b24`` and the like are ours with that many blocks,
``rose`` with those that the heuristic takes. Timing, limit and the care about multicast are bench_all_reduce.py's.
`gb_per_s` is the rows' bytes by the time, as there.
"""

import argparse
import tempfile
from collections.abc import Callable

import bench_all_reduce as plain  # first: it sets what NCCL and torch look at
import torch
import torch.distributed as dist
from quantize_timing import Table, buffer_sets

from vllm_rose_plugin.kernels.all_reduce.config import Tuning
from vllm_rose_plugin.kernels.all_reduce.launch import AllReduce
from vllm_rose_plugin.kernels.all_reduce_norm.config import choose_norm_plan
from vllm_rose_plugin.kernels.all_reduce_norm.launch import all_reduce_norm
from vllm_rose_plugin.kernels.all_reduce_norm.reference import all_reduce_norm as reference
from vllm_rose_plugin.kernels.contracts import Activation, ScaleLayout, TokenFormat
from vllm_rose_plugin.kernels.mxfp8_quantize.launch import permute_tokens, quantize_mxfp8
from vllm_rose_plugin.memory.driver import Driver
from vllm_rose_plugin.memory.rendezvous import group_from_process_group

ROWS = (1, 4, 16, 64, 256, 1024, 4096)
EPS = 1e-6
PEERS = ("nccl", "vllm_custom", "flashinfer")
Result = tuple[torch.Tensor, torch.Tensor]
"""(normalized rows, new residual)."""


class Inputs:
    """Sets of rows that rotate; every one ``[T, H]`` bf16."""

    def __init__(self, sets: int, num_rows: int, hidden_size: int):
        shape = (sets, num_rows, hidden_size)
        self.xs, self.residuals, self.outs = (torch.zeros(shape, dtype=torch.bfloat16, device="cuda") for _ in range(3))
        self.weight = torch.ones(hidden_size, dtype=torch.bfloat16, device="cuda")

    def fill(self, rank: int, ranks: int) -> tuple[list[torch.Tensor], torch.Tensor]:
        """New values in set 0: all ranks' inputs and the residual, which is returned as a copy."""
        generator = torch.Generator("cuda").manual_seed(1)
        shape = self.xs.shape[1:]
        inputs = [torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in range(ranks)]
        self.residuals[0].copy_(torch.randn(shape, generator=generator, device="cuda"))
        self.weight.copy_(torch.randn(shape[1:], generator=generator, device="cuda"))
        self.xs[0].copy_(inputs[rank])
        return inputs, self.residuals[0].clone()


def vllm_norm() -> Callable[[torch.Tensor, torch.Tensor, torch.Tensor], None]:
    """vLLM's kernel: (rows, residual, weight), both in place."""
    import vllm._custom_ops as ops

    return lambda x, residual, weight: ops.fused_add_rms_norm(x, residual, weight, EPS)


def token_format_of(target: str) -> TokenFormat:
    """What our linear layer reads here: W8A16 on sm_90, whose tokens are quantized values in bf16."""
    return TokenFormat.BF16_PERMUTED if target.startswith("sm_90") else TokenFormat.MXFP8_TCGEN05


def pack(x: torch.Tensor, token_format: TokenFormat) -> None:
    """A launch of our quantizer."""
    if token_format is TokenFormat.BF16_PERMUTED:
        permute_tokens(x, activation=Activation.MXFP8)
    else:
        quantize_mxfp8(x, layout=ScaleLayout.TCGEN05_128X4)


def providers(
    reduce: AllReduce, peers: plain.Peers, norm, inputs: Inputs, blocks: list[int]
) -> dict[str, plain.Provider]:
    """By name; each call gives (rows, residual)."""
    xs, residuals, outs, weight = inputs.xs, inputs.residuals, inputs.outs, inputs.weight

    def fused(tuning: Tuning | None) -> Callable[[int], Result]:
        return lambda i: all_reduce_norm(
            reduce, xs[i], residual=residuals[i], weight=weight, eps=EPS, residual_out=residuals[i], tuning=tuning
        )

    found = {"rose": plain.Provider(fused(None))}
    algorithm = _plan(reduce, inputs).config.algorithm
    for number in blocks:
        found[f"rose_b{number}"] = plain.Provider(fused(Tuning(algorithm, number)))

    def unfused(all_reduce: Callable[[int], torch.Tensor]) -> Callable[[int], Result]:
        def call(i: int) -> Result:
            rows = all_reduce(i)
            norm(rows, residuals[i], weight)
            return rows, residuals[i]

        return call

    if norm is not None:
        found["rose_unfused"] = plain.Provider(unfused(lambda i: reduce(xs[i], out=outs[i])))

        def nccl(i: int) -> torch.Tensor:
            dist.all_reduce(xs[i])
            return xs[i]

        if "nccl" in peers.wanted:
            found["nccl"] = plain.Provider(unfused(nccl))
        if peers.custom is not None:
            custom = peers.custom
            if custom.should_custom_ar(xs[0]):
                call = unfused(lambda i: custom.custom_all_reduce(xs[i]))
                found["vllm_custom"] = plain.Provider(call, custom.capture)
            else:
                plain.left_out("vllm_custom", f"it doesn't take {xs[0].nbytes} bytes")
    if peers.workspace is not None:
        if xs.shape[2] == plain.ROW:
            found["flashinfer"] = plain.Provider(lambda i: flashinfer(peers, xs[i], residuals[i], weight, outs[i]))
        else:
            plain.left_out("flashinfer", f"its workspace is for rows of {plain.ROW}")
    return found


def flashinfer(peers: plain.Peers, x, residual, weight, out) -> Result:
    """As vLLM's compile pass calls it."""
    import flashinfer.comm as comm

    one_shot = plain.flashinfer_one_shot(x.nbytes, peers.ranks)
    comm.allreduce_fusion(
        input=x,
        workspace=peers.workspace,
        pattern=comm.AllReduceFusionPattern.kARResidualRMSNorm,
        launch_with_pdl=True,
        trigger_completion_at_end=one_shot or x.shape[0] > 16,
        residual_out=residual,
        norm_out=out,
        residual_in=residual,
        rms_gamma=weight,
        rms_eps=EPS,
        use_oneshot=one_shot,
        fp32_acc=True,
    )
    return out, residual


def packed(reduce: AllReduce, found: dict[str, plain.Provider], inputs: Inputs) -> dict[str, plain.Provider]:
    """The same, and tokens for our linear layer."""
    token_format = token_format_of(reduce.target)

    def fused(i: int):
        return all_reduce_norm(
            reduce,
            inputs.xs[i],
            residual=inputs.residuals[i],
            weight=inputs.weight,
            eps=EPS,
            residual_out=inputs.residuals[i],
            token_format=token_format,
        )

    def then_pack(provider: plain.Provider) -> plain.Provider:
        return plain.Provider(lambda i: pack(provider.call(i)[0], token_format), provider.around)

    others = {name: then_pack(provider) for name, provider in found.items() if not name.startswith("rose_b")}
    others["rose_then_quantize"] = others.pop("rose")
    return {"rose": plain.Provider(fused), **others}


def checked(found: dict[str, plain.Provider], inputs: Inputs, cpu_group, rank: int, ranks: int):
    """Those that are within some roundings of float64, on all ranks. Ours must be."""
    sound = {}
    for name, provider in found.items():
        given, residual = inputs.fill(rank, ranks)
        exact, wide = reference(given, residual, inputs.weight, eps=EPS, exact=True)
        torch.cuda.synchronize()
        plain.everywhere(True, cpu_group)
        reason: object = "it computed something else"
        try:
            rows, new = provider.call(0)
            torch.cuda.synchronize()
            right = torch.allclose(rows.double(), exact, rtol=2**-5, atol=2**-5)
            right &= torch.allclose(new.double(), wide, rtol=2**-6, atol=2**-6)
        except Exception as error:
            if name.startswith("rose"):
                raise
            right, reason = False, error
        if plain.everywhere(right, cpu_group):
            sound[name] = provider
        elif name.startswith("rose"):
            raise AssertionError(f"{name} computed something else")
        else:
            plain.left_out(name, reason)
    for tensor in (inputs.xs, inputs.residuals, inputs.outs):
        tensor.zero_()
    torch.cuda.synchronize()
    return sound


def _plan(reduce: AllReduce, inputs: Inputs):
    _, num_rows, hidden_size = inputs.xs.shape
    return choose_norm_plan(
        num_rows=num_rows,
        hidden_size=hidden_size,
        dtype="bfloat16",
        group_size=reduce.group.size,
        access=reduce.access,
        zero_copy_in=False,
        alignment=32,
        target=reduce.target,
        sm_count=reduce.sm_count,
    )


def bench_rows(reduce: AllReduce, peers: plain.Peers, norm, table: Table, cpu_group, num_rows: int, arguments) -> None:
    """Adds the rows of one size."""
    rank, ranks, hidden_size = reduce.group.rank, reduce.group.size, arguments.hidden_size
    moved = 2 * num_rows * hidden_size
    sets = min(32, buffer_sets(3 * moved, rotate=True))
    inputs = Inputs(sets, num_rows, hidden_size)
    plan = _plan(reduce, inputs)
    blocks = [number for number in arguments.blocks if number < num_rows and number != plan.blocks]
    found = checked(providers(reduce, peers, norm, inputs, blocks), inputs, cpu_group, rank, ranks)
    for suffix, of_case in (("", found), ("_packed", packed(reduce, found, inputs))):
        us = plain.times(of_case, cpu_group, sets=sets, calls=200 if moved <= plain.MIB else 20)
        reduce.check()
        for name, value in us.items():
            shape = f"T={num_rows};H={hidden_size};ranks={ranks}"
            if name == "rose":
                shape += f";blocks={plan.blocks}"
            table.add(case=f"T{num_rows}{suffix}", provider=name, shape=shape, us=value, moved=moved)
    if rank == 0:
        table.write()
        config = plan.config
        print(f"{num_rows} rows: {config.algorithm.value}, {plan.blocks} blocks of {config.threads}", flush=True)
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
    table = Table("all_reduce_norm", plain.peer_copy_limit(driver, group), path=arguments.out)
    table.rows[0]["provider"] = "peer_copy"
    largest = 2 * max(arguments.rows) * arguments.hidden_size
    peers = plain.Peers(arguments.peers, cpu_group=cpu_group, device=device, rank=rank, ranks=ranks, largest=largest)
    norm = plain.built("fused_add_rms_norm of vLLM, and all that is unfused", vllm_norm, cpu_group)
    with AllReduce(driver=driver, group=group, max_bytes=largest) as reduce:
        for num_rows in sorted(arguments.rows):
            if plain.late(arguments, cpu_group, f"{num_rows} rows"):
                break
            bench_rows(reduce, peers, norm, table, cpu_group, num_rows, arguments)
    dist.barrier(group=cpu_group)
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=list(ROWS))
    parser.add_argument("--hidden-size", type=int, default=4096)
    parser.add_argument("--blocks", type=int, nargs="*", default=[16, 33], help="numbers of blocks to try besides")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    plain.add_common(parser, "all_reduce_norm")
    arguments = plain.parse(parser)
    with tempfile.TemporaryDirectory() as directory:
        torch.multiprocessing.spawn(bench, (f"{directory}/store", arguments), nprocs=arguments.ranks)


if __name__ == "__main__":
    main()
