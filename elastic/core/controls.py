"""What a run was told from outside while it went on: its caps by provider, its budget, and whether to stop."""

from dataclasses import dataclass, field


@dataclass(slots=True)
class Controls:
    """The state that commands have left; false for a run that was given none.

    - `commands` maps the id of each command that was done to what it said: a repeat is recognised by its id.
    - `caps` has the most GPUs that may be held of a provider, where that is limited.
    - `stopped` is why the run was told to stop; it is empty while it was not.
    """

    commands: dict[str, str] = field(default_factory=dict[str, str])
    caps: dict[str, int] = field(default_factory=dict[str, int])
    budget_usd: float | None = None
    stopped: str = ""

    def __bool__(self) -> bool:
        return bool(self.commands or self.caps or self.stopped or self.budget_usd is not None)
