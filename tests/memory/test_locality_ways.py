"""Ways of launching, and the memory of a layer's parts, on the fake driver: any number of domains, refusals."""

import gc
from types import SimpleNamespace

import numpy
import pytest
import torch
from locality_driver import LocalityDriver, one_domain
from memfd_driver import CUresult

from vllm_rose_plugin.config import RoseConfig
from vllm_rose_plugin.kernels.contracts import Mxfp8Tensor
from vllm_rose_plugin.kernels.gemm.column_split import join_packed, plan_split
from vllm_rose_plugin.kernels.gemm.weights import PackedWeight, pack_weight
from vllm_rose_plugin.kernels.moe_experts import make_ways
from vllm_rose_plugin.kernels.moe_experts.make_ways import Domains
from vllm_rose_plugin.memory import windows
from vllm_rose_plugin.memory.driver import Driver, DriverError
from vllm_rose_plugin.memory.locality import LocalityUnavailableError, domain_of
from vllm_rose_plugin.memory.sm_partitions import SmPartitions

NOTHING = {0}


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """Streams are named by their numbers, memory is the host's, and no way is left by another test."""

    class Host:
        def __init__(self, window):
            self.window, self.__array_interface__ = window, window.__cuda_array_interface__

    monkeypatch.setattr(windows, "as_bytes", lambda window, device: torch.from_numpy(numpy.asarray(Host(window))))
    monkeypatch.setattr(
        SmPartitions, "streams", lambda self: [SimpleNamespace(cuda_stream=each.stream) for each in self.partitions]
    )
    monkeypatch.setattr(make_ways, "_made", {})
    monkeypatch.setattr(make_ways, "_kept", [])


def domains_of(fake, count, *, forced=False):
    return Domains(Driver(device=0, bindings=fake), count, forced)


@pytest.mark.parametrize(
    ("layout", "name", "sm_counts", "clusters"),
    [
        ({"domains": (100, 100), "spare": 12}, "default", (100, 100), True),
        ({"domains": (100, 100), "spare": 12}, "backfill", (106, 106), False),
        ({"domains": (104, 96), "spare": 0}, "default", (96, 96), True),
        ({"domains": (104, 96), "spare": 0}, "backfill", (100, 100), False),
        ({"domains": (50, 50, 50, 50), "spare": 12}, "default", (48, 48, 48, 48), True),
        ({"domains": (50, 50, 50, 50), "spare": 12}, "backfill", (54, 54, 52, 52), False),
    ],
)
def test_forked_ways_of_domains(layout, name, sm_counts, clusters):
    """Default mode has whole clusters of four; a way is made once, and stays."""
    fake = LocalityDriver(**layout)
    domains = domains_of(fake, len(layout["domains"]))
    way = domains.way(name)
    assert (way.sm_counts, way.clusters) == (sm_counts, clusters)
    assert len(way.streams.streams) == len(sm_counts) == fake.ledger()["contexts"]
    assert domains.way(name) is way and fake.ledger()["contexts"] == len(sm_counts)
    other = "backfill" if name == "default" else "default"
    assert domains.way(other) is not way and fake.ledger()["streams"] == 2 * len(sm_counts)


@pytest.mark.parametrize("count", [2, 3, 4])
@pytest.mark.parametrize("name", ["default", "backfill"])
def test_forced_ways_of_a_gpu_of_one_domain(count, name):
    way = domains_of(one_domain(), count, forced=True).way(name)
    assert len(set(way.sm_counts)) == 1 and len(way.sm_counts) == count and sum(way.sm_counts) <= 132


def test_forced_single_launch(monkeypatch):
    monkeypatch.setattr(
        make_ways.probe, "forced_sm_domains", lambda count, domains, device: (count, domains, str(device))
    )
    assert domains_of(one_domain(), 2, forced=True).way("single_launch").sm_domains == (132, 2, "cuda:0")


def test_single_launch_learns_its_table_and_gives_the_partitions_back(monkeypatch):
    fake, seen = LocalityDriver(domains=(100, 100), spare=12), []
    monkeypatch.setattr(
        make_ways.probe, "learn_sm_domains", lambda made: seen.extend(p.sm_count for p in made.partitions) or seen
    )
    assert domains_of(fake, 2).way("single_launch").sm_domains == [106, 106], "no SM is left out"
    assert set(fake.ledger().values()) == NOTHING


@pytest.mark.parametrize("name", ["default", "backfill", "single_launch"])
@pytest.mark.parametrize("call", ["cuDevSmResourceSplit", "cuGreenCtxCreate", "cuGreenCtxStreamCreate"])
@pytest.mark.parametrize("time", [1, 2])
def test_a_refusal_leaves_nothing_and_a_second_try_works(monkeypatch, name, call, time):
    monkeypatch.setattr(make_ways.probe, "learn_sm_domains", lambda made: "table")
    if (call, time) == ("cuDevSmResourceSplit", 2):
        call = "cuDeviceGetDevResource"
        time = 1
    fake = LocalityDriver(fail={(call, time): CUresult.CUDA_ERROR_NOT_PERMITTED})
    with pytest.raises(DriverError, match=call):
        domains_of(fake, 2).way(name)
    assert set(fake.ledger().values()) == NOTHING and make_ways._kept == []
    assert domains_of(fake, 2).way(name) is not None


def test_two_engines_have_what_they_hold_apart():
    """Ways of two drivers are two; parts of two layers too."""
    first, second = LocalityDriver(), LocalityDriver()
    assert domains_of(first, 2).way("default") is not domains_of(second, 2).way("default")


# ---- a layer's parts ----


def parts_of(fake, count, *, target="sm_107a", experts=3, forced=False):
    """(parts, weights, scales)"""
    from vllm_rose_plugin.layers.expert_parts import ExpertParts

    size, hidden = 128 * count, 256 * count
    splits = {
        "w13": plan_split(n=2 * size, parts=count, target=target, gate_up=True),
        "w2": plan_split(n=hidden, parts=count, target=target),
    }
    domains = domains_of(fake, count, forced=forced)
    parts = ExpertParts(
        splits=splits,
        num_experts=experts,
        widths={"w13": hidden, "w2": size},
        ways="some",
        packed=True,
        allocate=domains.allocate,
        device=torch.device("cpu"),
    )
    shapes = {"w13": (experts, 2 * size, hidden), "w2": (experts, hidden, size)}
    generator = torch.Generator().manual_seed(count)
    weights = {
        stem: torch.randint(0, 0x70, shape, generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn)
        for stem, shape in shapes.items()
    }
    scales = {
        stem: torch.randint(100, 140, (*shape[:2], shape[2] // 32), generator=generator, dtype=torch.uint8)
        for stem, shape in shapes.items()
    }
    return parts, weights, scales


@pytest.mark.parametrize("target", ["sm_90a", "sm_107a"])
@pytest.mark.parametrize("count", [2, 4])
def test_parts_are_loaded_packed_and_joined(count, target):
    fake = LocalityDriver(domains=(50,) * count)
    parts, weights, scales = parts_of(fake, count, target=target)
    assert all(not each.view(torch.uint8).any() for each in parts.by_expert()), "zero until something is loaded"
    for expert in range(3):
        for shard, rows in (("w1", 0), ("w3", 1)):
            half = weights["w13"][expert].chunk(2)[rows]
            parts.load("w13", half, expert=expert, shard_id=shard)
        with pytest.raises(ValueError, match=f"layer: {3 * expert + 2} of 9 shards"):
            parts.check_loaded("layer")
        parts.load("w2", weights["w2"][expert], expert=expert, shard_id="w2")
    parts.check_loaded("layer")
    parts.pack(scales)
    for stem, whole in weights.items():
        assert torch.equal(parts.whole(stem).view(torch.uint8), whole.view(torch.uint8))
        split = parts.splits[stem]
        packed = [
            PackedWeight(codes.view(torch.uint8), own, split.gate_up, target)
            for codes, own in zip(*parts.operands(stem, None, None), strict=True)
        ]
        expected = pack_weight(Mxfp8Tensor(whole, scales[stem]), target=target, gate_up=split.gate_up)
        assert torch.equal(join_packed(split, packed).scales, expected.scales)
    driver = Driver(device=0, bindings=fake)
    addresses = [
        [t.data_ptr() for t in held] for held in zip(*parts.codes.values(), *parts.packed.values(), strict=True)
    ]
    assert [{domain_of(driver, address) for address in held} for held in addresses] == [{i} for i in range(count)]
    del packed
    parts.close()
    parts.close()
    assert set(fake.ledger().values()) == NOTHING


def test_an_expert_is_a_row_of_everything_that_eplb_moves():
    """Moving rows moves the expert: it is what packing the moved weights gives."""
    fake = LocalityDriver()
    parts, weights, scales = parts_of(fake, 2)
    for stem, whole in weights.items():
        parts.put_whole(stem, whole)
    parts.pack(scales)
    order = torch.tensor([2, 0, 1])
    for rows in parts.by_expert():
        assert rows.shape[0] == 3
        rows.copy_(rows[order])
    other, _, _ = parts_of(fake, 2)
    for stem, whole in weights.items():
        other.put_whole(stem, whole.view(torch.uint8)[order].view(torch.float8_e4m3fn))
    other.pack({stem: each[order] for stem, each in scales.items()})
    assert all(torch.equal(a, b) for a, b in zip(parts.by_expert(), other.by_expert(), strict=True))


@pytest.mark.parametrize("time", [1, 2])
@pytest.mark.parametrize("call", ["cuMemCreate", "cuMemAddressReserve", "cuMemMap", "cuMemSetAccess"])
def test_a_failure_in_any_domain_frees_the_others(call, time):
    fake = LocalityDriver(fail={(call, time): CUresult.CUDA_ERROR_OUT_OF_MEMORY})
    with pytest.raises(DriverError, match=call):
        parts_of(fake, 2)
    assert set(fake.ledger().values()) == NOTHING
    parts, _, _ = parts_of(fake, 2)
    assert fake.ledger()["handles"] == 2
    parts.close()


def test_a_second_domain_without_room_frees_the_first():
    fake = LocalityDriver(room=2**21)
    kept, _, _ = parts_of(fake, 2)
    before = fake.ledger()
    with pytest.raises(DriverError, match="OUT_OF_MEMORY"):
        parts_of(fake, 2, experts=200)
    assert fake.ledger() == before
    kept.close()


def test_memory_that_is_still_used_stays_with_a_warning(monkeypatch):
    from vllm_rose_plugin.layers import expert_parts

    fake, said = LocalityDriver(), []
    monkeypatch.setattr(expert_parts.logger, "warning", lambda text, error: said.append(text % error))
    parts, _, _ = parts_of(fake, 2)
    held = parts.by_expert()
    parts.close()
    assert "stays allocated: 8 tensors still lie in the buffer" in said[0] and fake.ledger()["handles"] == 2
    del held
    gc.collect()


# ---- the setting ----


@pytest.mark.parametrize(
    ("rose", "message"),
    [
        ({"locality": "defalt"}, "'defalt' is not allowed: Input should be 'auto', 'off', 'default', 'backfill' or"),
        (
            {"locality_force_domains": 2},
            "2 is not allowed: .*locality=auto forces no domains: set locality to default,",
        ),
        ({"locality": "off", "locality_force_domains": 2}, "locality=off forces no domains"),
        (
            {"locality": "off", "locality_linear": True},
            "True is not allowed: .*locality=off splits nothing: set locality to auto, default, backfill,",
        ),
        ({"locality": "default", "locality_force_domains": 1}, "1 is not allowed: .*one domain is no split; 2 to 4"),
        ({"locality": "default", "locality_force_domains": 5}, "5 is not allowed: .*less than or equal to 4"),
        ({"locality": "default", "locality_force_domains": "two"}, "'two' is not allowed: .*valid integer"),
        ({"localty": "off"}, "unknown rose setting 'localty'; legal ones: .*locality, locality_force_domains"),
    ],
)
def test_settings_that_are_refused(rose, message):
    with pytest.raises(ValueError, match=message):
        RoseConfig.load({"rose": rose}, {})


def test_settings_from_either_place_and_what_is_hashed():
    assert RoseConfig.load({}, {}).locality == "auto"
    config = RoseConfig.load({}, {"ROSE_LOCALITY": "backfill", "ROSE_LOCALITY_FORCE_DOMAINS": "4"})
    assert (config.locality, config.locality_force_domains) == ("backfill", 4)
    assert RoseConfig.load({"rose": {"locality": "off"}}, {"ROSE_LOCALITY": "default"}).locality == "off"
    with pytest.raises(ValueError, match="ROSE_LOCALITY: 'on' is not allowed"):
        RoseConfig.load({}, {"ROSE_LOCALITY": "on"})
    assert "locality" not in RoseConfig.load({}, {}).recorded(), "nobody's compile cache changes by the default"
    assert config.recorded()["locality"] == "backfill"


def test_what_is_missing_is_an_answer_of_the_driver():
    with pytest.raises(LocalityUnavailableError, match="no locality domains on GPU 0"):
        domains_of(one_domain(), 2).way("default")
