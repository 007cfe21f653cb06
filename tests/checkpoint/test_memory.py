import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from checkpoint_builders import REPOSITORY, write_checkpoint

from vllm_rose_plugin.checkpoint.verify import verify

# VmHWM and not getrusage: Linux carries a parent's peak over into ru_maxrss of the process that it starts.
PROGRAM = """
import sys
from pathlib import Path
from vllm_rose_plugin.cli import quantize, verify
import argparse
module = {"quantize": quantize, "verify": verify}[sys.argv[1]]
parser = argparse.ArgumentParser()
module.add_arguments(parser)
code = module.run(parser.parse_args(sys.argv[2:]))
print(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1])
sys.exit(code)
"""


def peak_bytes(*arguments: object) -> int:
    result = subprocess.run(
        [sys.executable, "-c", PROGRAM, *map(str, arguments)],
        check=True,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY)},
    )
    return int(result.stdout.split()[-1]) * 1024


@pytest.mark.parametrize("layout", [pytest.param("linear", marks=pytest.mark.slow), "stacked", "transposed"])
def test_peak_memory_is_bounded_by_the_largest_tensor(tmp_path: Path, layout: str) -> None:
    """The many small ones may not add up; the largest may count twice."""
    pool = torch.randn(1 << 20, generator=torch.Generator().manual_seed(0)).mul_(0.02).bfloat16()

    def weight(*shape: int) -> torch.Tensor:
        size = torch.Size(shape).numel()
        return pool.repeat(-(-size // pool.numel()))[:size].view(*shape)

    large = {
        "linear": {"model.layers.0.self_attn.o_proj.weight": (24576, 2048)},
        "stacked": {"model.layers.0.mlp.experts.gate_up_proj": (16, 1536, 2048)}
        | {"model.layers.0.mlp.experts.down_proj": (16, 2048, 768)},
        "transposed": {"model.layers.0.mlp.experts.gate_up_proj": (16, 2048, 1536)}
        | {"model.layers.0.mlp.experts.down_proj": (16, 768, 2048)},
    }[layout]
    tensors = {name: weight(*shape) for name, shape in large.items()}
    tensors["model.embed_tokens.weight"] = weight(16384, 2048)
    for number in range(24 if layout == "linear" else 2):
        tensors[f"model.layers.{number + 1}.self_attn.o_proj.weight"] = weight(4096, 2048)
    source = write_checkpoint(tmp_path / "src", tensors, config={"model_type": "uneven"})
    if layout == "linear":
        assert (source / "model.safetensors").stat().st_size > 560e6
    largest = max(tensor.nbytes for tensor in tensors.values())
    del tensors
    assert peak_bytes("quantize", source, tmp_path / "dst", "--workers", 2) < 2 * largest + 500e6
    if layout == "linear":
        assert peak_bytes("verify", tmp_path / "dst") < 500e6
    assert verify(tmp_path / "dst").ok
