"""A weight in several parts on sm_90: the producer draws its tiles from the parts' queues, and loads from their maps.

See domain_queue.py. The ticket of the next tile is drawn before the stages of a tile are brought, so its way to L2 and
back hides behind them; the first one before `griddepcontrol.wait`.
"""

from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Int32

from vllm_rose_plugin.kernels.gemm.config import GemmConfig
from vllm_rose_plugin.kernels.gemm.domain_tickets import draw, first_domain, leave, settle
from vllm_rose_plugin.kernels.gemm.sm90_load import Producer
from vllm_rose_plugin.kernels.gemm.tensor_maps import tensor_map_of


class TileOfPart(NamedTuple):
    """What consumers read of a tile, then what only the producer needs."""

    group: Int32
    row_tile: Int32
    """Counted through all parts."""
    first_token: Int32
    num_tokens: Int32
    part: Int32
    part_row_tile: Int32


class DomainProducer(Producer):
    """As its base, for a weight in parts: ``loads`` has weights and scales of the further parts at its end."""

    def __init__(self, config: GemmConfig):
        super().__init__(config)
        self.own = 4 if config.w8a8 else 3
        """Loads that its base knows."""

    @cute.jit
    def run(
        self,
        loads: tuple,
        stages: tuple,
        tiles: cute.Tensor,
        full,
        empty,
        table: cute.Tensor,
        expert_counts: cute.Tensor,
        expert_offsets: cute.Tensor,
        rank: Int32,
        workspace: tuple,
    ):
        """See :meth:`Producer.run`.

        Args:
            workspace: (SMs) int32, the domain of each; counters of the launch.
        """
        config = self.config
        domains = cutlass.const_expr(config.domains)
        sm_domains, counters = workspace
        domain, left = first_domain(sm_domains, domains), Int32(domains - 1)
        ticket = draw(counters, domain)
        self.prepare(loads)
        self.schedule.build(table, expert_counts, expert_offsets)
        length = self.schedule.total(table)
        stage, phase, chunk = Int32(0), Int32(1), Int32(0)  # empty slots pass at first
        waited = Boolean(not config.early_counts)
        more = Boolean(True)
        while more:
            before = left
            ticket, domain, left = settle(counters, ticket, domain, left, length, domains)
            more = ticket < length
            if more:
                if left != before:
                    chunk = Int32(0)  # tickets of another queue begin anywhere
                found, chunk = self.schedule.find(table, ticket, chunk)
                tile = TileOfPart(
                    found.group,
                    domain * config.part_row_tiles + found.row_tile,
                    found.first_token,
                    found.num_tokens,
                    domain,
                    found.row_tile,
                )
                ticket = draw(counters, domain)
                stage, phase, waited = self.bring(loads, stages, tiles, full, empty, tile, rank, stage, phase, waited)
        leave(counters, cute.arch.grid_dim()[0], domains)
        self.finish(tiles, full, empty, stage, phase, waited)

    def parts_of(self, loads: tuple, stages: tuple, tile: Any, rank: Int32) -> tuple:
        """Coordinates are the same in every part."""
        return super().parts_of(loads[: self.own], stages, tile._replace(row_tile=tile.part_row_tile), rank)

    def map_of(self, loads: tuple, load: int, tile: Any) -> dict[str, Any]:
        further = loads[self.own :]
        atoms = [loads[load][0], *(part[0] for part in further[load::2])]
        return {"tma_desc_ptr": tensor_map_of(atoms, tile.part)}
