"""The permits by which a live run's trainer computes, from the pool that shares its device. A run's port `Pool`."""

from collections.abc import Callable

from elastic.core import events as e
from elastic.core.cluster.types import PhaseKind
from elastic.core.types import NS_PER_S, Nanoseconds
from elastic.pool import messages as w
from elastic.pool.client import News, PoolClient
from elastic.runtime.ports import Feed


class PoolPermits:
    """`elastic.runtime.ports.Pool` over a pool's open connection."""

    def __init__(self, client: PoolClient, feed: Feed, now_ns: Callable[[], Nanoseconds]) -> None:
        self._client = client
        self._feed = feed
        self._now_ns = now_ns
        self._had: int | None = None
        """The permit that the run has been told of, until it is over."""

    def ask_permit(self) -> None:
        self._client.part.ask(PhaseKind.TRAIN)

    def yield_permit(self, permit: int | None, *, finished: bool) -> None:
        if permit is None:
            self._client.part.withdraw(PhaseKind.TRAIN)
            return
        if permit == self._had:
            self._had = None
        self._client.part.leave(permit, finished=finished)

    def report_progress(self, step: int, done: int, of: int) -> None:
        self._client.part.report_steps(step)
        self._client.part.report_progress(done, of)

    def take_up(self, permit: int | None, *, asked: bool, last: int) -> None:
        """Begin. Called once, before anything else, also for a new run."""
        self._client.on_permits(self._hear)
        held = self._client.part.permit_of(PhaseKind.TRAIN)
        if permit is not None and (held is None or held.number != permit):
            self._feed(e.PermitEnded(permit=permit, cause="it was over before the run went on"))
        if held is not None:
            if held.number == permit:
                self._had = permit
                if held.recalled:
                    self._recall(held.number)
            elif held.number > last:
                self._grant(held.number)
            else:
                self._client.part.leave(held.number, finished=False)
        if asked and self._had is None:
            self.ask_permit()

    def _hear(self, news: News) -> None:
        match news:
            case w.Granted() if news.permit != self._had:
                self._grant(news.permit)
            case w.Granted(recalled=True):
                self._recall(news.permit)
            case w.PermitOver() if news.permit == self._had:
                self._had = None
                self._feed(e.PermitEnded(permit=news.permit, cause=news.cause))
            case _:
                pass

    def _grant(self, permit: int) -> None:
        self._had = permit
        self._feed(e.PermitGranted(permit=permit, deadline_ns=self._ends_ns(permit)))
        held = self._client.part.permits.get(permit)
        if held is not None and held.recalled:
            self._recall(permit)

    def _recall(self, permit: int) -> None:
        self._feed(e.PermitRecalled(permit=permit, until_ns=self._ends_ns(permit)))

    def _ends_ns(self, permit: int) -> Nanoseconds:
        return self._now_ns() + round(self._client.left_s(permit) * NS_PER_S)
