"""Offers of those who train elsewhere, one after the other, and what a run holds while nobody asks for anything."""

from collections.abc import Callable, Mapping
from typing import Any

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.run_state import Changed, RunState
from elastic.core.serving import LABELS_KEPT


class ServingManager:
    def __init__(self, run: RunState) -> None:
        self._run = run
        self.handlers: Mapping[type[e.Event], Callable[[Any], Changed | None]] = {
            e.VersionOffered: self._on_offered,
            e.TurnsHeld: self._on_held,
        }
        self.due: Mapping[str, Callable[[str], None]] = {"idle": self._idle_due}

    def _on_offered(self, event: e.VersionOffered) -> None:
        """Queue the offer, unless it is served already or waits. What is the same is answered once for all."""
        run, serving = self._run, self._run.serving
        if serving is None or not run.active:
            version = run.version or 0
            run.out.append(c.AnswerOffer(look=event.look, version=version, refused="the run takes no offers"))
        elif any(offer.look == event.look for offer in serving.offers):
            return
        elif not serving.offers and serving.look == event.look:
            run.out.append(c.AnswerOffer(look=event.look, version=run.version or 0))
        else:
            serving.offers.append(event)

    def published(self, version: int) -> None:
        """The first offer is this version."""
        serving = self._run.serving
        if serving is None:
            return
        offer = serving.offers.pop(0)
        serving.look = offer.look
        serving.labels[version] = offer.label
        while len(serving.labels) > LABELS_KEPT:
            del serving.labels[next(iter(serving.labels))]
        self._run.out.append(c.AnswerOffer(look=offer.look, version=version))

    def refused(self, reason: str, *, again: bool) -> None:
        """The first offer is not served: what was goes on."""
        run, serving = self._run, self._run.serving
        assert serving is not None
        offer = serving.offers.pop(0)
        run.out.append(c.AnswerOffer(look=offer.look, version=run.version or 0, refused=reason, again=again))

    def abandon(self, reason: str) -> None:
        """The run is over: nothing that waits will be served by this process of it."""
        self._run.timers.clear("idle", "run")
        serving = self._run.serving
        while serving is not None and serving.offers:
            self.refused(reason, again=True)

    def _on_held(self, event: e.TurnsHeld) -> None:
        if (serving := self._run.serving) is not None:
            serving.held = event.held
            self._run.turns.queue.changed = True

    def follow_requests(self) -> bool:
        """Whether leases are of use: turns are requested, or were a short time ago."""
        run, serving = self._run, self._run.serving
        assert serving is not None
        if run.turns.live:
            serving.idle = False
            run.timers.clear("idle", "run")
        elif not serving.idle and not run.timers.waiting("idle", "run") and run.plan.idle_ns:
            run.wait("idle", "run", run.plan.idle_ns)
        return not serving.idle

    def _idle_due(self, _: str) -> None:
        assert self._run.serving is not None
        self._run.serving.idle = True
