"""The servers that the end-to-end tests start, and where the example lies."""

from dataclasses import dataclass
from pathlib import Path

from vllm_server import Server

HERE = Path(__file__).resolve().parent
EXAMPLE = HERE.parent.parent / "examples/tiny_moe"
ANSWER_TOKENS = 64
README_AGREEMENT = 0.987
"""On the answers to prompts.txt, of one drafted token (the example's README)."""


@dataclass(frozen=True)
class Configuration:
    """How a server is started and what that means for its answers."""

    name: str
    arguments: tuple[str, ...]
    activation: str
    ranks: int = 1


CONFIGURATIONS = {
    configuration.name: configuration
    for configuration in (
        Configuration("w8a8_eager", ("--enforce-eager",), "mxfp8"),
        Configuration("w8a16_compiled", ("--additional-config", '{"rose": {"activation": "bf16"}}'), "bf16"),
        Configuration(
            "w8a8_compiled_tp2_ep", ("--tensor-parallel-size", "2", "--enable-expert-parallel"), "mxfp8", ranks=2
        ),
    )
}
FIRST = next(iter(CONFIGURATIONS))
PLAIN_TP2 = Configuration("w8a8_eager_tp2", ("--enforce-eager", "--tensor-parallel-size", "2"), "mxfp8", ranks=2)
"""Experts cut across ranks instead of dealt out: w13 by rows, w2 and its scales by columns."""
SERVERS = {**CONFIGURATIONS, PLAIN_TP2.name: PLAIN_TP2}
ALL_TO_ALL = Configuration(
    "w8a8_eager_dp2_ep",
    (
        *("--enforce-eager", "--data-parallel-size", "2", "--enable-expert-parallel"),
        *("--all2all-backend", "rose_nvlink"),
    ),
    "mxfp8",
    ranks=2,
)
"""Two engines, each with requests of its own and half of the experts."""
EVERY_SERVER = {**SERVERS, ALL_TO_ALL.name: ALL_TO_ALL}


@dataclass(frozen=True)
class Served:
    """A running server and how it was started."""

    server: Server
    configuration: Configuration
