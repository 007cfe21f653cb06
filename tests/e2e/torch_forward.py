"""The plain torch forward that served answers are held against: transformers' Qwen3-MoE, dequantization by numpy."""

import json
import shutil
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from transformers import Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeAttention, Qwen3MoeExperts

BLOCK = 32
WINDOW = 1024
"""Tokens in a window of the validation text, as in the example's README."""


def dequantized_checkpoint(*, source: Path, destination: Path) -> Path:
    """Write the MXFP8 checkpoint `source` as an unquantized one, exactly; it shares no code with the plugin.

    An E4M3 element times a power of two has four significant bits, so bf16 holds it as it is.
    """
    destination.mkdir()
    tensors: dict[str, torch.Tensor] = {}
    for file in sorted(source.glob("*.safetensors")):
        raw = _read(file)
        for name, (dtype, array) in raw.items():
            if dtype == "F8_E4M3":
                values = _dequantize(array, raw[name + "_scale"][1])
                tensors[name] = torch.from_numpy(values).to(torch.bfloat16)
                assert torch.equal(tensors[name].double(), torch.from_numpy(values).double())
            elif dtype == "BF16":
                tensors[name] = torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
            else:
                assert dtype == "U8" and name.endswith("_scale"), f"{name} is {dtype}"
    save_file(tensors, destination / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((source / "config.json").read_text())
    del config["quantization_config"]
    (destination / "config.json").write_text(json.dumps(config))
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        shutil.copy(source / name, destination)
    return destination


def _read(file: Path) -> dict[str, tuple[str, np.ndarray]]:
    """``{name: (safetensors dtype, raw bytes in the tensor's shape)}``; two-byte dtypes come as uint16."""
    data = file.read_bytes()
    start = 8 + int.from_bytes(data[:8], "little")
    tensors = {}
    for name, entry in json.loads(data[8:start]).items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            unit = np.uint16 if entry["dtype"] == "BF16" else np.uint8
            array = np.frombuffer(data, unit, offset=start + begin, count=(end - begin) // np.dtype(unit).itemsize)
            tensors[name] = (entry["dtype"], array.reshape(entry["shape"]))
    return tensors


def _dequantize(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """float32 ``[..., K]`` of E4M3 codes ``[..., K]`` and E8M0 scales ``[..., K/32]``."""
    code = np.arange(256)
    exponent, mantissa = code >> 3 & 15, code & 7
    magnitude = np.where(exponent > 0, np.ldexp(8.0 + mantissa, exponent - 10), np.ldexp(mantissa * 1.0, -9))
    magnitude[code & 127 == 127] = np.nan
    e4m3 = np.where(code < 128, magnitude, -magnitude)
    powers = np.ldexp(1.0, np.arange(256) - 127)
    powers[255] = np.nan
    return (e4m3[codes] * np.repeat(powers[scales], BLOCK, axis=-1)).astype(np.float32)


class TorchModel:
    """One checkpoint in plain torch.

    Args:
        directory: an unquantized checkpoint.
        dtype: of weights and activations.
        round_activations: pass the inputs of attention and expert projections through MXFP8, as W8A8 serving does.
    """

    def __init__(self, directory: Path, *, dtype: torch.dtype, round_activations: bool = False) -> None:
        self.model = Qwen3MoeForCausalLM.from_pretrained(directory, dtype=dtype).eval()
        if round_activations:
            _round_activations(self.model)

    @torch.no_grad()
    def logprobs(self, token_ids: list[int]) -> torch.Tensor:
        """``[len(token_ids), vocab]`` float64; row i predicts token i + 1."""
        logits = self.model(input_ids=torch.tensor([token_ids])).logits[0]
        return logits.double().log_softmax(-1)

    def mean_nll(self, windows: list[list[int]]) -> float:
        """Mean negative log-likelihood over the windows, nats for a token; the first token of each isn't predicted."""
        sums = []
        for window in windows:
            picked = self.logprobs(window)[:-1].gather(1, torch.tensor(window[1:])[:, None])
            sums.append(-picked.sum().item())
        return sum(sums) / sum(len(window) - 1 for window in windows)

    @torch.no_grad()
    def greedy(self, prompts: list[list[int]], *, max_tokens: int) -> list[list[int]]:
        """Greedy continuations, without the end token; all prompts in one batch, padded on the left."""
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        out = self.model.generate(ids, attention_mask=mask, max_new_tokens=max_tokens, do_sample=False)
        ends = self.model.generation_config.eos_token_id
        answers = []
        for row in out[:, width:].tolist():
            length = next((i for i, token in enumerate(row) if token in ends), len(row))
            answers.append(row[:length])
        return answers


def _mxfp8(x: torch.Tensor) -> torch.Tensor:
    """x through MXFP8 and back: blocks of 32 along the last dimension, scale rounded up to a power of two."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    mantissa, exponent = torch.frexp(blocks.abs().amax(-1, keepdim=True))
    exponent = exponent - 9 + (mantissa > 0.875).int()  # 448 = 0.875 * 2**9
    codes = torch.ldexp(blocks, -exponent).to(torch.float8_e4m3fn)
    return torch.ldexp(codes.float(), exponent).flatten(-2).to(x.dtype)


def _round_activations(model: Qwen3MoeForCausalLM) -> None:
    for module in model.modules():
        if isinstance(module, Qwen3MoeAttention):
            for linear in (module.q_proj, module.k_proj, module.v_proj, module.o_proj):
                linear.register_forward_pre_hook(lambda _, args: (_mxfp8(args[0]),))
        if isinstance(module, Qwen3MoeExperts):
            module.forward = _experts_with_rounding.__get__(module)


def _experts_with_rounding(self, hidden_states, top_k_index, top_k_weights):
    out = torch.zeros_like(hidden_states)  # (T, H)
    rounded = _mxfp8(hidden_states)
    for expert in range(self.num_experts):
        token, slot = (top_k_index == expert).nonzero(as_tuple=True)
        gate, up = F.linear(rounded[token], self.gate_up_proj[expert]).float().chunk(2, dim=-1)
        inner = _mxfp8(F.silu(gate) * up).to(hidden_states.dtype)
        rows = F.linear(inner, self.down_proj[expert]) * top_k_weights[token, slot, None]
        out.index_add_(0, token, rows.to(out.dtype))
    return out
