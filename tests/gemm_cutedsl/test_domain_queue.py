"""Queues of tiles as a model in plain Python: blocks that draw tickets, in every order and in many drawn at random.

A block is a generator that stops before everything that others can see. That the kernel does the same is what
``test_domains_run.py`` shows.
"""

import itertools
import random
from collections.abc import Callable, Iterator

import pytest

from vllm_rose_plugin.kernels.gemm.domain_queue import LINE, counter_of, counter_words, domain_of, next_of


def select(condition, yes, no):
    return yes if condition else no


class Launch:
    """The blocks of one launch."""

    def __init__(self, counters: list[int], *, domains: int, length: int, sms: list[int], table: list[int]):
        self.counters, self.domains, self.length, self.table = counters, domains, length, table
        self.done: list[tuple[int, int]] = []
        self.grid, self.waits, self.ended = len(sms), 0, 0
        self.blocks = [self.block(sm) for sm in sms]
        self.may_wait: Callable[[], bool] = lambda: True

    def add(self, place: int) -> int:
        self.counters[place] += 1
        return self.counters[place] - 1

    def block(self, sm: int) -> Iterator[None]:
        known = self.table[sm] if sm < len(self.table) else -1
        domain, left = domain_of(known=known, sm=sm, domains=self.domains, select=select), self.domains - 1
        yield
        ticket = self.add(counter_of(domain))
        while not self.may_wait():
            yield
        self.waits += 1  # and with it the next launch may start
        while True:
            while ticket >= self.length and left:
                domain, left = next_of(domain, domains=self.domains, select=select), left - 1
                yield
                ticket = self.add(counter_of(domain))
            if ticket >= self.length:
                break
            self.done.append((domain, ticket))
            yield
            ticket = self.add(counter_of(domain))
        yield
        if self.add(counter_of(self.domains)) == self.grid - 1:
            for i in range(self.domains + 1):
                yield
                self.counters[counter_of(i)] = 0
        self.ended += 1

    def check(self) -> None:
        assert sorted(self.done) == [(d, t) for d in range(self.domains) for t in range(self.length)]


def go(blocks: list[Iterator[None]], choose: Callable[[int], int]) -> None:
    """Steps of blocks until all have ended; `choose` is given how many can go on."""
    running = list(blocks)
    while running:
        i = choose(len(running))
        if next(running[i], "ended") == "ended":
            running.pop(i)


def every_order(run: Callable[[Callable[[int], int]], None]) -> int:
    """Runs with every sequence of choices; gives how many there were."""
    ahead: list[int] = []
    for count in itertools.count(1):
        taken: list[tuple[int, int]] = []

        def choose(options: int, taken=taken, ahead=tuple(ahead)) -> int:
            choice = ahead[len(taken)] if len(taken) < len(ahead) else 0
            taken.append((choice, options))
            return choice

        run(choose)
        while taken and taken[-1][0] == taken[-1][1] - 1:
            taken.pop()
        if not taken:
            return count
        ahead = [choice for choice, _ in taken[:-1]] + [taken[-1][0] + 1]
    raise AssertionError


@pytest.mark.parametrize(
    ("domains", "length", "sms", "table"),
    [
        (2, 2, [0, 1], [0, 1]),
        (2, 3, [0, 1], [0, 0]),  # nobody is in domain 1
        (2, 1, [0, 1, 2], [0, 1, 0]),
        (2, 0, [0, 1], [0, 1]),  # no tokens
        (3, 1, [0, 1], [2, -1]),
    ],
)
def test_every_order(domains, length, sms, table):
    def run(choose):
        counters = [0] * counter_words(domains)
        launch = Launch(counters, domains=domains, length=length, sms=sms, table=table)
        go(launch.blocks, choose)
        launch.check()
        assert not any(counters)

    assert every_order(run) > 50


@pytest.mark.parametrize("seed", range(200))
def test_orders_at_random(seed):
    """Uneven SMs, odd numbers of tiles, unknown SMs, blocks that are fewer than domains."""
    drawn = random.Random(seed)
    domains = drawn.randint(2, 4)
    sms = [drawn.randrange(12) for _ in range(drawn.randint(1, 9))]
    table = [drawn.randint(-1, domains) for _ in range(10)]
    counters = [0] * counter_words(domains)
    for _ in range(3):
        launch = Launch(counters, domains=domains, length=drawn.randrange(12), sms=sms, table=table)
        go(launch.blocks, drawn.randrange)
        launch.check()
        assert not any(counters)


def test_own_tiles_come_first():
    """While a queue has tiles, nobody of its domain takes another's."""
    drawn, counters = random.Random(1), [0] * counter_words(2)
    launch = Launch(counters, domains=2, length=40, sms=[0, 1, 2, 3], table=[0, 1, 0, 1])
    for _ in range(60):  # every block some
        next(launch.blocks[drawn.randrange(4)])
    assert len(launch.done) > 30
    stepped = {0: 0, 1: 0}
    for domain, ticket in launch.done:
        assert ticket == stepped[domain]
        stepped[domain] += 1
    go(launch.blocks, drawn.randrange)
    launch.check()


class Stranger:
    """A kernel that draws nothing, and lets the next one start before its own wait."""

    def __init__(self, blocks: int):
        self.grid, self.waits, self.ended, self.done, self.length = blocks, 0, 0, [], 0
        self.blocks = [self.block() for _ in range(blocks)]
        self.may_wait: Callable[[], bool] = lambda: True

    def block(self) -> Iterator[None]:
        self.waits += 1
        while not self.may_wait():
            yield
        self.ended += 1


def chain(drawn: random.Random, *, sets: int) -> bool:
    """Launches of a stream with programmatic launch; whether each had every tile once, and all counters are zero.

    Args:
        sets: of counters that launches take by turns.
    """
    counters = [[0] * counter_words(2) for _ in range(sets)]
    kernels: list[Launch | Stranger] = []
    turns = itertools.cycle(range(sets))
    for _ in range(7):
        sms = [drawn.randrange(4) for _ in range(drawn.randint(1, 4))]
        if drawn.random() < 0.25:
            kernels.append(Stranger(len(sms)))
            continue
        length = drawn.randrange(5)
        kernels.append(Launch(counters[next(turns)], domains=2, length=length, sms=sms, table=[0, 1, 0, 1]))
    for before, after in itertools.pairwise(kernels):
        after.may_wait = lambda before=before: before.ended == before.grid
    running = {(n, i): block for n, kernel in enumerate(kernels) for i, block in enumerate(kernel.blocks)}
    while running:
        ready = [key for key in running if key[0] == 0 or kernels[key[0] - 1].waits == kernels[key[0] - 1].grid]
        key = drawn.choice(ready)
        if next(running[key], "ended") == "ended":
            del running[key]
    ours = [kernel for kernel in kernels if isinstance(kernel, Launch)]
    right = all(sorted(each.done) == [(d, t) for d in range(2) for t in range(each.length)] for each in ours)
    return right and not any(map(any, counters))


def test_launches_that_start_early():
    """Two sets by turns are enough, whatever stands between; with a single one it goes wrong, so the model can tell."""
    assert all(chain(random.Random(seed), sets=2) for seed in range(400))
    assert not all(chain(random.Random(seed), sets=1) for seed in range(400))


def test_counters_have_lines_of_their_own():
    places = [counter_of(i) for i in range(5)]
    assert places == [0, LINE, 2 * LINE, 3 * LINE, 4 * LINE] and counter_words(4) == 5 * LINE and LINE * 4 == 128
