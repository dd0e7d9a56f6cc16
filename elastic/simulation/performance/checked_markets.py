"""Markets of other packages' providers, whose answers are checked before a simulation acts on them."""

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import msgspec

from elastic.core.types import INTEGER_MAX, NS_PER_S, LeaseId, Nanoseconds, Offer, PolicyFault
from elastic.system.named_code import where
from elastic.system.plain_values import number, plain, shown, told, whole
from providers.base import USD_MAX, ProviderSettings
from providers.markets import CapacityUnavailable, LeaseEnding, Market, TakenBack

T = TypeVar("T")
SECONDS_MAX = INTEGER_MAX // NS_PER_S
LOOKS_MOST = 100_000
"""Times that a market may look at one time of its next change while it advances: more, and it never gets on."""


def checked_market(kind: type[Market[Any]], whose: str, name: str, settings: ProviderSettings) -> Market[Any]:
    """A market of this kind that also checks its own answers. `whose` names the provider and its package.

    Raises `PolicyFault`, now and at each call, where it raises or answers what is not allowed.
    """
    members = {"_checked_whose": whose}
    return _asked(whose, "its market", lambda: type(kind.__name__, (CheckedMarket, kind), members)(name, settings))


class CheckedMarket(Market[Any]):
    """Stands before another kind of market in the order of a class's bases, so each call within that market, too, comes
    here first."""

    _checked_whose: str
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
        answer = _asked(self._checked_whose, "next_ns", lambda: super(CheckedMarket, self).next_ns)
        found = whole(answer)
        if answer is not None and (found is None or not 0 <= found <= INTEGER_MAX):
            raise self._fault("next_ns", answer, f"None, or a whole number from 0 to {INTEGER_MAX}")
        last, looks = self._checked_look
        self._checked_look = found, looks + 1 if found == last else 1
        if found is not None and found <= self._checked_now_ns and looks > LOOKS_MOST:
            raise self._stays(found)
        return found

    def advance(self, now_ns: Nanoseconds) -> Iterator[TakenBack]:
        self._checked_now_ns, self._checked_look, over = now_ns, (None, 0), object()
        changes = _asked(self._checked_whose, "advance", lambda: iter(super(CheckedMarket, self).advance(now_ns)))
        while (change := _asked(self._checked_whose, "advance", lambda: next(changes, over))) is not over:
            taken = self._typed("advance", change, TakenBack)
            if taken.lease not in self._held or not 0 <= taken.deadline_ns <= INTEGER_MAX:
                held = ", ".join(sorted(self._held)[:8]) or "there is none"
                raise self._fault("advance", change, f"a lease that is held ({held}), with a deadline from 0 on")
            yield taken
        if (next_ns := self.next_ns) is not None and next_ns <= now_ns:
            raise self._stays(next_ns)

    def pick(self, lease: LeaseId) -> str:
        return self._typed("pick", self._call("pick", lease), str)

    def take(self, lease: LeaseId) -> str:
        return self._typed("take", self._call("take", lease), str)

    def forget(self, lease: LeaseId, *, barred: bool = False) -> None:
        self._call("forget", lease, barred=barred)
        self._held.discard(lease)

    def expiry(self) -> LeaseEnding:
        return self._typed("expiry", self._call("expiry"), LeaseEnding)

    def news(self, *, again: bool = False) -> Offer | None:
        answer = self._call("news", again=again)
        return None if answer is None else self._typed("news", answer, Offer)

    def _call(self, name: str, *arguments: Any, **named: Any) -> Any:
        return _asked(self._checked_whose, name, lambda: getattr(super(CheckedMarket, self), name)(*arguments, **named))

    def _whole(self, name: str, least: int = 0) -> int:
        answer = self._call(name)
        found = whole(answer)
        if found is None or not least <= found <= INTEGER_MAX:
            raise self._fault(name, answer, f"a whole number from {least} to {INTEGER_MAX}")
        return found

    def _number(self, name: str, most: float, *, or_none: bool = False) -> float | None:
        answer = self._call(name)
        if answer is None and or_none:
            return None
        found = number(answer)
        if found is None or not 0 <= found <= most:
            raise self._fault(name, answer, f"{'None, or ' if or_none else ''}a number from 0 to {most:.0f}")
        return found

    def _typed(self, name: str, answer: Any, kind: type[T]) -> T:
        try:
            return msgspec.msgpack.decode(msgspec.msgpack.encode(answer, enc_hook=plain), type=kind)
        except Exception as error:
            raise self._fault(name, answer, f"a {kind.__name__} ({told(error)})") from error

    def _stays(self, next_ns: Nanoseconds | None) -> PolicyFault:
        allowed = f"None, or later than {self._checked_now_ns}, to which the market has advanced"
        return self._fault("next_ns", next_ns, allowed)

    def _fault(self, name: str, answer: object, allowed: str) -> PolicyFault:
        return PolicyFault(f"{self._checked_whose}: {name} returned {shown(answer)}; allowed: {allowed}")


def _asked(whose: str, name: str, call: Callable[[], T]) -> T:
    try:
        return call()
    except (KeyboardInterrupt, CapacityUnavailable, PolicyFault):
        raise
    except BaseException as error:  # Also `SystemExit`.
        raise PolicyFault(f"{whose}: {name} raised {told(error)}{where(error, __file__)}") from error
