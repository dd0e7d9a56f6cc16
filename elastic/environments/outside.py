"""No environment of the run's: agents elsewhere drive its trajectories through fronts (`elastic.front`)."""

from typing import ClassVar, NoReturn

from pydantic import BaseModel, ConfigDict, Field


class OutsideSettings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    deadline_s: float = Field(
        3600.0, gt=0, description="from the first trajectory of a group to the end of its last; others have failed"
    )
    idle_s: float = Field(
        600.0, gt=0, description="how long a trajectory stays open without a call; it ends with the reward that it has"
    )

    @property
    def offers_tools(self) -> bool:
        """Whether the policy is to call tools, as far as the settings tell."""
        return False


class Outside:
    """Stands for agents elsewhere. The run opens its trajectories as they are asked for, and plays none of them."""

    Settings: ClassVar[type[BaseModel]] = OutsideSettings
    vocabulary: ClassVar[tuple[str, ...]] = ()
    stop_token_ids: ClassVar[tuple[int, ...]] = ()
    driven_outside: ClassVar[bool] = True

    def __init__(self, settings: BaseModel) -> None:
        self.settings = settings

    async def reset(self, seed: int) -> NoReturn:
        raise NotImplementedError("agents drive this trajectory")

    async def step(self, token_ids: list[int]) -> NoReturn:
        raise NotImplementedError("agents drive this trajectory")

    async def truncate(self) -> NoReturn:
        raise NotImplementedError("agents drive this trajectory")

    async def aclose(self) -> None:
        """There is nothing to close."""
