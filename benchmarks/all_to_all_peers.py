"""The all-to-alls that bench_all_to_all.py times beside ours: vLLM's, FlashInfer's one-sided one, DeepEP v2.

Each is made as vLLM 0.33's manager of that name makes it. One that can't be made, or whose calls can't be captured,
is left out with its reason. FlashInfer and DeepEP are checked once, in bf16, before they are timed: experts that give
back what they get must give each token as often as ranks have it.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from vllm_rose_plugin.kernels.dp_exchange.layout import Payload
from vllm_rose_plugin.kernels.mxfp8_quantize.reference import quantize_mxfp8

if TYPE_CHECKING:
    from bench_all_to_all import Case

SETS = 8
"""Buffers that a chain of calls rotates over."""
_FP8_BLOCK = 128
"""DeepEP's scales: one float32 for so many elements, as many bytes as MXFP8's."""


@dataclass
class Links:
    """What peers of all cases share."""

    cpu_group: Any
    communicator: Any = None
    nccl_group: Any = None


class AllGatherReduceScatter:
    """vLLM's, through its NCCL communicator."""

    name = "vllm_agrs"

    def __init__(self, links: "Links", case: "Case"):
        from vllm.distributed.device_communicators.pynccl import PyNcclCommunicator

        if links.communicator is None:
            links.communicator = PyNcclCommunicator(group=links.cpu_group, device=case.device)
        if links.communicator.disabled:
            raise RuntimeError("vLLM's NCCL communicator is disabled")
        self.communicator, self.case = links.communicator, case
        self.given, self.gathered = [], []
        for i in range(SETS):
            x, ids, weights = case.inputs[i][case.rank]
            tensors = [x]
            if case.shape.payload is Payload.MXFP8:
                codes, scales = quantize_mxfp8(x)
                tensors = [codes.view(torch.uint8), scales]
            self.given.append([*tensors, weights, ids])
            self.gathered.append([t.new_empty((len(t) * case.shape.group_size, *t.shape[1:])) for t in self.given[i]])
        self.outs = [torch.empty_like(case.outs[0]) for _ in range(SETS)]

    def dispatch(self, i: int) -> None:
        self.communicator.group_start()
        for source, target in zip(self.given[i], self.gathered[i], strict=True):
            self.communicator.all_gather(target, source)
        self.communicator.group_end()

    def pair(self, i: int) -> None:
        self.dispatch(i)
        self.communicator.reduce_scatter(self.outs[i], self.case.rows[i][self.case.rank])

    def check(self) -> None:
        """Raises where something else was computed."""
        case = self.case
        for i in range(SETS):
            tokens = self.gathered[i][0][case.rank * case.num_tokens :][: case.num_tokens]
            parts = [rows[case.rank * case.num_tokens :][: case.num_tokens].float() for rows in case.rows[i]]
            if not torch.equal(tokens, self.given[i][0]) or not torch.allclose(
                self.outs[i].float(), sum(parts), rtol=2**-6, atol=2**-6
            ):
                raise AssertionError(f"M={case.num_tokens}: vLLM's all-gather or reduce-scatter gave something else")

    def close(self) -> None:
        """Nothing is its own."""


class FlashInferOneSided:
    """FlashInfer's NVLink one-sided all-to-all; its memory is shared by fabric handles, or where it falls back to."""

    name = "flashinfer_one_sided"

    def __init__(self, links: Links, case: "Case"):
        from flashinfer.moe_ep import BootstrapConfig, MoEEpCommParams, NVLinkOneSidedConfig, create_communication
        from vllm.distributed.device_communicators.mnnvl_compat import CustomCommunicator

        self.case, shape = case, case.shape
        params = MoEEpCommParams(
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            max_tokens_per_rank=case.num_tokens,
            hidden_size=shape.hidden_size,
            dtype=torch.bfloat16,
            dispatch_format=None,
        )
        bootstrap = BootstrapConfig(
            world_size=shape.group_size, rank=case.rank, device=case.device.index, process_group=links.cpu_group
        )
        config = NVLinkOneSidedConfig(
            extra_payload_bytes_per_token=0,
            use_low_precision_combine=False,
            comm_backend=CustomCommunicator(links.cpu_group),
        )
        self.communication = create_communication(bootstrap, params, backend=config)
        self.given = [_given(case, i) for i in range(SETS)]
        self.outs = [torch.empty_like(case.outs[0]) for _ in range(SETS)]
        if shape.payload is Payload.BF16:
            x, _, ids, _ = self.given[0]
            received = self._dispatch(0).hidden_states.view(-1, shape.hidden_size)
            out = torch.empty_like(x)
            self.communication.combine(received, output=out)
            _check_echo(self.name, x, ids, out, case)

    def _dispatch(self, i: int) -> Any:
        x, scales, ids, weights = self.given[i]
        return self.communication.dispatch(
            x, ids, weights, hidden_states_scale=scales, max_tokens_per_rank=self.case.num_tokens
        )

    def dispatch(self, i: int) -> None:
        self._dispatch(i)

    def pair(self, i: int) -> None:
        self._dispatch(i)
        self.communication.combine(self.case.rows[i][self.case.rank], output=self.outs[i])

    def check(self) -> None:
        """Done once, in bf16."""

    def close(self) -> None:
        self.communication.destroy()


class DeepEPV2:
    """DeepEP's ElasticBuffer as vLLM has it in decode: rows as they come, no word from the host."""

    name = "deepep_v2"

    def __init__(self, links: Links, case: "Case"):
        import deep_ep

        if links.nccl_group is None:
            links.nccl_group = dist.new_group(backend="nccl")
            dist.all_reduce(torch.zeros(1, device=case.device), group=links.nccl_group)
        self.case, shape = case, case.shape
        codes = shape.payload is Payload.MXFP8
        self.buffer = deep_ep.ElasticBuffer(
            group=links.nccl_group,
            num_max_tokens_per_rank=case.num_tokens,
            hidden=shape.hidden_size,
            num_topk=shape.top_k,
            use_fp8_dispatch=codes,
            allow_hybrid_mode=False,
            prefer_overlap_with_compute=False,
            allow_multiple_reduction=True,
            explicitly_destroy=True,
        )
        self.given = []
        for i in range(SETS):
            x, ids, weights = case.inputs[i][case.rank]
            tokens = _block_fp8(x) if codes else x
            self.given.append((tokens, ids.to(torch.int64), weights))
        if not codes:
            x, ids, _ = self.given[0]
            received, handle = self._dispatch(0)
            out, _, _ = self.buffer.combine(x=received, handle=handle, topk_weights=None)
            _check_echo(self.name, x, ids, out, case)

    def _dispatch(self, i: int) -> tuple[Any, Any]:
        tokens, ids, weights = self.given[i]
        received, _, _, handle, _ = self.buffer.dispatch(
            x=tokens,
            topk_idx=ids,
            topk_weights=weights,
            num_experts=self.case.shape.num_experts,
            num_max_tokens_per_rank=1 << (self.case.num_tokens - 1).bit_length(),
            do_expand=False,
            do_cpu_sync=False,
            async_with_compute_stream=False,
        )
        return received, handle

    def dispatch(self, i: int) -> None:
        self._dispatch(i)

    def pair(self, i: int) -> None:
        received, handle = self._dispatch(i)
        count = len(received[0] if isinstance(received, tuple) else received)
        self.buffer.combine(x=self.case.rows[i][self.case.rank][:count], handle=handle, topk_weights=None)

    def check(self) -> None:
        """Done once, in bf16."""

    def close(self) -> None:
        self.buffer.destroy()


PEERS = {peer.name: peer for peer in (AllGatherReduceScatter, FlashInferOneSided, DeepEPV2)}


def made(name: str, links: Links, case: "Case") -> Any:
    """A peer, or None on all ranks where one can't have it."""
    try:
        peer, reason = PEERS[name](links, case), ""
    except Exception as error:
        peer, reason = None, f"{type(error).__name__}: {str(error).splitlines()[:1]}"
    reasons: list[str] = [""] * dist.get_world_size(links.cpu_group)
    dist.all_gather_object(reasons, reason, group=links.cpu_group)
    if not any(reasons):
        return peer
    if peer is not None:
        peer.close()
    if case.rank == 0:
        print(f"left out at M={case.num_tokens} {case.shape.payload.value}: {name}: {reasons}", flush=True)
    return None


def _given(case: "Case", i: int) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """(tokens, scales, ids, weights) of this rank, quantized already where codes travel."""
    x, ids, weights = case.inputs[i][case.rank]
    if case.shape.payload is Payload.BF16:
        return x, None, ids, weights
    codes, scales = quantize_mxfp8(x)
    return codes, scales, ids, weights


def _block_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 codes, and a float32 scale for each block."""
    blocks = x.float().view(len(x), -1, _FP8_BLOCK)
    scales = blocks.abs().amax(-1).clamp(min=1e-12) / torch.finfo(torch.float8_e4m3fn).max
    return (blocks / scales.unsqueeze(-1)).to(torch.float8_e4m3fn).view(x.shape), scales.contiguous()


def _check_echo(name: str, x: torch.Tensor, ids: torch.Tensor, out: torch.Tensor, case: "Case") -> None:
    ranks = ids // case.shape.num_local_experts
    times = sum((ranks == rank).any(1).float() for rank in range(case.shape.group_size))
    if not torch.allclose(out[: len(x)].float(), x.float() * times.unsqueeze(1), rtol=2**-6, atol=2**-6):
        raise AssertionError(f"M={case.num_tokens}: {name} gave something else than it got")
