"""An event loop for tests of what takes its time."""

import asyncio


class StandingClock(asyncio.SelectorEventLoop):
    """Its time stands still, but for jumps to the next timer when nothing else is to be done."""

    now_s = 0.0

    def time(self) -> float:
        return self.now_s

    def _run_once(self) -> None:
        if not self._ready and self._scheduled:  # type: ignore[attr-defined]
            self.now_s = max(self.now_s, self._scheduled[0].when())  # type: ignore[attr-defined]
        super()._run_once()  # type: ignore[misc]
