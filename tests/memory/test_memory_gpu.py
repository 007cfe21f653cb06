"""Real drivers: one GPU alone, and two GPUs in two processes. Plain allocations only, no multicast object."""

import tempfile

import pytest
import torch
from rank_processes import in_processes
from torch.distributed import FileStore, HashStore

from vllm_rose_plugin.memory.driver import Driver, DriverError, HandleType
from vllm_rose_plugin.memory.handles import settle_handle_type
from vllm_rose_plugin.memory.rendezvous import Group, GroupError
from vllm_rose_plugin.memory.symmetric import allocate
from vllm_rose_plugin.memory.windows import BufferInUseError

MIB = 2**20


def free_bytes(device):
    torch.cuda.synchronize(device)
    return torch.cuda.mem_get_info(device)[0]


@pytest.mark.gpu
def test_a_tensor_in_the_buffer_of_one_rank():
    torch.cuda.init()
    torch.zeros(1, device="cuda:0")
    group = Group(store=HashStore(), rank=0, size=1, name="alone")
    driver = Driver(device=0)
    choice = settle_handle_type(driver=driver, group=group)
    before = free_bytes(0)
    with allocate(driver=driver, group=group, size=256 * MIB, handle_type=choice.handle_type) as buffer:
        assert free_bytes(0) <= before - 192 * MIB
        tensor = buffer.tensor(shape=(1024, 4096), dtype=torch.bfloat16, offset=4096)
        assert tensor.data_ptr() == buffer.address + 4096 and tensor.device == torch.device("cuda", 0)
        random = torch.randn(1024, 4096, device="cuda:0", dtype=torch.bfloat16)
        tensor.copy_(random)
        assert torch.equal(tensor + 0, random)
        with pytest.raises(BufferInUseError):
            buffer.free()
        del tensor, random
    torch.cuda.empty_cache()
    assert free_bytes(0) > before - 64 * MIB, "the driver takes and gives back some MiB of its own"


@pytest.mark.gpu
def test_a_thousand_buffers_leave_no_memory():
    torch.zeros(1, device="cuda:0")
    group = Group(store=HashStore(), rank=0, size=1, name="alone")
    driver = Driver(device=0)
    addresses, lost = set(), []
    for _ in range(10):  # others may take or give memory meanwhile, a leak would be there each time
        before = free_bytes(0)
        for _ in range(100):
            with allocate(driver=driver, group=group, size=2 * MIB, handle_type=HandleType.POSIX_FD) as buffer:
                addresses.add(buffer.address)
        lost.append(before - free_bytes(0))
    assert min(lost) <= 0, f"bytes lost in 100 buffers: {lost}"
    assert len(addresses) < 1000, "the driver never gave an address again: addresses leak"


@pytest.mark.gpu
def test_the_driver_refuses_more_than_there_is():
    group = Group(store=HashStore(), rank=0, size=1, name="alone")
    _, total = torch.cuda.mem_get_info(0)
    with pytest.raises(GroupError, match=r"CUDA_ERROR_OUT_OF_MEMORY.*GPU 0 is full"):
        allocate(driver=Driver(device=0), group=group, size=2 * total, handle_type=HandleType.POSIX_FD)
    with pytest.raises(DriverError, match="cuDeviceGet"):
        Driver(device=1000)


def _peer_to_peer(rank, store):
    torch.cuda.set_device(rank)
    group = Group(store=FileStore(store, 2), rank=rank, size=2, name="pair")
    driver = Driver(device=rank)
    choice = settle_handle_type(driver=driver, group=group)
    torch.zeros(1, device=f"cuda:{rank}")
    before = free_bytes(rank)
    with allocate(driver=driver, group=group, size=256 * MIB, handle_type=choice.handle_type) as buffer:
        mine = buffer.tensor(shape=(MIB,), dtype=torch.int32)
        mine.fill_(rank + 1)
        torch.cuda.synchronize()
        group.agree("written", lambda: None)
        copy = torch.empty(MIB, dtype=torch.int32, device=f"cuda:{rank}")
        # cuMemcpyDtoD on the peer's addresses: over NVLink, through this rank's own mapping
        driver.call("cuMemcpyDtoD", copy.data_ptr(), buffer.addresses[1 - rank], 4 * MIB)
        torch.cuda.synchronize()
        seen = copy.unique().tolist()
        group.agree("read", lambda: None)
        del mine, copy
    torch.cuda.empty_cache()
    return choice.handle_type.value, seen, before - free_bytes(rank)


@pytest.mark.multi_gpu
def test_two_gpus_read_each_others_memory():
    with tempfile.TemporaryDirectory() as directory:
        first, second = in_processes(2, _peer_to_peer, f"{directory}/store")
    assert first[0] == second[0] and (first[1], second[1]) == ([2], [1])
    assert max(first[2], second[2]) < 64 * MIB, "the first mapping of a peer costs the driver some MiB, not a buffer"
