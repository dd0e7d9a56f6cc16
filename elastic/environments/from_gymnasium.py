"""The kind `gymnasium`: an episode is a conversation. The policy reads observations and names an action in each turn.

- An observation is told as text: what the environment renders as such, and else its value.
- The last name or number of an action in an answer counts. Where there is none the policy is told so, and asked again.
- The reward is the sum of all steps' rewards.
- All members of a group have the environment of one seed, the task's.
"""

import json
import re
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import structlog
from pydantic import BaseModel, Field

from elastic.environments.agent import EpisodeTask, Outcome, PlayedTrajectory, Rollout, finite
from elastic.environments.asking import ask_in_turn
from elastic.environments.kinds import SEEDS, KindMeans, KindSettings, as_text, package, unusable
from elastic.environments.outside import Outside
from elastic.system.named_code import NAMES_CODE, CodeUnusable, in_file, load
from elastic.system.plain_values import shown, told

log = structlog.get_logger(__name__)

_COLOUR = re.compile(r"\x1b\[([0-9;]*)m")
_LIST = re.compile(r"\[[^\[\]]*\]")
_NUMBER = r"-?\d+(?:\.\d+)?"


class GymnasiumSettings(KindSettings):
    id: str = Field(
        min_length=1,
        description="of the environment, as `gymnasium.make` takes it; or FILE.py:NAME of one's own",
        json_schema_extra=NAMES_CODE,
    )
    options: dict[str, Any] = Field(default_factory=dict, description="further arguments of `gymnasium.make`")
    system: str = Field("", description="system prompt; else one that says which actions there are")
    actions: tuple[str, ...] = Field((), description="names of a discrete space's actions, the first one's first")
    turns_most: int = Field(100, ge=1, description="answers of the policy after which an episode is truncated")


class Gymnasium(Outside):
    """Stands for the episodes, which env workers play."""

    Settings: ClassVar[type[BaseModel]] = GymnasiumSettings
    in_workers: ClassVar[bool] = True


async def load_gymnasium(settings: GymnasiumSettings, means: KindMeans) -> Rollout:
    """What plays an episode. Raises `CodeUnusable` for an environment that cannot be made, or be talked to."""
    make, renders = _maker(settings)
    first = make()
    free = [first]
    means.lasting.callback(lambda: [_close(one) for one in free])
    actions = Actions(first.action_space, settings.actions)
    system = {"role": "system", "content": settings.system or actions.told}

    async def play(task: EpisodeTask, client: Any, trajectory: PlayedTrajectory) -> Outcome:
        environment = free.pop() if free else make()
        try:
            outcome = await played(environment, task, trajectory)
        except BaseException:
            _close(environment)
            raise
        free.append(environment)  # None that has raised.
        return outcome

    async def played(environment: Any, task: EpisodeTask, trajectory: PlayedTrajectory) -> Outcome:
        def observed(observation: Any, before: str = "") -> dict[str, Any]:
            text = highlighted(as_text(environment.render())) if renders else as_text(observation)
            return {"role": "user", "content": before + text}

        # It steps on this event loop: what never returns is noticed by the run, which hears nothing more.
        observation, _ = environment.reset(seed=task.seed % SEEDS)
        messages, total = [system, observed(observation)], 0.0
        outcome = Outcome(reward=total, truncated=True)
        for turn in range(settings.turns_most):
            said = await ask_in_turn(turn, means.http, trajectory, messages)
            if said is None:
                break
            messages.append(said.message)
            if (action := actions.read(said.text)) is None:
                messages.append(observed(observation, f"There is no action in this answer. {actions.told}\n"))
                continue
            observation, reward, terminated, truncated, _ = environment.step(action)
            total += finite("the environment's reward", reward)
            outcome = Outcome(reward=total, truncated=not terminated)
            if terminated or truncated:
                break
            messages.append(observed(observation))
        return outcome

    return play


def _close(environment: Any) -> None:
    """Have it give back what it holds. It is of no more use, whatever it says of that."""
    try:
        environment.close()
    except (Exception, SystemExit) as error:
        log.warning("an environment cannot be closed", error=told(error))


def _maker(settings: GymnasiumSettings) -> tuple[Callable[[], Any], bool]:
    """What makes an environment, and whether it renders text. Raises `CodeUnusable`."""
    gymnasium: Any = package("gymnasium", "gymnasium", "pip install gymnasium")
    own = in_file(settings.id)
    made: Callable[..., Any] = load(settings.id) if own else gymnasium.make
    arguments = () if own else (settings.id,)

    def make(**more: Any) -> Any:
        try:
            return made(*arguments, **{**settings.options, **more})
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            names = [] if own else list(gymnasium.registry)
            raise unusable("id", settings.id, error, names) from error

    tried = make()
    modes = getattr(tried, "metadata", {}).get("render_modes", ())
    _close(tried)
    renders = settings.options.get("render_mode", "ansi") == "ansi" and "ansi" in modes
    return (lambda: make(render_mode="ansi") if renders else make()), renders


class Actions:
    """What an answer may say: `told` says it to the policy."""

    def __init__(self, space: Any, names: Sequence[str]) -> None:
        """Raises `CodeUnusable` for a space of which no text names an element, and for names that are not one each."""
        self._space, self._names = space, [name.casefold() for name in names]
        self._kind = type(space).__name__
        if names and self._kind != "Discrete":
            raise CodeUnusable(f"environment.settings.actions: found names for {shown(space)}; allowed: for Discrete")
        if names and len(names) != space.n:
            raise CodeUnusable(
                f"environment.settings.actions: found {len(names)} names; allowed: {space.n}, one for each of {space}"
            )
        if self._kind == "Discrete":
            last = int(space.start + space.n - 1)
            there = ", ".join(names) if names else f"a number from {int(space.start)} to {last}"
            self.told = f"Answer with an action: {there}."
            named = "|".join(map(re.escape, sorted(self._names, key=len, reverse=True)))
            self._words = re.compile(rf"(?<!\w)(?:{f'{named}|' if named else ''}{_NUMBER})(?!\w)", re.IGNORECASE)
        elif self._kind in ("MultiDiscrete", "MultiBinary", "Box") and len(space.shape) == 1:
            self.told = f"Answer with an action: a list of {space.shape[0]} numbers, such as {_example(space)}."
        elif self._kind == "Text":
            self.told = "Your answer is the action."
        else:
            allowed = "Discrete, Text, and MultiDiscrete, MultiBinary and Box of one dimension"
            raise CodeUnusable(f"environment.settings.id: has actions of {shown(space)}; allowed: {allowed}")

    def read(self, text: str) -> Any:
        """The action that an answer names last; None if it names none."""
        if self._kind == "Text":
            return text if self._space.contains(text) else None
        return self._discrete(text) if self._kind == "Discrete" else self._listed(text)

    def _discrete(self, text: str) -> Any:
        found = self._words.findall(text)
        if not found:
            return None
        if (word := found[-1].casefold()) in self._names:
            return int(self._space.start) + self._names.index(word)
        action = int(word) if re.fullmatch(r"-?\d{1,9}", word) else None
        return action if action is not None and self._space.contains(action) else None

    def _listed(self, text: str) -> Any:
        import numpy

        found = _LIST.findall(text)
        if not found:
            return None
        try:
            action = numpy.asarray(json.loads(found[-1]), dtype=self._space.dtype)
        except (ValueError, TypeError, OverflowError):
            return None
        return action if action.shape == self._space.shape and self._space.contains(action) else None


def highlighted(text: str) -> str:
    """What stands out on a terminal by its colour, in brackets."""
    plain, *coloured = _COLOUR.split(text)
    told, stands_out = [plain], False
    for code, part in zip(coloured[::2], coloured[1::2], strict=True):
        if stands_out != bool(code.strip("0;")):
            stands_out = not stands_out
            told.append("[" if stands_out else "]")
        told.append(part)
    return "".join([*told, "]" if stands_out else ""])


def _example(space: Any) -> str:
    """An element that is the same for every caller."""
    space.seed(0)
    return as_text(space.sample())
