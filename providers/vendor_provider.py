"""The common part of providers whose workers run at a vendor that can be asked what there is of a run.

- A look at the vendor every so often keeps the offer true, and ends what belongs to no lease. While the vendor does not
  answer, workers go on.
- The provider's end waits until nothing is left at the vendor, and no order that is under way can bring anything.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any, TypeVar

import structlog

from elastic.system.plain_values import told
from providers.base_provider import BaseProvider
from providers.markets import SettingsT
from providers.vendor_calls import call

log = structlog.get_logger(__name__)
T = TypeVar("T")

SETTLING_S = 20.0
"""How long a vendor may not know yet, nor list, what is new: a call whose answer was lost, a template, a secret."""
LOOK_AGAIN_S = 0.5


class VendorProvider(BaseProvider[SettingsT]):
    """Adapters say how to look and what to end. `vendor` is in words: which, and where it is asked."""

    vendor: str
    answer_s: float
    """The longest time that one call may take."""
    mend = ""
    """What may help where it does not answer."""
    used = False
    """Whether this process or an earlier one may have left anything there."""
    silent_since_s: float | None = None
    """When (monotonic) the vendor stopped answering; None while it answers."""

    async def look(self) -> None:
        """Ask for what there is, and act upon it. Raises an error if the vendor does not answer."""
        raise NotImplementedError

    async def unanswered(self, error: Exception) -> None:
        """Called for each look without an answer."""

    async def sweep(self) -> bool:
        """End what belongs to no lease. Return whether nothing is left, and nothing can come any more."""
        raise NotImplementedError

    async def clear_up(self) -> None:
        """Delete what else the run has there. Called once no worker of it is left."""

    @property
    def remains(self) -> str:
        """Return where to look for what is left."""
        raise NotImplementedError

    @property
    def closing_s(self) -> float:
        return self.context.release_timeout_s + SETTLING_S + self._search_s

    @property
    def _search_s(self) -> float:
        return max(self.context.release_timeout_s, SETTLING_S) + SETTLING_S

    async def ask(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call one of the vendor's blocking functions. Raises what it raises, and `TimeoutError`."""
        return await call(self.answer_s, function, *arguments)

    async def end_left_over(self) -> str:
        used, self.used = self.used, False
        try:
            if used:
                async with asyncio.timeout(self._search_s):
                    while not await self.sweep():  # noqa: ASYNC110 - the vendor, which cannot tell us
                        await asyncio.sleep(LOOK_AGAIN_S)
                    await self.clear_up()
        except Exception as error:
            return f"what is left of it at {self.vendor} is not known ({told(error)}); {self.remains}"
        return ""

    async def watch(self, every_s: float) -> None:
        """Look at the vendor for ever, and offer what there is."""
        while True:
            await asyncio.sleep(every_s)
            try:
                await self.look()
            except Exception as error:
                if self.silent_since_s is None:
                    self.silent_since_s = time.monotonic()
                    log.warning(
                        f"{self.vendor} cannot be asked: workers go on",
                        provider=self.name,
                        tried=f"a look every {every_s:g} s, each for {self.answer_s:g} s",
                        mend=self.mend,
                        error=told(error),
                    )
                await self.unanswered(error)
            else:
                if self.silent_since_s is not None:
                    log.info(f"{self.vendor} answers again", provider=self.name)
                self.silent_since_s = None
            self.announce()
