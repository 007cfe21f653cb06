"""Agreement between ranks: values, failures, deadlines, ranks that come late or never, stores that go."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from rank_processes import in_processes
from rank_threads import run_ranks
from torch.distributed import FileStore, HashStore, PrefixStore, TCPStore

from vllm_rose_plugin.memory.rendezvous import (
    Group,
    GroupError,
    MissingRankError,
    StoreLostError,
    group_from_process_group,
)


def fail(error):
    raise error


def stores(kind, size, tmp_path):
    """One store for each rank, as separate processes would have."""
    if kind == "file":
        return [FileStore(str(tmp_path / "store"), size) for _ in range(size)]
    libuv = kind != "tcp without libuv"
    host = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False, use_libuv=libuv)
    others = [
        TCPStore("127.0.0.1", host.port, None, False, wait_for_workers=False, use_libuv=libuv) for _ in range(size - 1)
    ]
    made = [host, *others]
    return [PrefixStore("prefix", store) for store in made] if kind == "prefix" else made


@pytest.mark.parametrize("kind", ["file", "tcp", "tcp without libuv", "prefix"])
def test_every_kind_of_store(kind, tmp_path):
    made = stores(kind, 3, tmp_path)

    def agree(group):
        group._store = made[group.rank]
        values = [group.agree(f"phase {n}", lambda n=n: [group.rank, n]) for n in range(4)]
        with pytest.raises(GroupError, match="rank 1 of 3: sick"):
            group.agree("sick", lambda: fail(RuntimeError("sick")) if group.rank == 1 else None)
        return values, group.agree("after", lambda: group.rank)

    begun = time.monotonic()
    expected = [[[rank, n] for rank in range(3)] for n in range(4)]
    assert run_ranks(3, agree, timeout=20) == [(expected, [0, 1, 2])] * 3
    assert time.monotonic() - begun < 10, "a rank slept through a wake-up"


def test_keys_of_past_phases_are_deleted():
    store = HashStore()

    def agree(rank):
        group = Group(store=store, rank=rank, size=2, name="keys", timeout=20)
        for _ in range(50):
            group.agree("phase", lambda: None)

    threads = [threading.Thread(target=agree, args=(rank,)) for rank in range(2)]
    [thread.start() for thread in threads]
    [thread.join() for thread in threads]
    assert store.num_keys() <= 2 * 5  # two phases of 2 answers, count, verdict, read


def test_ranks_with_the_same_reason_are_named_together():
    def agree(group):
        group.agree("size", lambda: fail(ValueError("too large") if group.rank else KeyError("x")))

    texts = {str(error) for error in run_ranks(4, agree)}
    assert texts == {
        "test: phase 'size' failed on rank 0 of 4: KeyError: 'x'; on ranks 1, 2, 3 of 4: ValueError: too large"
    }


def test_a_rank_that_never_comes_is_named_on_all_with_its_phase():
    together = threading.Barrier(2)

    def agree(group):
        together.wait(30)
        group.agree("map", lambda: None)

    begun = time.monotonic()
    results = run_ranks(4, agree, timeout=0.6, absent={1, 3})
    assert time.monotonic() - begun < 10
    present = [results[0], results[2]]
    assert all(isinstance(error, MissingRankError) and list(error.reasons) == [1, 3] for error in present)
    assert {str(error) for error in present} == {
        "test: phase 'map' failed on ranks 1, 3 of 4: it didn't arrive within 0.6 s; look at its log"
    }


def test_what_failed_elsewhere_is_told_beside_who_is_missing():
    """It may be why they are: they wait in a kernel for the rank that gave up."""
    together = threading.Barrier(2)

    def agree(group):
        together.wait(30)

        def action():
            if group.rank == 0:
                raise MemoryError("the device is full")

        group.agree("time", action)

    results = run_ranks(3, agree, timeout=0.6, absent={1})
    assert all(isinstance(error, MissingRankError) and set(error.reasons) == {0, 1} for error in results[::2])
    (text,) = {str(error) for error in results[::2]}
    assert "MemoryError: the device is full" in text and "rank 1 of 3: it didn't arrive within 0.6 s" in text
    assert isinstance(results[0].__cause__, MemoryError)


def test_a_late_rank_gets_the_verdict_of_the_others():
    together, given_up = threading.Barrier(2), threading.Event()

    def agree(group):
        if group.rank == 2:
            assert given_up.wait(30)
        else:
            together.wait(30)
        try:
            group.agree("map", lambda: None)
        finally:
            given_up.set()

    results = run_ranks(3, agree, timeout=0.6)
    assert all(isinstance(error, MissingRankError) and list(error.reasons) == [2] for error in results)
    assert len({str(error) for error in results}) == 1


def test_many_deadlines_at_the_last_moment_are_decided_alike():
    """Ranks whose time is up while the last one arrives: all go on, or all give up."""
    outcomes = []
    for number in range(10):

        def agree(group, number=number):
            time.sleep(0.145 + 0.001 * number if group.rank == 3 else 0)
            group.agree("map", lambda: None)
            return "on"

        results = [str(result) for result in run_ranks(4, agree, timeout=0.15)]
        assert len(set(results)) == 1
        outcomes.append(results[0])
    assert outcomes  # either way is right; that all agree is what counts


def test_an_interrupted_rank_tells_the_others_and_leaves():
    def agree(group):
        group.agree("create", lambda: fail(KeyboardInterrupt()) if group.rank == 1 else None)

    results = run_ranks(3, agree)
    assert isinstance(results[1], KeyboardInterrupt)
    assert all("rank 1 of 3: interrupted by KeyboardInterrupt" in str(results[rank]) for rank in (0, 2))


def test_ranks_in_different_phases_are_told_apart():
    results = run_ranks(3, lambda group: group.agree("map" if group.rank else "access", lambda: None))
    assert len({str(error.reasons) for error in results}) == 1
    assert results[0].reasons[0] == "it is in phase 'access': the ranks run apart"
    assert results[0].reasons[2] == "it is in phase 'map': the ranks run apart"


@pytest.mark.parametrize(("rank", "size", "timeout"), [(2, 2, 1), (-1, 2, 1), (0, 0, 1), (0, 1, 0)])
def test_arguments_out_of_range(rank, size, timeout):
    with pytest.raises(ValueError, match="must be"):
        Group(store=HashStore(), rank=rank, size=size, name="x", timeout=timeout)


def _gloo_group(rank, size, path, **arguments):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=size)
    return group_from_process_group(dist.group.WORLD, address="127.0.0.1", name="gloo", **arguments)


class SlowReader:
    """A store whose answers take their time."""

    def __init__(self, store):
        self._store = store

    def __getattr__(self, name):
        return getattr(self._store, name)

    def multi_get(self, keys):
        time.sleep(0.5)
        return self._store.multi_get(keys)


def _over_gloo(rank, path):
    group = _gloo_group(rank, 3, path, timeout=20)
    values = group.agree("numbers", lambda: rank)
    if rank:
        group._store = SlowReader(group._store)
    try:
        group.agree("create", lambda: fail(RuntimeError("no memory")) if rank == 0 else None)
    except GroupError as error:
        if rank == 0:  # whose process holds the store
            os.kill(os.getpid(), signal.SIGKILL)
        return values, str(error)


def test_the_ranks_of_a_gloo_process_group(tmp_path):
    """A failing rank that ends at once still tells the others why, though its process holds the store."""
    text = "gloo: phase 'create' failed on rank 0 of 3: no memory"
    assert in_processes(3, _over_gloo, tmp_path / "init") == [None] + [([0, 1, 2], text)] * 2


def _while_a_model_is_built(rank, path):
    with torch.device("meta"):  # as vLLM has its device as torch's default then
        group = _gloo_group(rank, 2, path, timeout=5)
        values = group.agree("numbers", lambda: rank)
    dist.barrier()  # rank 0's process holds the store
    return values


def test_a_group_is_made_whatever_torchs_default_device_is(tmp_path):
    """The address of the store is the host's: gloo can't send what lies on a GPU."""
    assert in_processes(2, _while_a_model_is_built, tmp_path / "init") == [[0, 1]] * 2


def _without_rank(rank, path, missing):
    dist.init_process_group("gloo", init_method=f"file://{path}", rank=rank, world_size=3)
    if rank == missing:
        time.sleep(2)
        return "stayed away"
    begun = time.monotonic()
    try:
        group_from_process_group(dist.group.WORLD, address="127.0.0.1", name="gloo", timeout=0.5)
    except MissingRankError as error:
        return list(error.reasons), error.phase, time.monotonic() - begun < 1.9


@pytest.mark.parametrize("missing", [0, 2])
def test_a_rank_missing_from_a_gloo_process_group(tmp_path, missing):
    values = in_processes(3, _without_rank, tmp_path / "init", missing)
    assert values.pop(missing) == "stayed away"
    assert values == [([missing], "meet", True)] * 2


def _lose_the_store(rank, path):
    try:
        group = _gloo_group(rank, 2, path, timeout=10)
        if rank == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        group.agree("map", lambda: None)
    except StoreLostError as error:
        return str(error)


def test_the_process_that_holds_the_store_dies(tmp_path):
    values = in_processes(2, _lose_the_store, tmp_path / "init")
    assert values[0] is None and "the process that holds it has ended" in values[1]


def test_vllms_stateless_group_fits():
    """The store of vLLM's own class, which its stateless groups have."""
    from vllm.distributed.utils import StatelessProcessGroup

    made = stores("tcp", 2, None)

    def agree(group):
        stateless = StatelessProcessGroup(rank=group.rank, world_size=2, store=made[group.rank])
        again = Group(
            store=stateless.store, rank=stateless.rank, size=stateless.world_size, name="stateless", timeout=20
        )
        return stateless.all_gather_obj(group.rank), again.agree("numbers", lambda: again.rank)

    results = run_ranks(2, agree)
    assert [numbers for _, numbers in results] == [[0, 1]] * 2
