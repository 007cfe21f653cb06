"""The device functions on a GPU; multimem is only read, see the machine-code tests."""

import pytest
import torch
from ptx_kernels import PtxCase, build

from vllm_rose_plugin.kernels.jit.compile import compile

pytestmark = pytest.mark.gpu


def kernel(name: str, *arguments):
    return compile(family="ptx", config=PtxCase(name, arguments), build=build)


def cuda_ints(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


@pytest.mark.parametrize("scope", ["gpu", "sys"])
@pytest.mark.parametrize("flag", ["store", "red", "add"])
def test_message_arrives_whole(scope, flag):
    send = kernel("message", scope, flag)
    expected = torch.arange(32, dtype=torch.int32) * 3 + 1
    for _ in range(50):
        data, flags, out = (torch.zeros(32, dtype=torch.int32, device="cuda") for _ in range(3))
        send(data, flags, out)
        assert torch.equal(out.cpu(), expected) and flags[0].item() == 1


@pytest.mark.parametrize("bits", [32, 64, 128, 256])
@pytest.mark.parametrize("hint", ["NORMAL", "EVICT_FIRST", "EVICT_LAST", "NO_ALLOCATE"])
def test_copies_every_word_and_no_more(bits, hint):
    n = 128 * (bits // 32) * 40
    source = torch.randint(-(2**31), 2**31, (n,), dtype=torch.int64).to(torch.int32).cuda()
    target = torch.full((n + 64,), -7, dtype=torch.int32, device="cuda")
    kernel("copy", bits, hint, hint)(source, target[32:-32])
    assert torch.equal(target[32:-32], source)
    assert (target[:32] == -7).all() and (target[-32:] == -7).all()


@pytest.mark.parametrize("lanes", [32, 16, 8, 4, 2, 1])
def test_reductions_stay_in_their_group(lanes):
    x = torch.randint(-1000, 1000, (64,)).float()
    sums, maxima, following = (torch.full((64,), float("nan"), device="cuda") for _ in range(3))
    kernel("reduce", lanes)(x.cuda(), sums, maxima, following)
    groups = x.view(-1, lanes)
    assert torch.equal(sums.cpu(), groups.sum(1, keepdim=True).expand_as(groups).reshape(-1))
    assert torch.equal(maxima.cpu(), groups.amax(1, keepdim=True).expand_as(groups).reshape(-1))
    # The last lane of a group asks for a lane outside of it and keeps its own value.
    neighbour = torch.cat([groups[:, 1:], groups[:, -1:]], 1)
    assert torch.equal(following.cpu(), neighbour.reshape(-1))


def test_grid_barrier_over_launches_and_graph_replays():
    sm_count = torch.cuda.get_device_properties(0).multi_processor_count
    state = torch.zeros(1, dtype=torch.uint32, device="cuda")
    wrong = torch.zeros(1, dtype=torch.int32, device="cuda")
    cells = torch.zeros(sm_count * 64, dtype=torch.int32, device="cuda")
    rounds = 0
    for blocks in (sm_count, 1, 2, sm_count - 1):  # the same word, whatever the grid
        cells.zero_()
        run = kernel("rounds", 5, blocks)
        run(state, cells, wrong)
        rounds = cells[0].item()
        assert rounds == 5 and wrong.item() == 0
    cells.zero_()
    run = kernel("rounds", 5, sm_count)
    run(state, cells, wrong)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run(state, cells, wrong)
    for _ in range(200):
        graph.replay()
    torch.cuda.synchronize()
    assert wrong.item() == 0 and (cells == 5 * 201).all()
    assert state.view(torch.int32).item() & 0x7FFFFFFF == 0  # only the epoch is left


def test_chain_of_dependent_launches_loses_nothing():
    number = torch.zeros(128, dtype=torch.int32, device="cuda")
    add = kernel("chain")
    add(number)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(100):
            add(number)
    for _ in range(10):
        graph.replay()
    torch.cuda.synchronize()
    assert (number == 1001).all()


def test_waiting_ends_with_the_flag_or_the_deadline():
    wait = kernel("patience")
    out = torch.zeros(2, dtype=torch.int64, device="cuda")
    wait(cuda_ints(5), 5, 10**9, out)
    assert out[0].item() == 1 and out[1].item() < 10**8
    wait(cuda_ints(4), 5, 2_000_000, out)
    assert out[0].item() == 0 and 2_000_000 <= out[1].item() < 10**9
    wait(cuda_ints(-(2**31)), 2**31 - 1, 2_000_000, out)  # epochs wrap around
    assert out[0].item() == 1
