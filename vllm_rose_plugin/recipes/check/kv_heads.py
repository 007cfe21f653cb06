"""Which bytes of K and V a decode rank reads from which prefill rank, and the proof that each arrives exactly once.

Where heads live is vLLM's `QKVParallelLinear`; what is read is vLLM's NIXL connector (`nixl/tp_mapping.py` and
`base_worker.py`, 0.32 and 0.33), described here in our own words and compared with it in tests. In the layout LBHNC a
head of a block is one run of bytes with its K and its V, so a read is a run of whole heads.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from vllm_rose_plugin.recipes.deployment import parallelism
from vllm_rose_plugin.recipes.finding import Finding
from vllm_rose_plugin.recipes.schema import Recipe


@dataclass(frozen=True)
class Read:
    """One run of bytes of one KV block, copied from a prefill rank into the reading decode rank's block."""

    source_rank: int
    source_start: int
    start: int
    length: int


def held_heads(*, ranks: int, rank: int, heads: int) -> range | None:
    """KV heads on one tensor parallel rank; None where vLLM can't deal them out."""
    if ranks >= heads:
        if ranks % heads:
            return None
        return range(rank // (ranks // heads), rank // (ranks // heads) + 1)
    if heads % ranks:
        return None
    return range(rank * heads // ranks, (rank + 1) * heads // ranks)


def reads(*, prefill_ranks: int, decode_ranks: int, rank: int, heads: int, head_bytes: int) -> list[Read]:
    """What decode rank ``rank`` reads for one block.

    Args:
        prefill_ranks: tensor parallel size of prefill; divides that of decode, or is divided by it.
        decode_ranks: that of decode.
        rank: of decode.
        heads: KV heads of the model.
        head_bytes: of one head's K and V in one block.
    """
    block = max(1, heads // decode_ranks) * head_bytes
    if decode_ranks >= prefill_ranks:
        source = rank * prefill_ranks // decode_ranks
        if decode_ranks == prefill_ranks:
            slices = 0
        elif decode_ranks > heads:
            slices = rank * heads // decode_ranks - source * heads // prefill_ranks
        else:
            slices = rank % (decode_ranks // prefill_ranks)
        return [Read(source_rank=source, source_start=slices * block, start=0, length=block)]
    first_source: dict[int, int] = {}  # of several ranks with the same head, the first is asked
    each = prefill_ranks // decode_ranks
    for source in range(rank * each, (rank + 1) * each):
        first_source.setdefault(source * heads // prefill_ranks, source)
    length = block // len(first_source)
    return [
        Read(source_rank=source, source_start=0, start=slot * length, length=length)
        for slot, source in enumerate(first_source.values())
    ]


def coverage_problem(*, prefill_ranks: int, decode_ranks: int, heads: int, head_bytes: int) -> str | None:
    """Go through every byte run of every decode rank.

    Returns:
        None where each byte of each head that a rank holds is written once, with that same byte of that same head; else
        what goes wrong first.
    """
    if max(prefill_ranks, decode_ranks) % min(prefill_ranks, decode_ranks):
        return f"neither of the sizes {prefill_ranks} and {decode_ranks} divides the other, which NIXL needs"
    for ranks, role in ((prefill_ranks, "prefill"), (decode_ranks, "decode")):
        if held_heads(ranks=ranks, rank=0, heads=heads) is None:
            return f"{heads} KV heads can't be dealt out to {ranks} {role} ranks"
    for rank in range(decode_ranks):
        given = reads(
            prefill_ranks=prefill_ranks, decode_ranks=decode_ranks, rank=rank, heads=heads, head_bytes=head_bytes
        )
        problem = _rank_problem(given, rank, prefill_ranks, decode_ranks, heads, head_bytes)
        if problem:
            return f"decode rank {rank}: {problem}"
    return None


def _rank_problem(
    given: list[Read], rank: int, prefill_ranks: int, decode_ranks: int, heads: int, head_bytes: int
) -> str | None:
    held = held_heads(ranks=decode_ranks, rank=rank, heads=heads)
    assert held is not None
    end = 0
    for read in sorted(given, key=lambda read: read.start):
        if read.start != end:
            how = "twice" if read.start < end else "never"
            return f"bytes {min(end, read.start)} to {max(end, read.start)} are written {how}"
        end = read.start + read.length
        theirs = held_heads(ranks=prefill_ranks, rank=read.source_rank, heads=heads)
        assert theirs is not None
        if not 0 <= read.source_start <= read.source_start + read.length <= len(theirs) * head_bytes:
            return f"reads beyond the block of prefill rank {read.source_rank}"
        wanted = held.start * head_bytes + read.start
        got = theirs.start * head_bytes + read.source_start
        if wanted != got:
            return (
                f"gets byte {got % head_bytes} of head {got // head_bytes} for byte {wanted % head_bytes} of head "
                f"{wanted // head_bytes}"
            )
    if end != len(held) * head_bytes:
        return f"bytes {end} to {len(held) * head_bytes} are never written"
    return None


def check_kv_heads(recipe: Recipe, *, heads: int, head_bytes: int) -> Iterator[Finding]:
    """The finding, if any, of a disaggregated recipe whose KV heads are split over tensor parallel ranks."""
    sizes = {
        "prefill": parallelism(recipe.roles["prefill"]).tensor,
        "decode": parallelism(recipe.roles["decode"]).tensor,
    }
    problem = coverage_problem(
        prefill_ranks=sizes["prefill"], decode_ranks=sizes["decode"], heads=heads, head_bytes=head_bytes
    )
    if problem:
        yield recipe.finding(
            ("roles", "decode", "args", "tensor-parallel-size"),
            sizes["decode"],
            f"with prefill's {sizes['prefill']}, K and V don't arrive whole: {problem}",
            f"sizes of which one divides the other, and each divides {heads} KV heads or is a multiple of them",
            "change one of the two sizes",
        )
