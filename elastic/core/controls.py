"""What a run was told from outside while it went on: its caps by provider, its budget, and whether to stop."""

from dataclasses import dataclass, field

from elastic.core.types import LeaseId, Nanoseconds

BUDGET_EXHAUSTED = "BudgetExhausted"
"""How the reason of a run begins that was stopped for its budget."""


@dataclass(slots=True)
class Controls:
    """The state that commands have left; false for a run that was given none.

    - `commands` maps the id of each command that was done to what it said: a repeat is recognised by its id.
    - `caps` has the most GPUs that may be held of a provider, where that is limited.
    - `budget_usd` is what the run may cost in all. Of that, `carried_nano_usd` is known from elsewhere than the ledger
      (incarnations that this one does not go on from, leases that were granted while nobody listened), and
      `functions_nano_usd` are the calls of functions, of which one more costs `call_nano_usd` at most.
    - `unheard_since_ns` has leases that were asked for before the run was resumed, and when that was.
    - `stopped` is why the run was told to stop; it is empty while it was not.
    """

    commands: dict[str, str] = field(default_factory=dict[str, str])
    caps: dict[str, int] = field(default_factory=dict[str, int])
    budget_usd: float | None = None
    carried_nano_usd: int = 0
    functions_nano_usd: int = 0
    call_nano_usd: int = 0
    unheard_since_ns: dict[LeaseId, Nanoseconds] = field(default_factory=dict[LeaseId, Nanoseconds])
    stopped: str = ""

    def __bool__(self) -> bool:
        return self != Controls()
