"""What a run was told from outside while it went on: its caps by provider, its budget, and whether to stop."""

from dataclasses import dataclass, field

from elastic.core.types import LeaseId, Nanoseconds

BUDGET_EXHAUSTED = "BudgetExhausted"
"""How the reason of a run begins that was stopped for its budget."""


@dataclass(slots=True)
class Controls:
    """The state that commands have left.

    - `commands` maps the id of each completed command to its text. A repetition is recognised by its id.
    - `caps` is the largest number of GPUs of each limited provider.
    - `budget_usd` is what the run may cost in all. Of this, `carried_nano_usd` is known from elsewhere than the ledger:
      incarnations that this one does not continue, each provider's part of which is in `carried_of`, and leases granted
      while no process listened. `functions_nano_usd`
      is the cost of function calls; one more call costs `call_nano_usd` at most.
    - `unheard_since_ns` has the leases requested before the run was resumed, and the time of the request.
    - `stopped` is the reason of a stop; empty if the run was not stopped.
    """

    commands: dict[str, str] = field(default_factory=dict[str, str])
    caps: dict[str, int] = field(default_factory=dict[str, int])
    budget_usd: float | None = None
    carried_nano_usd: int = 0
    carried_of: dict[str, int] = field(default_factory=dict[str, int])
    functions_nano_usd: int = 0
    call_nano_usd: int = 0
    unheard_since_ns: dict[LeaseId, Nanoseconds] = field(default_factory=dict[LeaseId, Nanoseconds])
    stopped: str = ""

    def __bool__(self) -> bool:
        return self != Controls()
