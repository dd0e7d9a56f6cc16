"""Commands from outside the run: each is done once, and remembered by its id for as long as the run lives."""

from collections.abc import Callable, Mapping
from typing import Any

from elastic.core import events as e
from elastic.core.run_state import RunState


class ControlManager:
    def __init__(self, run: RunState) -> None:
        self._run = run
        self.handlers: Mapping[type[e.Event], Callable[[Any], None]] = {
            e.StopCommanded: self._on_stop,
            e.CapSet: self._on_cap,
            e.BudgetSet: self._on_budget,
        }
        self.due: Mapping[str, Callable[[str], None]] = {}

    def _first(self, event: e.ControlEvent) -> bool:
        """Whether the command was not done before. From now on it was."""
        done = self._run.controls.commands
        first = event.command not in done
        done.setdefault(event.command, event.words)
        return first

    def _on_stop(self, event: e.StopCommanded) -> None:
        if self._first(event) and not event.undone:
            self._run.stop(event.reason)

    def _on_cap(self, event: e.CapSet) -> None:
        if self._first(event):
            caps = self._run.controls.caps
            caps.pop(event.provider, None)
            if event.gpus is not None:
                caps[event.provider] = event.gpus

    def _on_budget(self, event: e.BudgetSet) -> None:
        if self._first(event):
            self._run.controls.budget_usd = event.usd
