"""Offers of those who train elsewhere, one after the other, and what a run holds while nobody asks for anything."""

from elastic.core import commands as c
from elastic.core import events as e
from elastic.core.lease_manager import LeaseManager
from elastic.core.run_state import Deadlines, Handlers, RunState
from elastic.core.serving import GAP_LEAST_NS, GAP_MARGIN, LABELS_KEPT
from elastic.core.types import Nanoseconds


class ServingManager:
    def __init__(self, run: RunState, leases: LeaseManager) -> None:
        self._run = run
        self._leases = leases
        self.handlers: Handlers = {
            e.VersionOffered: self._on_offered,
            e.TurnsHeld: self._on_held,
        }
        self.due: Deadlines = {"idle": self._idle_due}

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
        """Give leases back while nothing is requested, and ask for them with the first request. Returns whether the
        latter has begun.

        The holding policy decides by how long such gaps have taken; after the plan's `idle_ns` all go back.
        """
        run, serving = self._run, self._run.serving
        assert serving is not None
        if not run.turns.live:
            if serving.quiet_since_ns is None:
                serving.quiet_since_ns = run.now_ns
                self._look_after(GAP_LEAST_NS if run.policies.holding is not None else None)
            return False
        if serving.quiet_since_ns is not None and serving.asked:
            serving.note_gap(run.now_ns - serving.quiet_since_ns)
        serving.quiet_since_ns, serving.asked = None, True
        run.timers.clear("idle", "run")
        return self._leases.end_lull()

    def _look_after(self, quiet_ns: Nanoseconds | None) -> None:
        """Look at the gap once it has taken so long, or is that of a run that is idle."""
        run, serving = self._run, self._run.serving
        assert serving is not None
        assert serving.quiet_since_ns is not None
        idle_ns = run.plan.idle_ns or None
        at_ns = min((ns for ns in (quiet_ns, idle_ns) if ns is not None), default=None)
        if at_ns is not None:
            run.wait("idle", "run", max(0, serving.quiet_since_ns + at_ns - run.now_ns))

    def _idle_due(self, _: str) -> None:
        run, serving = self._run, self._run.serving
        assert serving is not None
        if run.turns.live or serving.quiet_since_ns is None:
            return
        quiet_ns = run.now_ns - serving.quiet_since_ns
        if run.plan.idle_ns and quiet_ns >= run.plan.idle_ns:
            self._leases.begin_lull(None, comes_to_an_end=False)
            return
        foreseen_ns = serving.foreseen_ns(quiet_ns)
        if foreseen_ns is not None:
            self._leases.begin_lull(foreseen_ns - quiet_ns)
        self._look_after(None if foreseen_ns is None else round(GAP_MARGIN * foreseen_ns))
