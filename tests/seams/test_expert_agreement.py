"""With EPLB, both ranks have experts in parts or neither has: they decide in two processes, on GPUs that may differ."""

import functools
from types import SimpleNamespace

import pytest

pytestmark = pytest.mark.slow
BOTH = [["w13", 2], ["w2", 2]]


@pytest.fixture
def ranks(probe, version):
    result = probe(version, "expert_agreement")
    assert result["others"] == [0] and result["cuda_starts"] == 0
    return result["ranks"]


def of(ranks, case):
    return [each[case] for each in ranks]


def test_ranks_that_are_alike_do_what_each_would(ranks):
    assert of(ranks, "both faster") == [BOTH, BOTH] and of(ranks, "both slower") == [None, None]
    assert of(ranks, "named") == [BOTH, BOTH], "a way by name asks for no times"


@pytest.mark.parametrize("case", ["one slower", "one without domains", "other domains"])
def test_nobody_splits_where_one_would_not_alike(ranks, case):
    """Lists of other tensors on the other rank would make EPLB wait for ever, or move wrong bytes."""
    assert of(ranks, case) == [None, None]


def test_without_eplb_each_rank_decides_for_itself(ranks):
    assert of(ranks, "each alone") == [BOTH, None]


def test_a_way_by_name_ends_start_up_on_all_ranks(ranks):
    missing = of(ranks, "named, one without domains")
    assert missing[0] == missing[1] and "rank 1 of 2: ValueError: the rose setting locality=default" in missing[0]
    assert "the driver serves CUDA 13.0" in missing[0] and 'Set it to "auto" or "off"' in missing[0]
    other = of(ranks, "named, other domains")
    assert other[0] == other[1] and other[0].startswith("ValueError: the rose setting locality=default")
    assert "w13 in 2 parts for sm_90a, w2 in 2 parts for sm_90a, packed scales on rank 0; w13 in 4 parts" in other[0]


def test_it_is_said_which_ranks_differ(ranks):
    for each in ranks:
        slower = each["logged"][0]
        assert slower.startswith("Locality domains: experts (E=4;H=512;I=512;top_k=2) lie whole on all ranks: EPLB")
        assert slower.endswith("packed scales on rank 0; whole on rank 1.") and len(each["logged"]) == 3


def test_ranks_talk_once_for_layers_that_are_alike(ranks):
    assert of(ranks, "phases") == [1 + 11, 1 + 11], "to meet, and once in each case with EPLB"


def test_nixl_moves_only_what_rdma_reaches(ranks):
    """It registers all experts' weights and reads them on the other rank where they lie."""
    assert of(ranks, "by nixl") == of(ranks, "no eplb, out of its reach") == [BOTH, BOTH]
    assert of(ranks, "by nixl, out of its reach") == [None, None]
    (text, other) = of(ranks, "by nixl, named, out of its reach")
    assert text == other and "EPLB moves experts by nixl, which can't reach memory in domains of this GPU" in text
    assert '--eplb-config \'{"communicator": "torch_gloo"}\'' in text


def test_each_gpu_of_a_process_has_a_driver_of_its_own(monkeypatch):
    """Two engines may follow each other on two GPUs: memory and streams are those of the current one."""
    from vllm_rose_plugin.layers import locality

    monkeypatch.setattr(locality, "Driver", lambda *, device: SimpleNamespace(device=device))
    monkeypatch.setattr(locality, "_driver_of", functools.cache(locality._driver_of.__wrapped__))
    found = []
    for current in (0, 1, 0):
        monkeypatch.setattr(locality.torch.cuda, "current_device", lambda current=current: current)
        found.append(locality._driver())
    assert [driver.device for driver in found] == [0, 1, 0] and found[0] is found[2]
