"""SM partitions under a fake driver: which SMs they get in each mode, what refuses, and that nothing is half-made."""

import pytest
from locality_driver import LocalityDriver, Result, one_domain
from memfd_driver import CUresult

from vllm_rose_plugin.memory.driver import Driver, DriverError
from vllm_rose_plugin.memory.locality import LocalityUnavailableError
from vllm_rose_plugin.memory.sm_partitions import Mode, partition_domains, partition_equally, shares

RUBIN = {"domains": (100, 100), "spare": 12}


def on(fake):
    return Driver(device=0, bindings=fake)


def nothing(fake):
    return set(fake.ledger().values()) == {0}


def owners(fake, made):
    """For each partition, how many SMs it has of each owner."""
    found = []
    for partition in made.partitions:
        sms = fake.sms_of(partition.stream)
        assert len(sms) == partition.sm_count
        of = [fake.owner[sm] for sm in sms]
        found.append({owner: of.count(owner) for owner in set(of)})
    return found


def disjoint(fake, made):
    sms = [fake.sms_of(partition.stream) for partition in made.partitions]
    return len(frozenset().union(*sms)) == sum(map(len, sms))


@pytest.mark.parametrize(
    ("layout", "mode", "expected"),
    [
        (RUBIN, Mode.DEFAULT, [{0: 100}, {1: 100}]),
        (RUBIN, Mode.BACKFILL, [{0: 100, None: 6}, {1: 100, None: 6}]),
        ({"domains": (50,) * 4, "spare": 12}, Mode.DEFAULT, [{d: 50} for d in range(4)]),
        # 54 + 54 + 52 + 52
        (
            {"domains": (50,) * 4, "spare": 12},
            Mode.BACKFILL,
            [{0: 50, None: 4}, {1: 50, None: 4}, {2: 50, None: 2}, {3: 50, None: 2}],
        ),
        ({"domains": (104, 96), "spare": 0}, Mode.DEFAULT, [{0: 96}, {1: 96}]),
        ({"domains": (104, 96), "spare": 0}, Mode.BACKFILL, [{0: 100}, {1: 96, 0: 4}]),
        ({"domains": (106, 106), "spare": 0, "nominal": 100}, Mode.DEFAULT, [{0: 100}, {1: 100}]),
        ({"domains": (106, 106), "spare": 0, "nominal": 100}, Mode.BACKFILL, [{0: 106}, {1: 106}]),
        ({"domains": (9, 9), "spare": 1}, Mode.DEFAULT, [{0: 8}, {1: 8}]),
        ({"domains": (9, 9), "spare": 1}, Mode.BACKFILL, [{0: 9, None: 1}, {1: 8}]),
    ],
)
def test_partitions_and_where_their_sms_lie(layout, mode, expected):
    fake = LocalityDriver(**layout)
    with partition_domains(driver=on(fake), mode=mode) as made:
        assert owners(fake, made) == expected and disjoint(fake, made)
        assert [partition.domain for partition in made.partitions] == list(range(len(expected)))
        assert made.clusters == (2 if mode is Mode.DEFAULT else 1)
        assert fake.ledger()["streams"] == fake.ledger()["contexts"] == len(expected)
    assert made.partitions == () and nothing(fake)
    made.close()


@pytest.mark.parametrize(("clusters", "expected"), [(2, 100), (4, 100), (8, 96)])
def test_larger_clusters_cost_sms(clusters, expected):
    fake = LocalityDriver(**RUBIN)
    with partition_domains(driver=on(fake), mode=Mode.DEFAULT, clusters=clusters) as made:
        assert [partition.sm_count for partition in made.partitions] == [expected] * 2 and made.clusters == clusters


@pytest.mark.parametrize(
    ("parts", "expected"), [(1, [132]), (2, [64, 64]), (3, [40] * 3), (4, [32] * 4), (16, [8] * 16)]
)
def test_equal_partitions_of_a_gpu_of_one_domain(parts, expected):
    fake = one_domain()
    with partition_equally(driver=on(fake), parts=parts) as made:
        assert [partition.sm_count for partition in made.partitions] == expected and disjoint(fake, made)
        assert {partition.domain for partition in made.partitions} == {None} and made.clusters == 8
    assert nothing(fake) and "cuDevSmResourceSplit" not in fake.calls


@pytest.mark.parametrize("parts", [-1, 0, 17, 200])
def test_more_equal_parts_than_there_can_be(parts):
    fake = one_domain()
    with pytest.raises(ValueError, match=f"parts={parts} of 132 SMs must be 1 to 16"):
        partition_equally(driver=on(fake), parts=parts)
    assert nothing(fake)


def test_a_driver_that_cuts_into_fewer_parts_is_refused():
    fake = one_domain()
    real = fake.cuDevSmResourceSplitByCount
    fake.cuDevSmResourceSplitByCount = lambda count, *others: real(count, *others[:-1], 2 * others[-1])
    with pytest.raises(LocalityUnavailableError, match="132 SMs can be cut into 2 partitions of 32, not 4"):
        partition_equally(driver=on(fake), parts=4)
    assert nothing(fake)


@pytest.mark.parametrize("mode", [Mode.DEFAULT, Mode.BACKFILL])
def test_a_gpu_of_one_domain_has_no_partitions_of_domains(mode):
    for fake in (one_domain(), one_domain(version=13040)):
        with pytest.raises(LocalityUnavailableError, match="no locality domains on GPU 0"):
            partition_domains(driver=on(fake), mode=mode)
        assert nothing(fake) and "cuGreenCtxCreate" not in fake.calls


@pytest.mark.parametrize("mode", [Mode.DEFAULT, Mode.BACKFILL])
@pytest.mark.parametrize(
    ("domains", "which"), [((100, 0), "domain 1 has"), ((0, 100), "domain 0 has"), ((0, 50, 50, 0), "domain 0, 3 has")]
)
def test_a_domain_without_sms_is_named(domains, which, mode):
    fake = LocalityDriver(domains=domains, spare=0, nominal=50)
    with pytest.raises(LocalityUnavailableError, match=f"GPU 0: {which} not enough SMs left.*MIG.*MPS"):
        partition_domains(driver=on(fake), mode=mode)
    assert nothing(fake) and "cuGreenCtxCreate" not in fake.calls


def test_another_refusal_while_looking_for_the_domain_stays_what_it_is():
    fail = {("cuDevSmResourceSplit", 2): CUresult.CUDA_ERROR_NOT_PERMITTED}
    fake = LocalityDriver(domains=(100, 0), spare=0, nominal=50, fail=fail)
    with pytest.raises(DriverError, match="NOT_PERMITTED"):
        partition_domains(driver=on(fake), mode=Mode.DEFAULT)
    assert nothing(fake)


def test_domains_that_hinder_each_other():
    fake = LocalityDriver(**RUBIN)
    real = fake.cuDevSmResourceSplit
    refusal = (Result.CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION, None, None)
    fake.cuDevSmResourceSplit = lambda count, *others: real(count, *others) if count == 1 else refusal
    with pytest.raises(LocalityUnavailableError, match="the domains together have not enough"):
        partition_domains(driver=on(fake), mode=Mode.DEFAULT)
    assert nothing(fake)


ONCE = ["cuDeviceGetDevResource", "SPLIT"]
EACH = ["cuDevResourceGenerateDesc", "cuGreenCtxCreate", "cuGreenCtxStreamCreate"]


def named(call, mode):
    """The call that a mode splits with."""
    return call.replace("SPLIT", "cuDevSmResourceSplitByCount" if mode is Mode.EQUAL else "cuDevSmResourceSplit")


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize(("call", "time"), [(call, 1) for call in ONCE + EACH] + [(call, 2) for call in EACH])
def test_a_refusal_at_each_call_frees_what_was_made(call, time, mode):
    call = named(call, mode)
    fake = LocalityDriver(**RUBIN, fail={(call, time): CUresult.CUDA_ERROR_NOT_PERMITTED})

    def make():
        if mode is Mode.EQUAL:
            return partition_equally(driver=on(fake), parts=2)
        return partition_domains(driver=on(fake), mode=mode)

    with pytest.raises(DriverError, match=call):
        make()
    assert nothing(fake)
    with make() as made:
        assert len(made.partitions) == 2
    assert nothing(fake)


@pytest.mark.parametrize("mode", Mode)
@pytest.mark.parametrize("call", ONCE + EACH)
@pytest.mark.parametrize("where", ["bindings", "library"])
def test_a_missing_symbol_is_named_and_nothing_stays(call, where, mode):
    call = named(call, mode)

    class Old(LocalityDriver):
        def __getattribute__(self, name):
            if where == "bindings" and name == call:
                raise AttributeError(name)
            return super().__getattribute__(name)

    fake = Old(**RUBIN, absent=(call,) if where == "library" else ())
    cure = "pip install" if where == "bindings" else "update the NVIDIA driver"
    with pytest.raises(LocalityUnavailableError, match=f"{call}.*{cure}"):
        if mode is Mode.EQUAL:
            partition_equally(driver=on(fake), parts=2)
        else:
            partition_domains(driver=on(fake), mode=mode)
    assert nothing(fake)


def test_what_fails_while_closing_is_raised_and_the_rest_is_closed():
    fake = LocalityDriver(**RUBIN)
    made = partition_domains(driver=on(fake), mode=Mode.DEFAULT)
    fake.fail = {"cuStreamDestroy": CUresult.CUDA_ERROR_UNKNOWN}
    with pytest.raises(DriverError, match="cuStreamDestroy"):
        made.close()
    assert nothing(fake)
    made.close()


def test_two_engines_in_one_process_cover_the_same_sms():
    fake = LocalityDriver(**RUBIN)
    first = partition_domains(driver=on(fake), mode=Mode.DEFAULT)
    second = partition_domains(driver=on(fake), mode=Mode.BACKFILL)
    assert fake.sms_of(first.partitions[0].stream) < fake.sms_of(second.partitions[0].stream)
    first.close()
    assert owners(fake, second) == [{0: 100, None: 6}, {1: 100, None: 6}]
    second.close()
    assert nothing(fake)


def test_values_that_are_refused():
    fake = LocalityDriver(**RUBIN)
    with pytest.raises(ValueError, match="mode=equal must be default or backfill"):
        partition_domains(driver=on(fake), mode=Mode.EQUAL)
    for clusters in (0, 1, 3):
        with pytest.raises(ValueError, match=f"clusters={clusters} must be a multiple of 2"):
            partition_domains(driver=on(fake), mode=Mode.DEFAULT, clusters=clusters)
    with pytest.raises(LocalityUnavailableError, match="2 SMs of GPU 0 for 2 domains"):
        partition_domains(driver=on(LocalityDriver(domains=(1, 1), spare=0)), mode=Mode.BACKFILL)
    assert nothing(fake)


@pytest.mark.parametrize("domains", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("sm_count", [14, 132, 148, 211, 212])
def test_shares_are_pairs_and_even(sm_count, domains):
    found = shares(sm_count, domains)
    assert sum(found) == sm_count // 2 * 2 and max(found) - min(found) <= 2 and not any(n % 2 for n in found)
