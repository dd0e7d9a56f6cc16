"""Slices of a project's budget: what is given out, less what comes back, never exceeds it."""

from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from elastic.core.ledger import NANO_USD_PER_USD
from elastic.server.quotas import budgets
from elastic.server.quotas.budgets import ProjectAccount, RunAccount, SpendingLimits, returned, slices, taken_back
from tests.seeds import examples

USD = NANO_USD_PER_USD


class Project(RuleBasedStateMachine):
    """Runs begin, spend what they were allotted, end, are deleted; days pass. The truth is what they have spent."""

    def __init__(self) -> None:
        super().__init__()
        self.total_usd, self.day_usd = 100 * USD, 30 * USD
        self.runs: dict[str, RunAccount] = {}
        self.spent: dict[str, int] = {}
        self.base: dict[str, int] = {}
        self.gone = self.gone_today = 0
        self.number = 0

    @property
    def limits(self) -> SpendingLimits:
        return SpendingLimits(budget_nano_usd=self.total_usd, day_nano_usd=self.day_usd)

    def account(self) -> ProjectAccount:
        runs = list(self.runs.values())
        return ProjectAccount(runs=runs, gone_nano_usd=self.gone, gone_today_nano_usd=self.gone_today)

    @rule(slice_usd=st.integers(0, 9), own=st.none() | st.integers(1, 20))
    def comes(self, slice_usd: int, own: int | None) -> None:
        self.number += 1
        name = f"r{self.number}"
        self.runs[name] = RunAccount(
            run=name,
            allotted_nano_usd=0,
            own_nano_usd=None if own is None else own * USD,
            slice_nano_usd=slice_usd * USD,
            begins=True,
        )
        self.spent[name] = self.base[name] = 0

    @rule()
    def given(self) -> None:
        account = self.account()
        for name, usd in taken_back(account, self.limits).items():
            run = self.runs[name]
            assert usd > 0
            self.runs[name] = replace(run, allotted_nano_usd=run.allotted_nano_usd - usd)
        for name, usd in slices(account, self.limits).items():
            run = self.runs[name]
            assert usd > 0
            self.runs[name] = replace(run, allotted_nano_usd=run.allotted_nano_usd + usd, alive=True, begins=False)
            self.hears(name)

    @rule(total=st.floats(0.1, 1), day=st.floats(0.1, 1))
    def lowered(self, total: float, day: float) -> None:
        self.total_usd, self.day_usd = int(total * self.total_usd), int(day * self.day_usd)

    @precondition(lambda self: self.runs)
    @rule(data=st.data())
    def is_told(self, data: st.DataObject) -> None:
        self.hears(data.draw(st.sampled_from(sorted(self.runs))))

    def hears(self, name: str) -> None:
        """A run stops at what it has committed where that is more than it may have by now."""
        run = self.runs[name]
        self.runs[name] = replace(run, known_nano_usd=max(run.allotted_nano_usd, run.committed_nano_usd))

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), share=st.floats(0, 1))
    def spends(self, data: st.DataObject, share: float) -> None:
        name = data.draw(st.sampled_from(sorted(self.runs)))
        run = self.runs[name]
        self.spent[name] += int(share * max(0, run.known_nano_usd - self.spent[name]))
        self.runs[name] = replace(run, committed_nano_usd=self.spent[name])

    @precondition(lambda self: self.runs)
    @rule(data=st.data(), again=st.booleans(), deleted=st.booleans())
    def ends(self, data: st.DataObject, again: bool, deleted: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.runs)))
        run = returned(self.runs[name], self.spent[name])
        self.runs[name] = replace(run, begins=again, committed_nano_usd=self.spent[name], slice_nano_usd=USD)
        if deleted:
            del self.runs[name]
            self.gone += self.spent[name]
            self.gone_today += self.spent[name] - self.base[name]

    @rule()
    def midnight(self) -> None:
        self.base |= self.spent
        self.gone_today = 0
        for name, run in self.runs.items():
            self.runs[name] = replace(run, day_base_nano_usd=self.spent[name])

    @invariant()
    def within(self) -> None:
        account = self.account()
        assert account.total_nano_usd <= 100 * USD
        assert account.today_nano_usd <= max(30 * USD, self.gone_today)
        today = self.gone_today + sum(self.spent[name] - self.base[name] for name in self.runs)
        assert today <= 30 * USD
        assert self.gone + sum(self.spent[name] for name in self.runs) <= 100 * USD
        for run in self.runs.values():
            assert run.own_nano_usd is None or run.allotted_nano_usd <= run.own_nano_usd

    def teardown(self) -> None:
        """Once all have heard what they may have, nothing is left beyond the limits that was not spent before."""
        for _ in range(3):
            self.given()
            for name in self.runs:
                self.hears(name)
        account = self.account()
        free = sum(run.may_nano_usd - self.spent[run.run] for run in account.runs)
        over = account.total_nano_usd > self.total_usd or account.today_nano_usd > self.day_usd
        assert not over or free == 0


Project.TestCase.settings = settings(max_examples=examples(16, 40), stateful_step_count=30)
TestProject = Project.TestCase


def test_who_would_stop_first_comes_first_and_gets_what_is_left() -> None:
    limits = SpendingLimits(budget_nano_usd=25 * USD)
    alive = [
        RunAccount(run="a", allotted_nano_usd=10 * USD, committed_nano_usd=8 * USD, slice_nano_usd=6 * USD, alive=True),
        RunAccount(run="b", allotted_nano_usd=10 * USD, committed_nano_usd=9 * USD, slice_nano_usd=6 * USD, alive=True),
        RunAccount(run="c", allotted_nano_usd=0, slice_nano_usd=6 * USD, begins=True),
    ]
    assert slices(ProjectAccount(runs=alive), limits) == {"b": 5 * USD}
    assert slices(ProjectAccount(runs=alive[2:]), limits) == {"c": 6 * USD}
    assert slices(ProjectAccount(runs=alive), SpendingLimits(budget_nano_usd=10 * USD)) == {}


def test_what_a_run_spent_before_it_heard_is_taken_back_from_others() -> None:
    limits = SpendingLimits(day_nano_usd=75 * USD)
    late = RunAccount(run="late", allotted_nano_usd=0, known_nano_usd=USD, committed_nano_usd=USD, alive=True)
    other = RunAccount(run="other", allotted_nano_usd=75 * USD, known_nano_usd=75 * USD, alive=True)
    assert taken_back(ProjectAccount(runs=[other, late]), limits) == {"other": USD}
    assert taken_back(ProjectAccount(runs=[other, replace(late, committed_nano_usd=0)]), limits) == {}


@given(rate=st.floats(0.5, 50), minutes=st.integers(1, 200))
def test_the_forecast_is_of_the_last_hour(rate: float, minutes: int) -> None:
    marks: list[list[int]] = []
    for minute in range(minutes):
        spent = round(rate * minute / 60 * USD)
        marks = budgets.marked(marks, minute * 60_000_000, spent) or marks
    assert len(marks) <= budgets.MARKS
    assert budgets.marked(marks, marks[-1][0] + 1, 0) is None
    now_us, now_usd = minutes * 60_000_000, rate * minutes / 60
    found = budgets.usd_per_hour(marks, now_us, round(now_usd * USD))
    assert abs(found - rate) < 1e-3 * rate + 1e-6
    ends_in_s = budgets.ends_in_s(now_usd + rate, now_usd, found)
    assert ends_in_s is not None
    assert abs(ends_in_s - 3600) < 10
