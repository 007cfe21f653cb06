"""A model, no measurement: what weights beside the SMs that read them could save on a GPU with locality domains.

    python benchmarks/model_locality.py [--near TB/s] [--far TB/s] [--matrix PFLOP/s] [--domains N] [--sms USED,ALL]
        [--fork-join US] [--launch US] [--tokens 1,…,1024] [--brief]

For one expert layer of one rank, w13 with SwiGLU and then w2, it compares two placements:

- plain: memory is spread evenly, so of N domains 1/N of all reads are near and the rest far;
- split: each weight that `plan_split` splits is read near; what it refuses, and all tokens and results, stay plain.

A GEMM takes the longer of two times: its bytes at those rates, or its operations at the matrix rate, of which default
mode has the share of its SMs (200 of 212); plus a launch, and for the split forking and joining. Experts that get no
token aren't read: tokens are spread evenly at random. Bytes: weights and tokens in MXFP8 (33 bytes for 32 elements),
results of w2 in bf16. Left out: L2 (tokens are counted as if it held none), tiles that are partly empty, waves, and how
a rate falls where few SMs read. So small numbers of tokens are flattered, and ratios say more than microseconds.

The published figures for such a split are a mean gain of 1.16 and a best one of 1.2. Reading near instead of evenly
spread gains at most 1/N + (1 - 1/N) * near/far. The default far rate is the one at which the bound is the published
mean; so that mean is put in, and what comes out is how the gain falls with shapes and tokens. Near and matrix rates are
assumptions too (nominal, rounded). On a real GPU, give those that were measured.
"""

import argparse
from collections.abc import Iterator
from dataclasses import dataclass
from statistics import mean

from vllm_rose_plugin.kernels.gemm.column_split import plan_split

PUBLISHED_MEAN, PUBLISHED_BEST = 1.16, 1.2
TARGET = "sm_107a"
TOKENS = (1, 4, 16, 64, 256, 1024)
MXFP8_BYTES = 33 / 32
"""Of an element."""


@dataclass(frozen=True)
class Model:
    """The experts of one layer."""

    name: str
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int


MODELS = (Model("Qwen3-235B", 4096, 1536, 128, 8), Model("MiniMax-like", 3072, 1536, 256, 8))
STRATEGIES = (("TP2", 2, 1), ("TP4", 4, 1), ("EP2", 1, 2), ("EP4", 1, 4))
"""(name, ranks that share an expert, ranks that share the experts)."""


@dataclass(frozen=True)
class Machine:
    """A GPU, by what the model takes of it."""

    near: float = 22.0
    """TB/s that all SMs together read, each from its own domain. Assumed."""
    far: float = 0.0
    """TB/s that they read, each from another domain; 0: what makes `bound` the published mean."""
    matrix: float = 17.5
    """PFLOP/s of MXFP8 on all SMs. Assumed."""
    domains: int = 2
    used_sms: int = 212
    """SMs of a split; default mode has 200."""
    sms: int = 212
    launch: float = 3.0
    """Microseconds that a GEMM takes beside bytes and operations. Assumed."""
    fork_join: float = 0.0
    """Microseconds more of a split GEMM. What it is on a GPU with domains was never measured."""

    @property
    def far_rate(self) -> float:
        """TB/s."""
        return self.far or self.near / ratio_for(PUBLISHED_MEAN, self.domains)

    @property
    def even_rate(self) -> float:
        """TB/s where memory is spread evenly."""
        return 1 / (1 / self.domains / self.near + (1 - 1 / self.domains) / self.far_rate)

    @property
    def bound(self) -> float:
        """The gain of a kernel that does nothing but read weights."""
        return self.near / self.even_rate


@dataclass(frozen=True)
class Row:
    """A prediction."""

    model: str
    strategy: str
    tokens: int
    plain_us: float
    split_us: float
    split: str
    """Which weights are split."""

    @property
    def gain(self) -> float:
        """Below 1: a loss."""
        return self.plain_us / self.split_us


def ratio_for(gain: float, domains: int) -> float:
    """near/far at which reading near instead of evenly spread gains so much; 1 with one domain: nothing is far."""
    return 1 + (gain - 1) * domains / (domains - 1) if domains > 1 else 1.0


def predict(model: Model, *, tp: int, ep: int, tokens: int, machine: Machine, strategy: str) -> Row:
    """One shape.

    Args:
        model: the layer.
        tp, ep: ranks that share each expert's intermediate size, and the experts.
        tokens: of the layer, over all ranks that share its experts.
        machine: the GPU.
        strategy: its name.
    """
    hidden, intermediate = model.hidden_size, model.intermediate_size // tp
    local = model.num_experts // ep
    active = local * (1 - (1 - model.top_k / model.num_experts) ** tokens)
    rows = tokens * model.top_k / ep
    split_sms = machine.used_sms / machine.sms
    plain_us = split_us = 0.0
    names = []
    for name, n, k, gate_up in (("w13", 2 * intermediate, hidden, True), ("w2", hidden, intermediate, False)):
        weights = active * n * k * MXFP8_BYTES
        results = intermediate * MXFP8_BYTES if gate_up else 2 * hidden
        others = rows * (k * MXFP8_BYTES + results)
        matrix_us = 2 * rows * n * k / machine.matrix / 1e9
        plain = max((weights + others) / machine.even_rate / 1e6, matrix_us) + machine.launch
        plain_us += plain
        if plan_split(n=n, parts=machine.domains, target=TARGET, gate_up=gate_up).parts == 1:
            split_us += plain
            continue
        names.append(name)
        read_us = (weights / machine.near + others / machine.even_rate) / 1e6
        split_us += max(read_us, matrix_us / split_sms) + machine.launch + machine.fork_join
    return Row(model.name, strategy, tokens, plain_us, split_us, " + ".join(names) or "none")


def predictions(machine: Machine, tokens: tuple[int, ...] = TOKENS) -> Iterator[Row]:
    """Every model, strategy and number of tokens."""
    for model in MODELS:
        for strategy, tp, ep in STRATEGIES:
            for count in tokens:
                yield predict(model, tp=tp, ep=ep, tokens=count, machine=machine, strategy=strategy)


def report(machine: Machine, rows: list[Row], *, brief: bool = False) -> str:
    """Markdown."""
    far = f"far {machine.far_rate:.1f}" + ("" if machine.far else " (from the published mean)")
    lines = [
        "MODEL, not measured. "
        f"{machine.domains} domains, near {machine.near:.1f} TB/s, {far}, {machine.matrix:g} PFLOP/s, "
        f"{machine.used_sms} of {machine.sms} SMs, launch {machine.launch:g} us, fork/join {machine.fork_join:g} us.",
        "",
        "| model | strategy | tokens | split | plain us | split us | gain | fork/join may cost us |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in [] if brief else rows:
        count = row.split.count("w")
        spare = (row.plain_us - row.split_us) / count + machine.fork_join if count else 0.0
        lines.append(
            f"| {row.model} | {row.strategy} | {row.tokens} | {row.split} | {row.plain_us:.1f} | {row.split_us:.1f} | "
            f"{row.gain:.3f} | {spare:.1f} |"
        )
    if brief:
        lines = lines[:1]
    gains = [row.gain for row in rows]
    best = max(rows, key=lambda row: row.gain)
    lines += [
        "",
        f"mean gain {mean(gains):.3f} (published {PUBLISHED_MEAN}), best {best.gain:.3f} at {best.model} "
        f"{best.strategy} {best.tokens} tokens (published {PUBLISHED_BEST}), "
        f"least {min(gains):.3f}, bound {machine.bound:.3f}",
        f"near/far that the published mean takes at least: {ratio_for(PUBLISHED_MEAN, machine.domains):.2f}; "
        f"the published best: {ratio_for(PUBLISHED_BEST, machine.domains):.2f}",
    ]
    return "\n".join(lines)


def main() -> None:
    """Print the model's table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    default = Machine()
    parser.add_argument("--near", type=float, default=default.near, help="TB/s (%(default)s, assumed)")
    parser.add_argument("--far", type=float, default=0.0, help="TB/s (from the published mean)")
    parser.add_argument("--matrix", type=float, default=default.matrix, help="PFLOP/s (%(default)s, assumed)")
    parser.add_argument("--domains", type=int, default=default.domains)
    parser.add_argument("--sms", default="212,212", help="those of a split, all: 200,212 in default mode (%(default)s)")
    parser.add_argument("--launch", type=float, default=default.launch, help="us of a GEMM (%(default)s, assumed)")
    parser.add_argument("--fork-join", type=float, default=0.0, help="us of a split GEMM (%(default)s, never measured)")
    parser.add_argument("--tokens", default=",".join(map(str, TOKENS)))
    parser.add_argument("--brief", action="store_true", help="the last lines only")
    options = parser.parse_args()
    used, sms = map(int, options.sms.split(","))
    if not (0 < used <= sms and options.domains > 0 and options.near > 0 and options.far >= 0 and options.matrix > 0):
        parser.error("rates and --domains must be above 0, --sms two numbers, the first not above the second")
    if min(options.fork_join, options.launch) < 0:
        parser.error("--launch and --fork-join must not be below 0")
    machine = Machine(
        near=options.near, far=options.far, matrix=options.matrix, domains=options.domains, used_sms=used, sms=sms,
        launch=options.launch, fork_join=options.fork_join,
    )  # fmt: skip
    tokens = tuple(map(int, options.tokens.split(",")))
    print(report(machine, list(predictions(machine, tokens)), brief=options.brief))


if __name__ == "__main__":
    main()
