"""What serves a group of ranks, which tensors it takes, and its life; ranks are threads, kernels and GPUs are fakes."""

import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "memory"))
from memfd_driver import MemfdDriver
from rank_threads import run_ranks

from vllm_rose_plugin.config import AllReduceChoice
from vllm_rose_plugin.kernels import call_counts
from vllm_rose_plugin.kernels.all_reduce.config import Access
from vllm_rose_plugin.kernels.peer_timeout import PeerTimeoutError
from vllm_rose_plugin.layers import group_all_reduce, live_groups
from vllm_rose_plugin.layers.group_all_reduce import Wish, make
from vllm_rose_plugin.memory.driver import Driver
from vllm_rose_plugin.memory.multicast import MulticastUnsupportedError
from vllm_rose_plugin.memory.rendezvous import MissingRankError

AUTO, P2P, NVLS = AllReduceChoice.AUTO, AllReduceChoice.P2P, AllReduceChoice.NVLS
HIDDEN, TOKENS = 64, 32


def wish(choice=AUTO, **changes):
    values = {"timeout": 7.0, "hidden_size": HIDDEN, "dtype": torch.bfloat16, "most_tokens": TOKENS, "norm": False}
    return Wish(choice=choice, **{**values, "batch_invariant": False, **changes})


class FakeAllReduce:
    """In place of the kernels: doubles its input, remembers what was done with it."""

    def __init__(
        self, *, driver, group, max_bytes, access=Access.PEERS, same_bits=False, timeout=60.0, setting="", refuse=()
    ):
        self.group, self.access, self.timeout, self.setting = group, access, timeout, setting
        self.same_bits = same_bits
        self.max_bytes = max_bytes
        self.log = ["made"]
        self.fault: Exception | None = None

        def allocate():
            if (access, group.rank) in refuse:
                raise MulticastUnsupportedError(f"GPU {group.rank} won't")

        group.agree(f"fake {access.value}", allocate)

    def __call__(self, x):
        self.check()
        assert x.is_contiguous() and x.data_ptr() % 32 == 0
        self.log.append((tuple(x.shape), self.timeout))
        return 2 * x

    def check(self):
        if self.fault:
            raise self.fault

    def suspend(self):
        self.log.append("suspend")

    def resume(self):
        self.log.append("resume")

    def close(self):
        self.log.append("close")


@pytest.fixture
def fakes(monkeypatch):
    """The AllReduces that were made; `refuse` and `no_multicast` say what the ranks' GPUs can't."""
    seen = SimpleNamespace(made=[], refuse=set(), no_multicast=set(), tuned=[])

    def all_reduce(**arguments):
        made = FakeAllReduce(refuse=seen.refuse, **arguments)
        seen.made.append(made)
        return made

    def driver(*, device):
        bindings = MemfdDriver(devices=128)
        bindings.multicast_supported = int(device not in seen.no_multicast)
        return Driver(device=device, bindings=bindings)

    def warm(reduce, *, hidden_size, dtype, most_rows):
        seen.tuned.append((reduce.access, hidden_size, dtype, most_rows))

    monkeypatch.setattr(group_all_reduce, "AllReduce", all_reduce)
    monkeypatch.setattr(group_all_reduce, "Driver", driver)
    monkeypatch.setattr(group_all_reduce, "tune", lambda reduce: None)
    monkeypatch.setattr(group_all_reduce, "warm", warm)
    monkeypatch.setattr(group_all_reduce.gpu, "obstacle", lambda: "")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    return seen


def made_on(size, of_rank=None, **keywords):
    """What `make` comes to on every rank; `of_rank` is a Wish, or makes one of a rank; None: auto."""

    def run(group):
        asked = of_rank(group.rank) if callable(of_rank) else of_rank or wish()
        return make(group=group, name="tp:0", device=group.rank, wish=asked)

    return run_ranks(size, run, **keywords)


@pytest.mark.parametrize(
    ("choice", "size", "no_multicast", "changes", "provider", "reason"),
    [
        (AUTO, 2, (), {}, "p2p", "there are 2 ranks and NVLS is taken from 4"),
        (AUTO, 3, (), {}, "p2p", "there are 3 ranks"),
        (AUTO, 4, (), {}, "nvls", "4 ranks with NVLink multicast"),
        (AUTO, 4, (3,), {}, "p2p", "a GPU has no NVLink multicast"),
        (AUTO, 8, (), {"batch_invariant": True}, "p2p", "VLLM_BATCH_INVARIANT"),
        (P2P, 8, (), {}, "p2p", "it is asked for"),
        (NVLS, 2, (), {}, "nvls", "it is asked for"),
    ],
)
def test_what_serves_a_group(fakes, caplog, choice, size, no_multicast, changes, provider, reason):
    fakes.no_multicast |= set(no_multicast)
    with caplog.at_level(logging.INFO, logger="vllm.vllm_rose_plugin"):
        groups = made_on(size, wish(choice, **changes))
    assert {group.why for group in groups} == {groups[0].why}
    assert groups[0].why.startswith(f"{provider}, since ") and reason in groups[0].why
    access = Access.PEERS if provider == "p2p" else Access.MULTIMEM
    assert fakes.tuned == [(access, HIDDEN, torch.bfloat16, TOKENS)] * size
    assert {each.max_bytes for each in fakes.made} == {TOKENS * HIDDEN * 2}
    assert all(each.same_bits for each in fakes.made), "ranks would route tokens differently"
    assert all("all_reduce_timeout" in each.setting for each in fakes.made)
    lines = [record.getMessage() for record in caplog.records]
    assert len(lines) == size
    assert f"group tp:0: {provider}, since " in lines[0] and "waits 7 s for a rank" in lines[0]


def test_auto_goes_on_to_peer_to_peer_where_a_rank_refuses_nvls(fakes):
    fakes.refuse.add((Access.MULTIMEM, 2))
    groups = made_on(4)
    assert {group.why for group in groups} == {groups[0].why}
    assert groups[0].why.startswith("p2p, since there are 4 ranks and nvls was refused (nvls: test: phase")
    assert "rank 2 of 4: GPU 2 won't" in groups[0].why


def test_auto_leaves_the_group_to_vllm_where_nothing_works(fakes, caplog):
    fakes.refuse |= {(Access.MULTIMEM, 0), (Access.PEERS, 3)}
    assert made_on(4) == [None] * 4
    lines = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert len(lines) == 4 and len(set(lines)) == 1
    assert "vLLM's own, since ours can't serve it: nvls: " in lines[0] and "; p2p: " in lines[0]


@pytest.mark.parametrize(("choice", "access"), [(P2P, Access.PEERS), (NVLS, Access.MULTIMEM)])
def test_a_way_that_is_named_and_cannot_be_had_ends_start_up(fakes, choice, access):
    fakes.refuse.add((access, 1))
    errors = made_on(4, wish(choice))
    assert {str(error) for error in errors} == {str(errors[0])} and isinstance(errors[0], ValueError)
    assert f'--additional-config {{"rose": {{"all_reduce": "{choice}"}}}} can\'t serve group tp:0' in str(errors[0])
    assert "rank 1 of 4: GPU 1 won't" in str(errors[0])
    assert {each.access for each in fakes.made} <= {access}, "something else was tried"


@pytest.mark.parametrize("choice", [AUTO, P2P])
@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"dtype": torch.float64}, "the model's dtype is torch.float64; ours are torch.bfloat16"),
        ({"hidden_size": 128}, "asked for"),
    ],
)
def test_one_rank_that_cannot_decides_for_all(fakes, choice, changes, text):
    results = made_on(3, lambda rank: wish(choice, **(changes if rank == 1 else {})))
    if choice is AUTO:
        assert results == [None] * 3
    else:
        assert len({str(result) for result in results}) == 1 and text in str(results[0])
    assert not fakes.made


def test_a_machine_that_runs_no_kernel_of_ours(fakes, monkeypatch):
    monkeypatch.setattr(group_all_reduce.gpu, "obstacle", lambda: "compute capability 8.0 has no target")
    assert made_on(2) == [None, None]
    for error in made_on(2, wish(NVLS)):
        assert "can't serve group tp:0" in str(error) and "compute capability 8.0 has no target" in str(error)


def test_more_ranks_than_a_rack(fakes):
    assert made_on(73) == [None] * 73
    assert not fakes.made


def test_a_rank_that_does_not_come_is_an_error_and_no_reason_for_another_way(fakes):
    *errors, nobody = made_on(3, timeout=1.0, absent=[2])
    assert nobody is None and all(isinstance(error, MissingRankError) for error in errors)
    assert "rank 2 of 3: it didn't arrive within 1 s" in str(errors[0])


def test_what_fails_after_the_buffers_are_made_frees_them(fakes, monkeypatch):
    def tune(reduce):
        def measure():
            if reduce.group.rank == 1:
                raise RuntimeError("no compiler")

        reduce.group.agree("tune", measure)

    monkeypatch.setattr(group_all_reduce, "tune", tune)
    assert made_on(2) == [None, None]
    assert [each.log for each in fakes.made] == [["made", "close"]] * 2


@pytest.fixture
def group(fakes):
    """A group of two ranks as the first one sees it."""
    return made_on(2)[0]


class FakeNorm:
    """In place of the fused launch: up to 4 rows, of which it gives twos and threes."""

    why = "in one launch with residual and norm for 1 to 4 tokens"

    def takes(self, x, residual, weight):
        return "a tuning" if len(x) <= 4 else None

    def __call__(self, x, *, residual, weight, eps, tuning):
        assert tuning == "a tuning" and eps == 1e-5
        return torch.full_like(x, 2), torch.full_like(residual, 3)


def with_norm(fakes, monkeypatch, made_norm, *, size=2, choice=AUTO):
    def make_norm(reduce, *, hidden_size, dtype, most_rows):
        assert (hidden_size, dtype, most_rows) == (HIDDEN, torch.bfloat16, TOKENS)
        return reduce.group.agree("fake norm", lambda: made_norm(reduce.group.rank)) and FakeNorm()

    monkeypatch.setattr(group_all_reduce, "make_norm", make_norm)
    return made_on(size, wish(choice, norm=True))


def normalized(group, rows):
    x, weight = torch.ones(rows, HIDDEN).bfloat16(), torch.ones(HIDDEN).bfloat16()
    return group.normalized(x, residual=x, weight=weight, eps=1e-5)


def test_a_group_normalizes_what_its_launch_takes(fakes, monkeypatch):
    group = with_norm(fakes, monkeypatch, lambda rank: None)[0]
    assert group.why.endswith("; in one launch with residual and norm for 1 to 4 tokens")
    before = call_counts.snapshot().get("all_reduce_norm", {}).get("rose_p2p", 0)
    rows, new = normalized(group, 4)
    assert (rows == 2).all() and (new == 3).all() and normalized(group, 5) is None
    assert call_counts.snapshot()["all_reduce_norm"]["rose_p2p"] == before + 1
    reduce = next(each for each in fakes.made if each.group.rank == 0)
    assert reduce.timeout == 600.0, "start-up's deadline"
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    normalized(group, 1)
    assert reduce.timeout == 7.0, "a captured launch keeps the deadline of service"
    group.close()
    assert normalized(group, 4) is None


def test_without_the_setting_nothing_is_normalized(group):
    assert normalized(group, 1) is None and "norm" not in group.why


@pytest.mark.parametrize("choice", [AUTO, P2P])
def test_a_rank_that_cannot_normalize_leaves_the_sums_to_ours(fakes, monkeypatch, caplog, choice):
    def fail_on_one(rank):
        if rank == 1:
            raise RuntimeError("no compiler")

    groups = with_norm(fakes, monkeypatch, fail_on_one, choice=choice)
    assert [normalized(group, 1) for group in groups] == [None, None]
    assert torch.equal(groups[0](torch.ones(1, HIDDEN).bfloat16()), torch.full((1, HIDDEN), 2.0).bfloat16())
    lines = {record.getMessage() for record in caplog.records if record.levelno == logging.WARNING}
    assert len(lines) == 1 and "residual and norm stay launches of their own" in (line := lines.pop())
    assert "rank 1 of 2: no compiler" in line


def test_a_rank_lost_while_norms_are_timed_frees_the_buffers(fakes, monkeypatch):
    def lost(reduce, **shape):
        raise MissingRankError(name="g", size=2, phase="time", reasons={1: "it didn't arrive"})

    monkeypatch.setattr(group_all_reduce, "make_norm", lost)
    assert all(isinstance(error, MissingRankError) for error in made_on(2, wish(norm=True)))
    assert [each.log for each in fakes.made] == [["made", "close"]] * 2


def test_ranks_of_which_one_was_not_asked_for_norms_hear_of_it(fakes):
    errors = made_on(2, lambda rank: wish(P2P, norm=bool(rank)))
    assert len({str(error) for error in errors}) == 1 and ", with norms: set the same on all ranks" in str(errors[0])


TENSORS = {
    "a token": (lambda: torch.ones(1, HIDDEN).bfloat16(), True),
    "all tokens": (lambda: torch.ones(TOKENS, HIDDEN).bfloat16(), True),
    "more tokens": (lambda: torch.ones(TOKENS + 1, HIDDEN).bfloat16(), False),
    "another shape of rows": (lambda: torch.ones(4, 3, HIDDEN).bfloat16(), True),
    "part of a row": (lambda: torch.ones(HIDDEN - 2).bfloat16(), False),
    "nothing": (lambda: torch.ones(0, HIDDEN).bfloat16(), False),
    "float32": (lambda: torch.ones(1, HIDDEN), False),
    "codes of fp8": (lambda: torch.ones(2, HIDDEN, dtype=torch.int8), False),
    "columns": (lambda: torch.ones(HIDDEN, TOKENS).bfloat16().t(), True),
    "not aligned": (lambda: torch.ones(5 * HIDDEN + 1).bfloat16()[1:].view(5, HIDDEN), True),
    "every other row": (lambda: torch.ones(8, HIDDEN).bfloat16()[::2], True),
}


@pytest.mark.parametrize("case", TENSORS)
def test_which_tensors_are_taken(group, case):
    build, taken = TENSORS[case]
    x = build()
    assert group.takes(x) is taken
    if taken:
        before = call_counts.snapshot().get("all_reduce", {})
        y = group(x)
        assert torch.equal(y, 2 * x) and y.data_ptr() != x.data_ptr() and y.stride() == torch.empty_like(x).stride()
        assert torch.equal(x, torch.ones_like(x)), "the input was written"
        after = call_counts.snapshot()["all_reduce"]
        assert {key: after[key] - before.get(key, 0) for key in after if after[key] != before.get(key)} == {
            "rose_p2p": 1
        }


def test_the_decision_is_the_same_wherever_a_rank_has_the_tensor(group):
    """Place, strides and device of a tensor may differ between ranks; its dtype and size do not."""
    whole = torch.ones(TOKENS * HIDDEN + 64).bfloat16()
    places = [whole[i : i + 3 * HIDDEN].view(3, HIDDEN) for i in range(17)]
    places += [whole[: 3 * HIDDEN].view(HIDDEN, 3).t(), torch.ones(3, HIDDEN, dtype=torch.bfloat16, device="meta")]
    assert {group.takes(x) for x in places} == {True}
    assert {group.takes(x.view(torch.int16)) for x in places[:17]} == {False}


def test_deadlines_of_start_up_capture_and_service(group, fakes, monkeypatch):
    x, reduce = torch.ones(1, HIDDEN).bfloat16(), fakes.made[0] if fakes.made[0].group.rank == 0 else fakes.made[1]
    group(x)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    group(x)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    group(x)
    looked = []
    monkeypatch.setattr(reduce, "check", lambda: looked.append(reduce.timeout))
    group.begin_step()
    group(x)
    assert looked[0] == 600.0, "the message would name a deadline that no launch had"
    assert [entry[1] for entry in reduce.log if isinstance(entry, tuple)] == [600.0, 7.0, 600.0, 7.0]


def test_a_longer_deadline_holds_from_the_start(fakes):
    group = made_on(2, wish(timeout=1000.0))[0]
    group(torch.ones(1, HIDDEN).bfloat16())
    assert {each.timeout for each in fakes.made} == {1000.0}


def test_sleep_and_end(group, fakes):
    reduce = next(each for each in fakes.made if each.group.rank == 0)
    group.suspend()
    group.resume()
    group.close()
    group.close()
    group.suspend(for_checkpoint=True)
    group.resume()
    group.check()
    group.begin_step()
    assert reduce.log == ["made", "suspend", "resume", "close"]


def test_nvls_keeps_its_buffer_while_asleep(fakes, caplog):
    group = made_on(4)[0]
    with caplog.at_level(logging.INFO, logger="vllm.vllm_rose_plugin"):
        group.suspend()
        group.resume()
    assert all(each.log == ["made"] for each in fakes.made)
    assert "All-reduce over NVLS keeps its buffer while asleep." in caplog.text
    with pytest.raises(ValueError, match=r'over NVLS: start with --additional-config .*"all_reduce": "p2p"'):
        group.suspend(for_checkpoint=True)


def timeout_error():
    return PeerTimeoutError(name="g", rank=0, peer=1, phase="input", epoch=3, seconds=7.0, setting="all_reduce_timeout")


def test_two_groups_are_asked_and_forgotten(fakes):
    assert not live_groups.any_alive()
    one, other = made_on(2)[0], made_on(2)[0]
    live_groups.add("tp:0", one)
    live_groups.add("tp:1", other)
    assert live_groups.snapshot() == {"tp:0": one.why, "tp:1": other.why}
    live_groups.begin_step()
    live_groups.check()
    other._reduce.fault = timeout_error()
    for ask in (live_groups.check, live_groups.begin_step):
        with pytest.raises(PeerTimeoutError, match=r"waited 7 s for rank 1 .* all_reduce_timeout sets the time"):
            ask()
    live_groups.discard("tp:1")
    live_groups.check()
    del one
    assert not live_groups.any_alive(), "a group that is gone"


def test_managers_of_the_all_to_all_are_asked_too(fakes):
    from vllm_rose_plugin.seams.communicator import _wrap_dummy, _wrap_step

    class Manager:
        fault = None

        def check(self):
            if self.fault:
                raise self.fault

    manager, ran = Manager(), []
    live_groups.watch(manager)
    assert live_groups.any_alive() and live_groups.snapshot() == {}
    step, idle = _wrap_step(lambda self, batch: ran.append(batch)), _wrap_dummy(lambda self: ran.append("idle"))
    step(None, "batch")
    idle(None)
    manager.fault = timeout_error()
    for ask in (lambda: step(None, "another"), lambda: idle(None), live_groups.check):
        with pytest.raises(PeerTimeoutError):
            ask()
    assert ran == ["batch", "idle"], "nothing runs once a rank is missing"
    manager.fault = None

    def late(self, batch):
        self.fault = timeout_error()
        return "undefined tokens"

    with pytest.raises(PeerTimeoutError):
        _wrap_step(late)(manager, "batch")
    manager.fault = None  # whose traceback holds the manager
    del manager
    assert not live_groups.any_alive(), "a manager that is gone"


def test_results_are_looked_at_once_they_are_there(fakes, monkeypatch):
    from vllm_rose_plugin.seams.communicator import _wrap_step

    class Later:
        def get_output(self):
            log.append("waited")
            return "tokens"

    log, answers = [], [None, "tokens", Later()]
    step = _wrap_step(lambda self, scheduled: answers.pop(0))
    answers.insert(0, stock := Later())
    assert step(None, "batch") is stock and type(stock) is Later, "no group is alive"
    group = made_on(2)[0]
    live_groups.add("tp:0", group)
    assert step(None, "batch") is None and step(None, "batch") == "tokens"
    later = step(None, "batch")
    assert isinstance(later, Later) and later.get_output() == "tokens"
    group._reduce.fault = timeout_error()
    with pytest.raises(PeerTimeoutError):
        later.get_output()
    assert log == ["waited", "waited"], "results are waited for before they are judged"
    with pytest.raises(PeerTimeoutError):
        step(None, "batch")
    group._reduce.fault = None

    def late(self, scheduled):
        group._reduce.fault = timeout_error()
        return "undefined tokens"

    with pytest.raises(PeerTimeoutError):
        _wrap_step(late)(None, "batch")
    live_groups.discard("tp:0")
