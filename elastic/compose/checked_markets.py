"""Providers of other packages: what they raise is told as theirs, and their markets' answers are checked before a run
or a simulation acts on them."""

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, TypeVar, get_args

from elastic.core.types import INTEGER_MAX, NS_PER_S, LeaseId, Nanoseconds, Offer, PolicyFault
from elastic.system.installed import installed, is_ours, package_of
from elastic.system.plain_values import number, shown, told, whole
from elastic.system.plug_ins import AskedPlugIn
from providers.base import (
    USD_MAX,
    Emit,
    KnownLease,
    Provider,
    ProviderContext,
    ProviderEvent,
    ProviderSettings,
    ProviderUnavailable,
)
from providers.markets import CapacityUnavailable, LeaseEnding, Market, TakenBack

T = TypeVar("T")
SECONDS_MAX = INTEGER_MAX // NS_PER_S
LOOKS_MOST = 100_000
"""Times that a market may look at one time of its next change while it advances: more, and it never gets on."""


def provider_plug_in(
    name: str, settings: ProviderSettings, fault: Callable[[str], Exception] = PolicyFault
) -> AskedPlugIn | None:
    """Return the plug-in that brings this kind of provider; None for one of ours."""
    point = installed("elastic.providers").get(settings.kind)
    if point is None or is_ours(point):
        return None
    return AskedPlugIn(f"providers.{name}: {settings.kind} of the package {package_of(point)}", fault)


def make_provider(
    kind: type[Provider],
    name: str,
    settings: ProviderSettings,
    context: ProviderContext,
    fault: Callable[[str], Exception],
) -> Provider:
    """Make a provider; one of another package, and its market, check themselves. Raises `ProviderUnavailable`, and the
    error that `fault` makes."""
    plug_in = provider_plug_in(name, settings, fault)
    if plug_in is None:
        return kind(name, settings, context)
    members = {"_checked_by": plug_in, "_begins_within_s": context.acquire_timeout_s}
    checked = plug_in.ask("its provider", lambda: type(kind.__name__, (CheckedProvider, kind), members))
    provider = plug_in.ask("its provider", lambda: checked(name, settings, context), ProviderUnavailable)
    if isinstance(market := getattr(provider, "market", None), Market):
        check_market(market, plug_in)
    return provider


def check_market(market: Market[Any], plug_in: AskedPlugIn) -> None:
    """Have a market check its own answers from now on: the plug-in's fault is raised at each call that raises, or
    answers what is not allowed."""
    kind = type(market)
    if kind.__module__ != Market.__module__:
        checked = plug_in.ask(
            "its market", lambda: type(kind.__name__, (CheckedMarket, kind), {"_checked_by": plug_in})
        )
        market.__class__ = checked


class CheckedProvider:
    """Stands before another package's provider in the order of a class's bases. A run with one that cannot begin does
    not begin: `ProviderUnavailable` says why."""

    _checked_by: AskedPlugIn
    _begins_within_s: float

    async def adopt(self, known: Sequence[KnownLease], emit: Emit) -> list[LeaseId]:
        answer = await self._begun("adopt", known, self._checked(emit))
        return self._unavailable.made("adopt", answer, list[LeaseId], "a list of leases' ids")

    async def start(self, emit: Emit) -> None:
        await self._begun("start", self._checked(emit))

    async def release(self, lease: LeaseId, reason: str = "") -> None:
        """What it raises is no fault, for a release is repeated."""
        try:
            await self._theirs("release")(lease, reason)
        except (PolicyFault, asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise self._unavailable.raised("release", error, __file__) from error

    def bar(self, lease: LeaseId) -> None:
        self._checked_by.ask("bar", lambda: self._theirs("bar")(lease))

    @property
    def waits_for(self) -> str:
        try:
            return str(self._theirs("waits_for"))
        except Exception as error:
            return f"what waits_for does not say ({told(error)})"

    def _checked(self, emit: Emit) -> Emit:
        def checked(event: ProviderEvent) -> None:
            if not isinstance(event, ProviderEvent):
                named = ", ".join(kind.__name__ for kind in get_args(ProviderEvent))
                raise self._checked_by.fault(f"{self._checked_by.whose}: emit got {shown(event)}; allowed: {named}")
            emit(event)

        return checked

    def _theirs(self, name: str) -> Any:
        return getattr(super(), name)

    @property
    def _unavailable(self) -> AskedPlugIn:
        return replace(self._checked_by, fault=ProviderUnavailable)

    async def _begun(self, name: str, *arguments: Any) -> Any:
        try:
            async with asyncio.timeout(self._begins_within_s):
                return await self._theirs(name)(*arguments)
        except (ProviderUnavailable, PolicyFault, asyncio.CancelledError, KeyboardInterrupt):
            raise
        except TimeoutError:
            within = f"{name} took longer than {self._begins_within_s:g} s (scheduler.acquire_timeout_s)"
            raise ProviderUnavailable(f"{self._checked_by.whose}: {within}") from None
        except BaseException as error:
            raise self._unavailable.raised(name, error, __file__) from error


class CheckedMarket(Market[Any]):
    """Stands before another kind of market in the order of a class's bases, so each call within that market, too, comes
    here first."""

    _checked_by: AskedPlugIn
    _checked_now_ns: Nanoseconds = -1
    _checked_look: tuple[Nanoseconds | None, int] = None, 0
    """The last time of the next change, and how often the market has looked at it in this advance."""

    def free(self) -> int:
        return self._whole("free", -self.overlap())

    def overlap(self) -> int:
        return self._whole("overlap")

    def life_s(self) -> float | None:
        return self._number("life_s", SECONDS_MAX, or_none=True)

    def expected_life_s(self) -> float | None:
        return self._number("expected_life_s", SECONDS_MAX, or_none=True)

    def usd_per_gpu_hour(self) -> float:
        return self._number("usd_per_gpu_hour", USD_MAX) or 0.0

    def boot_s(self) -> float:
        return self._number("boot_s", SECONDS_MAX) or 0.0

    @property
    def next_ns(self) -> Nanoseconds | None:
        answer = self._asked("next_ns", lambda: super(CheckedMarket, self).next_ns)
        found = whole(answer)
        if answer is not None and (found is None or not 0 <= found <= INTEGER_MAX):
            raise self._checked_by.wrong("next_ns", answer, f"None, or a whole number from 0 to {INTEGER_MAX}")
        last, looks = self._checked_look
        self._checked_look = found, looks + 1 if found == last else 1
        if found is not None and found <= self._checked_now_ns and looks > LOOKS_MOST:
            raise self._stays(found)
        return found

    def advance(self, now_ns: Nanoseconds) -> Iterator[TakenBack]:
        self._checked_now_ns, self._checked_look, over = now_ns, (None, 0), object()
        changes = self._asked("advance", lambda: iter(super(CheckedMarket, self).advance(now_ns)))
        while (change := self._asked("advance", lambda: next(changes, over))) is not over:
            taken = self._checked_by.made("advance", change, TakenBack)
            if taken.lease not in self._held or not 0 <= taken.deadline_ns <= INTEGER_MAX:
                held = ", ".join(sorted(self._held)[:8]) or "there is none"
                raise self._checked_by.wrong(
                    "advance", change, f"a lease that is held ({held}), with a deadline from 0 on"
                )
            yield taken
        if (next_ns := self.next_ns) is not None and next_ns <= now_ns:
            raise self._stays(next_ns)

    def pick(self, lease: LeaseId) -> str:
        return self._checked_by.made("pick", self._call("pick", lease), str)

    def take(self, lease: LeaseId) -> str:
        return self._checked_by.made("take", self._call("take", lease), str)

    def restore(self, lease: LeaseId, place: str) -> None:
        self._call("restore", lease, place)
        self._held.add(lease)

    def forget(self, lease: LeaseId, *, barred: bool = False) -> None:
        self._call("forget", lease, barred=barred)
        self._held.discard(lease)

    def expiry(self) -> LeaseEnding:
        return self._checked_by.made("expiry", self._call("expiry"), LeaseEnding)

    def news(self, *, again: bool = False) -> Offer | None:
        answer = self._call("news", again=again)
        return None if answer is None else self._checked_by.made("news", answer, Offer)

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        return self._asked(name, lambda: getattr(super(CheckedMarket, self), name)(*arguments, **named))

    def _asked(self, name: str, call: Callable[[], T]) -> T:
        return self._checked_by.ask(name, call, CapacityUnavailable, PolicyFault)

    def _whole(self, name: str, least: int = 0) -> int:
        answer = self._call(name)
        found = whole(answer)
        if found is None or not least <= found <= INTEGER_MAX:
            raise self._checked_by.wrong(name, answer, f"a whole number from {least} to {INTEGER_MAX}")
        return found

    def _number(self, name: str, most: float, *, or_none: bool = False) -> float | None:
        answer = self._call(name)
        if answer is None and or_none:
            return None
        found = number(answer)
        if found is None or not 0 <= found <= most:
            raise self._checked_by.wrong(name, answer, f"{'None, or ' if or_none else ''}a number from 0 to {most:.0f}")
        return found

    def _stays(self, next_ns: Nanoseconds) -> Exception:
        allowed = f"None, or later than {self._checked_now_ns}, to which the market has advanced"
        return self._checked_by.wrong("next_ns", next_ns, allowed)
