"""A layer's experts whose weights lie in parts by columns: memory, loading, packing, export, and what EPLB moves.

Codes of a split weight exist in the parts alone, and so do its packed scales; the row-major scales, 3 % of the weights,
stay one parameter as loaded. A split weight's parameter is on the meta device: it has the shape that vLLM asks for and
no memory, and whoever reads it gets an error instead of other values.
"""

import functools
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.gemm.column_split import ColumnSplit, Half, copy_shard, join_rows, split_rows
from vllm_rose_plugin.kernels.gemm.weights import pack_weight, packed_shape
from vllm_rose_plugin.layers.log import logger
from vllm_rose_plugin.memory.domain_memory import DomainMemory
from vllm_rose_plugin.memory.driver import round_up

ATTRIBUTE = "rose_parts"
"""Of a layer whose experts lie in parts."""
HALF_OF: dict[str, Half | None] = {"w1": "gate", "w3": "up", "w2": None}
"""vLLM's name of a shard to the rows that it holds."""
_ALIGNMENT = 256
"""Bytes, of everything that lies in a part's memory."""

Allocate = Callable[[list[int]], DomainMemory]
"""(bytes of each part) -> memory, all of it or none."""


class ExpertParts:
    """Parts of w13, of w2 or of both."""

    def __init__(
        self,
        *,
        splits: Mapping[str, ColumnSplit],
        num_experts: int,
        widths: Mapping[str, int],
        ways: str,
        packed: bool,
        allocate: Allocate | None,
        device: torch.device,
    ) -> None:
        """Allocate; memory is zero, which is 0 in every format.

        Args:
            splits: "w13", "w2" to how it is split; those that aren't are left out.
            num_experts: on this rank.
            widths: K of each.
            ways: name under which the layer's ways to launch are registered; empty for the reference kernels.
            packed: whether kernels of a GPU serve, which read packed scales.
            allocate: of memory in domains; None: torch's own memory on the device.
            device: of the parts.

        Raises:
            RuntimeError, LocalityUnavailableError: a domain has no room; nothing stays allocated.
        """
        self.splits = dict(splits)
        self.num_experts, self.ways = num_experts, ways
        self.codes: dict[str, list[torch.Tensor]] = {}
        self.packed: dict[str, list[torch.Tensor]] = {}
        """Empty for the reference kernels."""
        self.row_major: dict[str, list[torch.Tensor]] = {}
        """Scales of each part, for the reference kernels alone."""
        self._loaded: set[tuple[str, int]] = set()
        self.memory: DomainMemory | None = None
        shapes = {stem: split.part_shape(num_experts, widths[stem]) for stem, split in splits.items()}
        wanted: list[tuple[str, str, tuple[int, ...], torch.dtype]] = []
        for stem, split in splits.items():
            wanted.append((stem, "codes", shapes[stem], torch.float8_e4m3fn))
            if packed:
                how: dict[str, Any] = {"n": split.part_n, "k": widths[stem], "gate_up": split.gate_up}
                shape = packed_shape(num_groups=num_experts, target=split.target, **how)
                wanted.append((stem, "packed", shape, torch.uint8))
        parts = max(split.parts for split in splits.values())
        sizes = [round_up(torch.Size(shape).numel(), _ALIGNMENT) for _, _, shape, _ in wanted]  # of one byte each
        if allocate is not None:
            self.memory = allocate([sum(sizes)] * parts)
        for part in range(parts):
            offset = 0
            for (stem, kind, shape, dtype), size in zip(wanted, sizes, strict=True):
                if self.memory is None:
                    tensor = torch.zeros(shape, dtype=torch.uint8, device=device)
                else:
                    tensor = self.memory.tensor(part, shape=shape, dtype=torch.uint8, offset=offset).zero_()
                getattr(self, kind).setdefault(stem, []).append(tensor.view(dtype))
                offset += size

    @staticmethod
    def of(layer: Any) -> "ExpertParts | None":
        """A layer's parts; None: its weights are whole."""
        return getattr(layer, ATTRIBUTE, None)

    def load(self, stem: str, shard: torch.Tensor, *, expert: int, shard_id: str) -> None:
        """Copy one expert's rows into the parts.

        Args:
            stem: "w13" or "w2".
            shard: this rank's codes, of one half where shard_id is "w1" or "w3".
            expert: its number on this rank.
            shard_id: vLLM's name of the shard.
        """
        # vLLM counts what a load copies to tell when a layer is complete; the copy into staging has been counted.
        with _disable_current_modes():
            copy_shard(self.splits[stem], shard, self.codes[stem], group=expert, half=HALF_OF[shard_id])
        self._loaded.add((shard_id, expert))

    @property
    def filled(self) -> bool:
        """Whether anything was loaded: vLLM's dummy weights aren't."""
        return bool(self._loaded)

    def check_loaded(self, name: str) -> None:
        """Refuse weights that went another way than through the layer's weight loader, which fills the parts.

        Args:
            name: of the layer.

        Raises:
            ValueError: some experts came, others didn't.
        """
        shards = [shard for stem in self.splits for shard in (("w1", "w3") if stem == "w13" else ("w2",))]
        wanted = len(shards) * self.num_experts
        if len(self._loaded) < wanted:
            raise ValueError(
                f"{name}: {len(self._loaded)} of {wanted} shards came through the layer's weight loader, so its parts "
                "in locality domains are incomplete: use another --load-format, or set --additional-config "
                '\'{"rose": {"locality": "off"}}\''
            )

    def pack(self, scales: Mapping[str, torch.Tensor]) -> None:
        """Bring the scales to where kernels read them, in place if they were there before.

        Args:
            scales: "w13", "w2" to row-major scales ``[E, N, K/32]`` of the whole weight.
        """
        for stem, split in self.splits.items():
            whole = scales[stem]
            parts = split_rows(split, whole, functools.partial(_beside, whole))
            if stem not in self.packed:
                for own, new in zip(self.row_major.setdefault(stem, parts), parts, strict=True):
                    own.copy_(new)
                continue
            how: dict[str, Any] = {"target": split.target, "gate_up": split.gate_up}
            for codes, own, packed in zip(self.codes[stem], parts, self.packed[stem], strict=True):
                pack_weight(Mxfp8Tensor(codes, own), out=packed, **how)

    def operands(self, stem: str, codes: Any, packed: Any) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """(codes, packed scales) of each part; those given of a weight that is whole."""
        return (self.codes[stem], self.packed[stem]) if stem in self.splits else ([codes], [packed])

    def by_expert(self) -> list[torch.Tensor]:
        """What EPLB moves, as views ``[E, bytes]`` uint8, a row for each expert."""
        everything = [*self.codes.values(), *self.packed.values(), *self.row_major.values()]
        return [tensor.view(torch.uint8).view(self.num_experts, -1) for parts in everything for tensor in parts]

    def whole(self, stem: str) -> torch.Tensor:
        """Codes ``[E, N, K]`` as the checkpoint has them, in host memory: on the GPU there may be no room for them."""
        codes = [part.view(torch.uint8) for part in self.codes[stem]]
        out = torch.empty((self.num_experts, self.splits[stem].n, codes[0].shape[2]), dtype=torch.uint8, device="cpu")
        return join_rows(self.splits[stem], codes, out=out).view(torch.float8_e4m3fn)

    def put_whole(self, stem: str, codes: torch.Tensor) -> None:
        """The inverse of :meth:`whole`.

        Args:
            stem: "w13" or "w2".
            codes: e4m3 ``[E, N, K]`` on any device.
        """
        split = self.splits[stem]
        for expert, rows in enumerate(codes):
            copy_shard(split, rows, self.codes[stem], group=expert)
            self._loaded.update((shard, expert) for shard in (("w1", "w3") if stem == "w13" else ("w2",)))

    def close(self) -> None:
        """Give memory in domains back, once the device is idle; a second call does nothing."""
        memory, self.memory = self.memory, None
        self.codes, self.packed, self.row_major = {}, {}, {}
        if memory is None:
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        try:
            memory.free()
        except Exception as error:  # nobody could catch it: a layer goes when it is collected
            logger.warning("memory in locality domains stays allocated: %s", error)


def _beside(whole: torch.Tensor, part: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device=whole.device)


def attach(layer: Any, parts: ExpertParts) -> None:
    """Give a layer its parts; they are freed with it. Its state_dict holds whole weights, and takes such.

    Args:
        layer: vLLM's ``RoutedExperts``, with a parameter ``<stem>_weight`` on the meta device for each split weight.
        parts: its own.
    """
    setattr(layer, ATTRIBUTE, parts)
    weakref.finalize(layer, parts.close).atexit = False  # the driver frees what an ending process holds
    layer.register_state_dict_post_hook(_give_whole)
    layer.register_load_state_dict_pre_hook(_take_whole)


def _give_whole(layer: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    parts = ExpertParts.of(layer)
    assert parts is not None
    for stem in parts.splits:
        if parts.filled and f"{prefix}{stem}_weight" in state:
            state[f"{prefix}{stem}_weight"] = parts.whole(stem)


def _take_whole(layer: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    parts = ExpertParts.of(layer)
    assert parts is not None
    for stem in parts.splits:
        if (codes := state.get(f"{prefix}{stem}_weight")) is not None and not codes.is_meta:
            parts.put_whole(stem, codes)
            state[f"{prefix}{stem}_weight"] = codes.to("meta")  # as the parameter is, so that torch needn't warn
