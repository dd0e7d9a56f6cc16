"""What is scarce is shared by weight, whole, in turns, and without a change that has no cause."""

from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from elastic.server.quotas.sharing import LeaseClaim, SharedProvider, caps, shares
from tests.seeds import examples

PERIOD_US = 600_000_000
TICK_US = PERIOD_US // 60


def claim(key: str, gpus: int, **fields: object) -> LeaseClaim:
    given = {"project": "p", "unit": 1, "share": 0, "since_us": 0, **fields}
    return LeaseClaim(key=key, gpus=gpus, **given)  # type: ignore[arg-type]


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[LeaseClaim], SharedProvider, int]:
    projects = ["a", "b", "c"]
    claims = [
        claim(
            f"r{number}",
            draw(st.integers(0, 12)),
            project=draw(st.sampled_from(projects)),
            unit=draw(st.sampled_from([1, 1, 2, 4])),
            share=draw(st.sampled_from([0, 0, 1, 4])),
            since_us=draw(st.integers(0, 2 * PERIOD_US)),
            told=draw(st.integers(0, 6)),
            held=draw(st.integers(0, 6)),
        )
        for number in range(draw(st.integers(0, 8)))
    ]
    provider = SharedProvider(
        gpus=draw(st.none() | st.integers(0, 20)),
        quotas=draw(st.dictionaries(st.sampled_from(projects), st.integers(0, 10))),
        weights=draw(st.dictionaries(st.sampled_from(projects), st.floats(0.1, 10))),
    )
    return claims, provider, 2 * PERIOD_US


@given(situation=situations())
def test_nothing_is_given_twice_or_kept_back(situation: tuple[list[LeaseClaim], SharedProvider, int]) -> None:
    claims, provider, now_us = situation
    found = shares(claims, provider, now_us, PERIOD_US)
    by_project = {p: sum(found[c.key] for c in claims if c.project == p) for p in ("a", "b", "c")}
    left = None if provider.gpus is None else provider.gpus - sum(found.values())
    assert left is None or left >= 0
    for project, gpus in provider.quotas.items():
        assert by_project[project] <= gpus
    for one in claims:
        assert 0 <= found[one.key] <= one.gpus
        assert found[one.key] % one.unit == 0
        quota = provider.quotas.get(one.project)
        more_fits = (left is None or left >= one.unit) and (
            quota is None or quota - by_project[one.project] >= one.unit
        )
        assert not more_fits or found[one.key] + one.unit > one.gpus


@given(situation=situations())
def test_nobody_is_told_what_another_still_holds(
    situation: tuple[list[LeaseClaim], SharedProvider, int],
) -> None:
    claims, provider, now_us = situation
    found = shares(claims, provider, now_us, PERIOD_US)
    told = caps(claims, provider, found)
    reserved = sum(one.reserved for one in claims)
    after = sum(max(one.held, one.told, told[one.key]) for one in claims)
    for one in claims:
        assert told[one.key] <= found[one.key]
        assert told[one.key] >= min(found[one.key], one.reserved)
    assert provider.gpus is None or after <= max(provider.gpus, reserved)


@given(demands=st.lists(st.integers(1, 30), min_size=1, max_size=6), gpus=st.integers(1, 40), data=st.data())
def test_max_min_by_weight(demands: list[int], gpus: int, data: st.DataObject) -> None:
    """Nobody has so much more per weight than somebody who wants more, that a lease would have been better there."""
    gpus = max(gpus, len(demands))
    weights = {f"p{n}": data.draw(st.sampled_from([1.0, 2.0, 3.0])) for n in range(len(demands))}
    claims = [claim(f"r{n}", demand, project=f"p{n}") for n, demand in enumerate(demands)]
    found = shares(claims, SharedProvider(gpus=gpus, quotas={}, weights=weights), 0, PERIOD_US)
    for poor in claims:
        if found[poor.key] < poor.gpus:
            for rich in claims:
                # Its last lease was given while it had no more per weight, but for everybody's first.
                had = (found[rich.key] - 1) / weights[rich.project]
                assert found[rich.key] == 1 or had <= found[poor.key] / weights[poor.project]


class Market:
    """Runs that follow their caps, and drain for a while."""

    def __init__(self, gpus: int, claims: list[LeaseClaim], weights: dict[str, float], drain_ticks: int) -> None:
        self.provider = SharedProvider(gpus=gpus, quotas={}, weights=weights)
        self.claims = {one.key: one for one in claims}
        self.drain_ticks = drain_ticks
        self.draining: list[tuple[int, str, int]] = []
        self.now_us, self.tick = 0, 0
        self.changes: list[tuple[int, str, int]] = []

    def step(self) -> None:
        now = list(self.claims.values())
        found = shares(now, self.provider, self.now_us, PERIOD_US)
        told = caps(now, self.provider, found)
        for one in now:
            share, cap = found[one.key], told[one.key]
            serves = one.held - sum(gpus for _, key, gpus in self.draining if key == one.key)
            if cap < serves:
                self.draining.append((self.tick + self.drain_ticks, one.key, serves - cap))
            held = max(one.held, cap)
            since_us = one.since_us_after(share, cap, self.now_us)
            if share != one.share:
                self.changes.append((self.tick, one.key, share))
            self.claims[one.key] = replace(one, share=share, since_us=since_us, told=cap, held=held)
        for due in [due for due in self.draining if due[0] <= self.tick]:
            self.draining.remove(due)
            one = self.claims[due[1]]
            self.claims[due[1]] = replace(one, held=one.held - due[2])
        assert sum(max(one.told, one.held) for one in self.claims.values()) <= (self.provider.gpus or 0)
        self.tick, self.now_us = self.tick + 1, self.now_us + TICK_US


@settings(max_examples=examples(6, 15))
@given(gpus=st.integers(1, 5), runs=st.integers(1, 12), wants=st.integers(1, 6), data=st.data())
def test_nobody_waits_longer_than_a_period(gpus: int, runs: int, wants: int, data: st.DataObject) -> None:
    weights = {f"p{n}": data.draw(st.sampled_from([1.0, 1.0, 4.0])) for n in range(3)}
    claims = [claim(f"r{n:02}", wants, project=f"p{n % 3}") for n in range(runs)]
    market = Market(gpus, claims, weights, drain_ticks=2)
    rounds = -(-max(0, runs - gpus) // gpus)
    waited = dict.fromkeys(market.claims, 0)
    for _ in range(240):
        market.step()
        for key, one in market.claims.items():
            waited[key] = 0 if one.told else waited[key] + 1
            # A period, and for each hand-over before it what drains, and a look at it.
            assert waited[key] * TICK_US <= PERIOD_US + max(1, rounds) * 4 * TICK_US, (key, market.changes[-10:])
    if runs <= gpus:
        assert {tick for tick, _, _ in market.changes} <= {0}


def test_who_comes_gets_a_lease_at_once_of_who_has_had_its_turn() -> None:
    held = claim("old", 4, share=4, told=4, held=4)
    new = claim("new", 4, since_us=PERIOD_US)
    provider = SharedProvider(gpus=4, quotas={}, weights={})
    found = shares([held, new], provider, PERIOD_US, PERIOD_US)
    assert found == {"old": 2, "new": 2}
    assert caps([held, new], provider, found) == {"old": 2, "new": 0}
    drained = replace(held, share=2, told=2, held=3)
    assert caps([drained, new], provider, found) == {"old": 2, "new": 1}


def test_a_cap_does_not_change_without_a_cause() -> None:
    """Two that rotate change each period twice, once away and once back; who rests on what it has does not change."""
    market = Market(1, [claim("a", 1), claim("b", 1)], {}, drain_ticks=1)
    for _ in range(600):
        market.step()
    changes = [tick for tick, key, _ in market.changes if key == "a"]
    assert all(later - sooner >= 48 for sooner, later in pairwise(changes))
    assert len(changes) >= 10
