"""The base policy of the examples, made before a run can begin."""

import tempfile
import zlib
from collections.abc import Callable
from enum import Enum
from pathlib import Path

from elastic.compose.plan import RunPlan
from elastic.config import OUTSIDE, ConfigError
from elastic.environments.agent import DemonstratedSettings
from elastic.system.named_code import NamedCode

RECIPE_FILE = "recipe"
"""Beside a base policy that was made here: the name of what it was made from."""


WARMED_UP = "frozenlake"
"""The environment whose demonstrations a base policy can be made from."""
CHAT_RECIPE = "a small chat model with random weights, 1"
"""What is made for agents: it has a tokenizer and a chat template, and has learned nothing."""
_TAKES = "one to three minutes on two idle cores"


class Prepared(Enum):
    """The result of preparing a base policy."""

    MADE = "made"
    THERE = "there"
    OF_OTHER_SETTINGS = "of other settings"


def prepare(
    plan: RunPlan,
    progress: Callable[[int, int, float], None],
    *,
    begins: Callable[[str], None] = lambda takes: None,
    force: bool = False,
) -> Prepared:
    """Make the base policy of the examples, unless it is there: by a short supervised warm-up, or for agents a small
    chat model that has learned nothing. `begins` is told before a warm-up how long it takes.

    Raises `ConfigError` where it cannot be made or written, or the directory holds something else.
    """
    checkpoint, kinds = plan.config.model.checkpoint, {one.config.kind for one in plan.environments}
    keep = _holds_policy(checkpoint) and not force
    driven = plan.driven_outside
    if not driven and kinds != {WARMED_UP}:
        if keep:
            return Prepared.THERE
        found = ", ".join(map(repr, sorted(kinds)))
        raise ConfigError(
            f"environment.name: found {found}, for which no base policy can be made; allowed: {WARMED_UP!r}, "
            f"which has a warm-up, {OUTSIDE!r}, for which a small chat model is made, or a checkpoint of your own in "
            f"model.checkpoint = {str(checkpoint)!r}"
        )

    from elastic.engine.model.checkpoint import CheckpointError

    shown = _demonstrations(plan)
    key, make = _chat_model(shown, progress) if driven else _warmed_up(plan, progress)
    recipe = checkpoint / RECIPE_FILE
    try:
        if keep:
            same = not recipe.exists() or recipe.read_text() == key
            if not driven and same and recipe.exists() and not (checkpoint / "tokenizer.json").exists():
                _write_words(checkpoint)
            return Prepared.THERE if same else Prepared.OF_OTHER_SETTINGS
        checkpoint.parent.mkdir(parents=True, exist_ok=True)
        if shown is not None or not driven:
            begins(_TAKES)
        make(checkpoint)
        recipe.write_text(key)
    except CheckpointError as error:
        raise ConfigError(f"model.checkpoint: {error}") from error
    except OSError as error:
        raise ConfigError(f"model.checkpoint: {checkpoint} cannot be made ({error.strerror})") from error
    return Prepared.MADE


def _warmed_up(plan: RunPlan, progress: Callable[[int, int, float], None]) -> tuple[str, Callable[[Path], None]]:
    """The recipe of a policy that has seen demonstrations, and what makes it in a directory."""
    from elastic.engine.model.config import Qwen3Config
    from elastic.worker.trainer.embedded.warmup import WarmupSettings, cache_key, warm_up

    model = Qwen3Config()
    settings = WarmupSettings.model_validate({"lake": plan.environments[0].settings.model_dump()})

    def make(checkpoint: Path) -> None:
        warm_up(settings, model, checkpoint, progress)
        _write_words(checkpoint)

    return cache_key(settings, model), make


def _write_words(checkpoint: Path) -> None:
    """Have tokens of the policy be read as FrozenLake's words."""
    from elastic.environments.frozenlake import FrozenLake
    from elastic.front.tiny import write_words

    write_words(checkpoint, FrozenLake.vocabulary)


def _demonstrations(plan: RunPlan) -> DemonstratedSettings | None:
    """The settings of the first environment that brings demonstrations."""
    for one in plan.environments:
        if isinstance(one.settings, DemonstratedSettings) and one.settings.demonstrations is not None:
            return one.settings
    return None


def _chat_model(
    shown: DemonstratedSettings | None, progress: Callable[[int, int, float], None]
) -> tuple[str, Callable[[Path], None]]:
    """A small chat model: its recipe, and what makes it in a directory. It has random weights, or has been warmed up on
    what a function demonstrates."""

    def make(checkpoint: Path) -> None:
        import torch

        from elastic.engine.model.checkpoint import model_tensors, write_checkpoint
        from elastic.engine.model.config import Qwen3Config
        from elastic.engine.model.qwen3 import Qwen3
        from elastic.front.tiny import VOCABULARY, write_tokenizer

        model = Qwen3Config(vocab_size=VOCABULARY)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            write_checkpoint(checkpoint, model, model_tensors(Qwen3(model)))
        write_tokenizer(checkpoint)

    def warm_up(checkpoint: Path) -> None:
        from elastic.compose.demonstrations import demonstrated
        from elastic.engine.model.config import Qwen3Config
        from elastic.front.tiny import VOCABULARY, write_tokenizer
        from elastic.worker.trainer.embedded.warmup import WarmupSettings, imitate, sampled_batches

        with tempfile.TemporaryDirectory() as folder:
            make(Path(folder))
            found = demonstrated(code, Path(folder))
        settings, model = WarmupSettings(steps=steps, batch_size=batch), Qwen3Config(vocab_size=VOCABULARY)
        imitate(settings, model, sampled_batches(settings, found), checkpoint, progress)
        write_tokenizer(checkpoint)

    if shown is None or shown.demonstrations is None:
        return CHAT_RECIPE, make
    code, steps, batch = shown.demonstrations, shown.demonstration_steps, shown.demonstration_batch
    place = NamedCode(*code.rsplit(":", 1)).place
    content = Path(place).read_bytes() if place.endswith(".py") else b""
    return f"{CHAT_RECIPE}; {steps} steps of {batch} of {code}, {zlib.crc32(content):08x}", warm_up


def _holds_policy(directory: Path) -> bool:
    """Whether a base policy is there. Raises `ConfigError` where anything else is: it is not ours to write over."""
    try:
        there = (directory / "config.json").is_file()
        occupied = directory.exists() and any(directory.iterdir())
    except OSError as error:
        raise ConfigError(f"model.checkpoint: {directory} cannot be read ({error.strerror})") from error
    if occupied and not there:
        raise ConfigError(
            f"model.checkpoint: {directory} has files but no config.json; allowed: a checkpoint, an empty directory, "
            "or one that does not exist"
        )
    return there
