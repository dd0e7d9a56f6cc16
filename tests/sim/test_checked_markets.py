"""Markets of other packages' providers, as simulations and live runs drive them."""

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest

from elastic.compose.checked_markets import make_provider
from elastic.core.ids import LeaseId
from elastic.core.types import EndCause, PolicyFault
from elastic.protocol.endpoint import Endpoint
from elastic.simulation.performance.launchers import launcher_of
from providers.base import Provider, ProviderContext, ProviderSettings, ProviderUnavailable
from providers.markets import LeaseEnding, Market, TakenBack

NOW_NS = 7
LEASE = LeaseId("lab-1")


class Answering(Market[ProviderSettings]):
    """Free places, and the time and the leases of its next change, are as `answers` says; by default none change."""

    answers: dict[str, Callable[[], Any]]

    def free(self) -> int:
        return self.answers.get("free", super().free)()

    @property
    def next_ns(self) -> Any:
        return self.answers.get("next_ns", lambda: None)()

    def advance(self, now_ns: int) -> Iterator[TakenBack]:
        return self.answers.get("advance", lambda: iter(()))()


class Looking(Answering):
    def advance(self, now_ns: int) -> Iterator[TakenBack]:
        while self.next_ns <= now_ns:
            pass
        return iter(())


CONTEXT = ProviderContext(
    run="r",
    run_dir=Path(),
    endpoint=Endpoint(""),
    worker_command=(),
    now_ns=lambda: NOW_NS,
    acquire_timeout_s=0.01,
    release_timeout_s=1.0,
)
SETTINGS = ProviderSettings.model_validate({"kind": "lab", "max_workers": 2})


@pytest.fixture
def theirs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The package `theirs` brings a provider, `lab`."""
    about = tmp_path / "theirs-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: theirs\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text("[elastic.providers]\nlab = theirs:Lab\n")
    monkeypatch.syspath_prepend(str(tmp_path))


@pytest.fixture
def market(theirs: None) -> Callable[..., Market[Any]]:
    """Makes the market of that provider."""

    def made(kind: type[Answering] = Answering, **answers: Callable[[], Any]) -> Market[Any]:
        members = {"trainer_of_turns": None, "market_type": type("Theirs", (kind,), {"answers": answers})}
        lab = cast("type[Provider]", type("Lab", (), members))
        return launcher_of("east", lab, SETTINGS, cast("Any", None), cast("Any", None)).market

    return made


def drive(market: Market[Any]) -> None:
    market.restore(LEASE, "")
    market.news()
    list(market.advance(NOW_NS))


def leaving() -> None:
    raise SystemExit(0)


@pytest.mark.parametrize(
    ("name", "answer", "words"),
    [
        ("free", leaving, "free raised SystemExit: 0"),
        ("free", lambda: "a", "free returned 'a' (str); allowed: a whole number from 0"),
        ("free", lambda: float("nan"), "free returned nan (float); allowed: a whole number from 0"),
        ("free", lambda: -3, "free returned -3 (int); allowed: a whole number from 0"),
        ("next_ns", lambda: float("nan"), "next_ns returned nan (float); allowed: None, or a whole number from 0"),
        ("next_ns", lambda: 3, "next_ns returned 3 (int); allowed: None, or later than 7"),
        ("advance", lambda: None, "advance raised TypeError: 'NoneType' object is not iterable"),
        ("advance", lambda: iter([3]), "advance returned 3 (int); allowed: a TakenBack"),
        (
            "advance",
            lambda: iter([TakenBack(LeaseId("nobody"), 9, LeaseEnding(EndCause.PREEMPTED))]),
            "allowed: a lease that is held (lab-1)",
        ),
    ],
)
def test_what_a_market_may_not_do_is_told_with_its_provider_and_package(
    market: Callable[..., Market[Any]], name: str, answer: Callable[[], Any], words: str
) -> None:
    with pytest.raises(PolicyFault) as fault:
        drive(market(**{name: answer}))
    assert str(fault.value).startswith("providers.east: lab of the package theirs 1.0: ")
    assert words in str(fault.value)


def test_a_market_whose_own_loop_never_gets_on_ends(market: Callable[..., Market[Any]]) -> None:
    with pytest.raises(PolicyFault, match=r"next_ns returned 3 .int.; allowed: None, or later than 7"):
        list(market(Looking, next_ns=lambda: 3).advance(NOW_NS))


def test_numbers_of_numpy_are_taken(market: Callable[..., Market[Any]]) -> None:
    theirs = market(free=lambda: np.int64(1), next_ns=lambda: np.int64(9))
    offer = theirs.news()
    assert offer is not None
    assert (type(offer.available), offer.available) == (int, 1)
    assert (type(theirs.next_ns), theirs.next_ns) == (int, 9)
    theirs.take(LEASE)
    assert not list(theirs.advance(NOW_NS))


def test_what_the_market_of_a_live_provider_may_not_do_is_told_to_the_run(theirs: None) -> None:
    told: list[str] = []

    class Lab:
        def __init__(self, name: str, settings: ProviderSettings, _: Any) -> None:
            answers = {"free": lambda: -3}
            self.market = type("Theirs", (Answering,), {"answers": answers})(name, settings)

    def fault(words: str) -> PolicyFault:
        told.append(words)
        return PolicyFault(words)

    provider = make_provider(cast("type[Provider]", Lab), "east", SETTINGS, CONTEXT, fault)
    with pytest.raises(PolicyFault):
        cast("Any", provider).market.news()
    assert told == [
        "providers.east: lab of the package theirs 1.0: free returned -3 (int); allowed: a whole number from 0 to "
        "9007199254740991"
    ]


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("raises", "start raised KeyError: 'gpus'"),
        ("hangs", "start took longer than 0.01 s (scheduler.acquire_timeout_s)"),
        ("lies", "adopt returned 3 (int); allowed: a list of leases' ids"),
        ("babbles", "emit got 'gpus' (str); allowed: OfferChanged, "),
        ("refuses", "no"),
    ],
)
async def test_a_provider_that_cannot_begin_is_told_with_its_package(theirs: None, how: str, words: str) -> None:
    class Lab:
        def __init__(self, *_: Any) -> None: ...

        async def adopt(self, known: Any, emit: Any) -> Any:
            return 3 if how == "lies" else []

        async def start(self, emit: Any) -> None:
            if how == "refuses":
                raise ProviderUnavailable("no")
            if how == "raises":
                raise KeyError("gpus")
            if how == "babbles":
                emit("gpus")
            await asyncio.Event().wait()

        @property
        def waits_for(self) -> str:
            raise ValueError

    provider = make_provider(cast("type[Provider]", Lab), "east", SETTINGS, CONTEXT, PolicyFault)
    with pytest.raises((ProviderUnavailable, PolicyFault)) as told:
        await (provider.adopt([], print) if how == "lies" else provider.start(print))
    whose = "" if how == "refuses" else "providers.east: lab of the package theirs 1.0: "
    assert str(told.value).startswith(whose + words)
    assert provider.waits_for == "what waits_for does not say (ValueError)"


async def test_a_provider_that_cannot_release_is_told_with_its_package(theirs: None) -> None:
    class Lab:
        def __init__(self, *_: Any) -> None: ...

        async def release(self, lease: LeaseId, reason: str) -> None:
            raise KeyError(f"{lease}, {reason}")

    provider = make_provider(cast("type[Provider]", Lab), "east", SETTINGS, CONTEXT, PolicyFault)
    with pytest.raises(ProviderUnavailable) as told:
        await provider.release(LEASE, "over")
    assert str(told.value).startswith(
        "providers.east: lab of the package theirs 1.0: release raised KeyError: 'lab-1, over'"
    )
