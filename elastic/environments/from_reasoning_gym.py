"""The kind `reasoning-gym`: a question of a data set that is generated, one answer, and the data set's own scorer.

The question of a group follows from its place among its environment's, and from the data set's seed, the run's.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field

from elastic.environments.agent import EpisodeTask, Outcome, PlayedTrajectory, Rollout, finite
from elastic.environments.asking import ask
from elastic.environments.kinds import KindMeans, KindSettings, package, unusable
from elastic.environments.outside import Outside
from elastic.system.named_code import in_file, load

INSTALL = "pip install reasoning-gym"


class ReasoningGymSettings(KindSettings):
    dataset: str = Field(
        min_length=1, description="name of the data set, such as `leg_counting`; or FILE.py:NAME, which makes one's own"
    )
    options: dict[str, Any] = Field(default_factory=dict, description="further keys of the data set's configuration")
    size: int = Field(1_000_000, ge=1, lt=2**31, description="questions, after which they come again")
    system: str | None = Field(None, description="system prompt; by default reasoning-gym's own; empty: none")
    answer: Literal["tag", "whole"] = Field(
        "tag", description="what is scored: the text in the last <answer>, or the `whole` answer"
    )


class ReasoningGym(Outside):
    """Stands for the episodes, which env workers play."""

    Settings: ClassVar[type[BaseModel]] = ReasoningGymSettings
    in_workers: ClassVar[bool] = True


async def load_reasoning_gym(settings: ReasoningGymSettings, means: KindMeans) -> Rollout:
    """What plays an episode. Raises `CodeUnusable` for a data set that there is not, or with other options."""
    gym: Any = package("reasoning_gym", "reasoning-gym", INSTALL)
    utils: Any = package("reasoning_gym.utils", "reasoning-gym", INSTALL)
    known: Any = package("reasoning_gym.factory", "reasoning-gym", INSTALL)
    own = in_file(settings.dataset)
    made: Callable[..., Any] = load(settings.dataset) if own else partial(gym.create_dataset, settings.dataset)
    try:
        questions = made(**{"seed": means.seed, "size": settings.size, **settings.options})
        questions[0]
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        raise unusable("dataset", settings.dataset, error, () if own else known.DATASETS) from error
    default = utils.SYSTEM_PROMPTS["default"] if settings.answer == "tag" else ""
    system = default if settings.system is None else settings.system

    async def play(task: EpisodeTask, client: Any, trajectory: PlayedTrajectory) -> Outcome:
        question = questions[task.place % settings.size]
        messages = [{"role": "system", "content": system}] if system else []
        messages.append({"role": "user", "content": question["question"]})
        said = await ask(means.http, trajectory, messages)
        answer = utils.extract_answer(said.text, "answer") if settings.answer == "tag" else said.text
        scored = questions.score_answer(answer=answer, entry=question)
        return Outcome(reward=finite("the data set's scorer", scored), truncated=said.cut)

    return play
