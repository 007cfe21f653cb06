"""Where everything lies in a rank's part of the exchange's memory: the same on all ranks, for 2 to 72 of them.

The functions take Python's integers on the host and the DSL's on the device, so that what a test counts is what the
kernels do. Imports neither torch nor cutlass.

A part holds, in this order:

- state: how many launches of each kind this rank has begun, and whether it gave up; nobody else's;
- plan flags: for each sender one word, the epoch up to which its plan is there;
- token flags: for each sender and each of its tokens one word, the last epoch in which that token's row came;
- row flags: for each of this rank's tokens and each of the token's destinations one word, the last epoch in which the
  combined row came back;
- plans: for each parity and sender one bit for each of the sender's tokens: whether it is sent here in this epoch;
- dispatch rows: for each parity, sender and token of the sender one row: codes, scales, routing;
- combine rows: for each of this rank's tokens and each of its destinations one row of bf16.

Every word of flags has one writer. Dispatch alternates between two halves, combine needs one: `interface.py` says why,
and the search in ``tests/dp_exchange/`` that it is so.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from vllm_rose_plugin.kernels.contracts import MXFP8_BLOCK

MAX_RANKS = 72
MAX_TOP_K = 16
MAX_BLOCKS = 1024
"""Of a launch; each has its own copy of the count of launches."""
MAX_PLAN_WORDS = 8192
"""Words of 32 tokens that a block of the receiver adds up in its shared memory."""
WORD = 8
"""Bytes of a flag and of a count. With 32 bits a flag that no launch used for a day would look new again."""
VECTOR = 16
PLAN_BITS = 32
"""Tokens of one word of a plan."""
LINE = 128
PHASES = ("dispatch plan", "dispatch token", "combine row")
"""What a rank can wait for: a peer's plan; one token of a peer; one combined row of a peer."""
SEND, RECEIVE = 0, 1
"""Kinds of launches that are counted."""


class Payload(StrEnum):
    """How tokens travel to the experts. Results always travel back as bf16."""

    MXFP8 = "mxfp8"
    """H bytes of codes and H/32 of scales."""
    BF16 = "bfloat16"
    """2 H bytes."""


def round_up(size: int, multiple: int) -> int:
    """The next multiple."""
    return -(-size // multiple) * multiple


@dataclass(frozen=True)
class ExchangeShape:
    """What all ranks of an exchange have in common."""

    hidden_size: int
    """H, a multiple of 32."""
    top_k: int
    num_experts: int
    """Of all ranks, with redundant ones; a multiple of group_size: rank r has those from ``r * num_local_experts``."""
    max_tokens: int
    """Most tokens that one rank may send in one step."""
    group_size: int
    """Ranks of the expert-parallel group."""
    payload: Payload = Payload.MXFP8

    @property
    def num_local_experts(self) -> int:
        """Experts of one rank."""
        return self.num_experts // self.group_size

    @property
    def slots(self) -> int:
        """Most ranks that one token can be sent to."""
        return min(self.top_k, self.group_size)

    @property
    def max_rows(self) -> int:
        """Most rows that one rank can receive in one step."""
        return self.group_size * self.max_tokens

    @property
    def plan_words(self) -> int:
        """32-bit words of one sender's plan, in whole vectors."""
        return round_up(-(-self.max_tokens // PLAN_BITS), VECTOR // 4)

    @property
    def most_tokens(self) -> int:
        """What `max_tokens` may be with so many ranks: the receiver adds up the plans of all."""
        return MAX_PLAN_WORDS // self.group_size // (VECTOR // 4) * (VECTOR // 4) * PLAN_BITS

    def check(self, *, setting: str) -> None:
        """Refuse what no kernel takes.

        Args:
            setting: what a user changes to have another `max_tokens`.

        Raises:
            ValueError: with the value, the legal range, and `setting` where it mends it.
        """
        if not 2 <= self.group_size <= MAX_RANKS:
            raise ValueError(f"an exchange between {self.group_size} ranks; it must be 2 to {MAX_RANKS}")
        if self.hidden_size < MXFP8_BLOCK or self.hidden_size % MXFP8_BLOCK:
            raise ValueError(f"H is {self.hidden_size}; it must be a multiple of {MXFP8_BLOCK}")
        if not 1 <= self.top_k <= MAX_TOP_K:
            raise ValueError(f"top_k is {self.top_k}; it must be 1 to {MAX_TOP_K}")
        if self.num_experts < self.group_size or self.num_experts % self.group_size:
            raise ValueError(
                f"{self.num_experts} experts over {self.group_size} ranks; every rank must have equally many"
            )
        most = self.most_tokens
        if not 1 <= self.max_tokens <= most:
            raise ValueError(
                f"max_tokens={self.max_tokens}; with {self.group_size} ranks it must be 1 to {most}: {setting} sets it"
            )

    def check_step(self, *, num_tokens: int, step_tokens: int | None, setting: str) -> int:
        """The rows of one step for each sender; refuses what would not fit before anything is sent.

        Raises:
            ValueError: more tokens than the step, or the buffer, has room for; the message names `setting`.
        """
        most = self.max_tokens if step_tokens is None else step_tokens
        if not 1 <= most <= self.max_tokens:
            raise ValueError(
                f"step_tokens={step_tokens} must be 1 to max_tokens={self.max_tokens}: {setting} makes room for more"
            )
        if num_tokens > most:
            what = f"step_tokens={most}" if most < self.max_tokens else f"max_tokens={most}"
            raise ValueError(
                f"{num_tokens} tokens in one step, more than {what} of this exchange: {setting} makes room for more"
            )
        return most


@dataclass(frozen=True)
class Layout:
    """Byte offsets in a part."""

    shape: ExchangeShape

    # ---- one row of dispatch ----

    @property
    def code_bytes(self) -> int:
        """Of a token's elements."""
        return self.shape.hidden_size * (1 if self.shape.payload is Payload.MXFP8 else 2)

    @property
    def scales(self) -> int:
        """Byte of a row at which its scales begin; there are none in bf16."""
        return round_up(self.code_bytes, VECTOR)

    @property
    def ids(self) -> int:
        """Byte of a row at which the token's topk_ids begin, int32, as the router gave them."""
        blocks = self.shape.hidden_size // MXFP8_BLOCK if self.shape.payload is Payload.MXFP8 else 0
        return self.scales + round_up(blocks, VECTOR)

    @property
    def weights(self) -> int:
        """Byte of a row at which the token's router weights begin, float32."""
        return self.ids + round_up(4 * self.shape.top_k, VECTOR)

    @property
    def slot(self) -> int:
        """Byte of a row at which the number of this destination among the token's stands, int32."""
        return self.weights + round_up(4 * self.shape.top_k, VECTOR)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of dispatch: whole lines."""
        return round_up(self.slot + 4, LINE)

    @property
    def combine_row_bytes(self) -> int:
        """Bytes of a row of combine."""
        return round_up(2 * self.shape.hidden_size, LINE)

    # ---- the part ----

    @property
    def abandoned(self) -> int:
        """Behind the counts of launches: how many waits have come to their deadline, int32."""
        return 2 * MAX_BLOCKS * WORD

    @property
    def plan_flags(self) -> int:
        """Start of the plan flags."""
        return round_up(self.abandoned + WORD, LINE)

    @property
    def token_flags(self) -> int:
        """Start of the token flags."""
        return round_up(self.plan_flags + self.shape.group_size * WORD, LINE)

    @property
    def row_flags(self) -> int:
        """Start of the row flags."""
        return round_up(self.token_flags + self.shape.max_rows * WORD, LINE)

    @property
    def plans(self) -> int:
        """Start of the plans. Zero what lies before, before the first launch of any rank."""
        return round_up(self.row_flags + self.shape.max_tokens * self.shape.slots * WORD, LINE)

    @property
    def dispatch_rows(self) -> int:
        """Start of the rows of dispatch."""
        return round_up(self.plans + 2 * self.shape.group_size * self.shape.plan_words * 4, LINE)

    @property
    def combine_rows(self) -> int:
        """Start of the rows of combine."""
        return self.dispatch_rows + 2 * self.shape.max_rows * self.row_bytes

    @property
    def size(self) -> int:
        """Bytes of the part."""
        return self.combine_rows + self.shape.max_tokens * self.shape.slots * self.combine_row_bytes

    def count_at(self, kind: Any, block: Any) -> Any:
        """Byte offset of one block's copy of the count of launches of one kind."""
        return (kind * MAX_BLOCKS + block) * WORD

    def plan_flag_at(self, sender: Any) -> Any:
        """Byte offset of the word that `sender` writes once its plan is here."""
        return self.plan_flags + sender * WORD

    def token_flag_at(self, sender: Any, token: Any) -> Any:
        """Byte offset of the word that `sender` writes once the row of its token is here."""
        return self.token_flags + (sender * self.shape.max_tokens + token) * WORD

    def row_flag_at(self, place: Any) -> Any:
        """Byte offset of the word that a destination writes once its row is back; `place` is token * slots + slot."""
        return self.row_flags + place * WORD

    def plan_at(self, parity: Any, sender: Any) -> Any:
        """Byte offset of a sender's plan."""
        return self.plans + (parity * self.shape.group_size + sender) * (self.shape.plan_words * 4)

    def dispatch_row_index(self, parity: Any, sender: Any, token: Any) -> Any:
        """Number of a row of dispatch, each of `row_bytes`."""
        return (parity * self.shape.group_size + sender) * self.shape.max_tokens + token

    def describe(self) -> str:
        """What a start-up message says about the memory."""
        shape = self.shape
        back = self.size - self.combine_rows
        return (
            f"{self.size / 2**20:.1f} MiB on each of {shape.group_size} ranks for {shape.max_tokens} tokens of each: "
            f"{2 * shape.max_rows * self.row_bytes / 2**20:.1f} MiB for tokens that come ({shape.payload.value}, two "
            f"halves), {back / 2**20:.1f} MiB for results that come back"
        )
