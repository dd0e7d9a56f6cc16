"""The contract of a trainer: finished groups in, versions of the weights out, its state on disk in between.

A trainer works on the device thread of its process and never touches an event loop. One process asks it for one thing
at a time. Orders come in the journal's order, each once: `elastic.worker.trainer_host` keeps count of what was given.
Source: docs/design.md, `Trainer`.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, Protocol, runtime_checkable

from pydantic import BaseModel, ConfigDict

from elastic.config import Config, EngineConfig
from elastic.core.types import LogprobCheck
from elastic.protocol import wire
from elastic.system.parking import Switch

if TYPE_CHECKING:
    from torch import Tensor


class PolicyTrainer(Protocol):
    """The learning algorithm, with the policy that it trains. It is `elastic.system.parking.Parkable`.

    A trainer that goes on from a checkpoint and is given the same orders in the same order comes to the same weights:
    what it does depends on nothing else, and on no clock.
    """

    @property
    def version(self) -> int:
        """The number of steps done, which names the weights."""
        ...

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of the last update, also where that was before the checkpoint that was loaded."""
        ...

    @property
    def unusable(self) -> Mapping[str, str]:
        """The groups of the last update that were not trained on, and why. Nothing that comes in ends a step."""
        ...

    def train_group(self, group: wire.TrainGroupFrame) -> None:
        """Take the group. Its gradient may be computed with this order or with a later one of the step.

        Raises `ValueError`, and changes nothing, for a group that is unknown or already here.
        """
        ...

    def skip_group(self, index: int, tokens: int, trajectories: Sequence[wire.TrajectoryData]) -> None:
        """The step does without this group. It is noted and no more: rollouts may have the device.

        Raises `ValueError` as `train_group` does.
        """
        ...

    def take_checks(self) -> list[LogprobCheck]:
        """Return how workers' log-probabilities compare with the trainer's, in what it looked at since the last
        call."""
        ...

    def update(self) -> dict[str, float]:
        """Step to the next version; returns the step's metrics. Raises `ValueError` while groups are missing."""
        ...

    def tensors(self) -> "dict[str, Tensor]":
        """Return what rollouts use, under the names and in the shapes of the base policy's files: in float32 what is
        float32 there, all else in bfloat16.

        They are copies, which stay as they are while training goes on. Nothing where ranks publish what they hold
        (`elastic.worker.publication.PublishesVersions`).
        """
        ...

    def proof(self) -> list[float]:
        """The log-probabilities of `elastic.engine.base.proof_text` with the weights of this version, from its second
        token on. Workers of a version answer it, too, and are believed if it is the same. Empty where they need not."""
        ...

    def save(self, path: Path) -> None:
        """Write all that training goes on from, all or nothing. Raises `ValueError` while a step is under way, and
        `CheckpointError` where it cannot be written."""
        ...

    def load(self, path: Path) -> None:
        """Go on from what was saved. Raises `CheckpointError`, and changes nothing, if it does not fit the model."""
        ...

    def park(self) -> Switch: ...

    def resume(self) -> Switch: ...


class OfferRefused(ValueError):
    """What was offered cannot be served, as the message says; the trainer stands where it stood. `again`: later it may
    be."""

    def __init__(self, message: str, *, again: bool = False) -> None:
        super().__init__(message)
        self.again = again


@runtime_checkable
class TakesOffers(Protocol):
    """A `PolicyTrainer` whose weights somebody else trains."""

    @property
    def source(self) -> str:
        """The offer that its version is of, also after a checkpoint was loaded; empty for the base policy."""
        ...

    def take(self, source: str) -> None:
        """Read what was offered: the next `update` steps to it. `source` is of `elastic.protocol.offers`.

        Raises `OfferRefused`, and changes nothing.
        """
        ...

    def mend(self, path: Path, pull: "Callable[[int], dict[str, Tensor]]") -> None:
        """Write anew what was saved at `path`, whose files are not as they were: with the tensors of its version, which
        `pull` gets from where it was published. Raises `CheckpointError`."""
        ...


class TrainerSettings(BaseModel):
    """What is a kind's own, beside the keys of `[trainer]`; each subclasses it. By default there is nothing."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class StoredPolicy(NamedTuple):
    """What the files of a base policy say of it."""

    vocab_size: int
    """Tokens are below it."""
    parameters: int
    float32: int = 0
    """How many of the parameters travel as float32."""


class TrainerKind(Protocol):
    """What an entry point of the group "elastic.trainers" names: a class that any process can import.

    An orchestrator imports it to check a run's settings, so what the trainer itself needs (torch) is imported by
    `create` and `exported`, and by `check_checkpoint` at most. A kind subclasses it, and need not say again what has a
    body here.
    """

    Settings: ClassVar[type[TrainerSettings]]
    ranks: ClassVar[bool] = False
    """Whether `trainer.gpus` may be more than one: then its device does not generate."""
    generates: ClassVar[bool] = True
    """Whether its device does, with one rank."""
    in_directories: ClassVar[bool] = False
    """Whether its checkpoints are directories with one rank, too."""

    @staticmethod
    def seeding_engines(config: Config, settings: Any) -> int:
        """N_resv (RLBoost §4.1): how many engines generate on its devices, for which it is parked meanwhile; they pull
        what it publishes. 0 where it makes way for none: then an engine shares one device with it.

        Raises `ConfigError` for settings with which they cannot.
        """
        return 0

    @staticmethod
    def unserved(config: Config, settings: Any, engine: EngineConfig, own: Any) -> str:
        """Why an engine with its `own` settings cannot serve what is trained; empty where it can."""
        return ""

    @staticmethod
    def examine(config: Config, settings: Any) -> StoredPolicy:
        """Read how the base policy is stored, before a process starts. `settings` are of `Settings`.

        Raises `ConfigError`, which names the key, what was found and what is allowed, for a policy that this kind
        cannot train.
        """
        ...

    @staticmethod
    def check_checkpoint(config: Config, settings: Any, checkpoint: Path) -> None:
        """Look at a trainer's checkpoint before a process goes on from it. Takes seconds.

        Raises `elastic.engine.model.stored.CheckpointError` for one that is another model's, or damaged as far as that
        can be seen.
        """
        ...

    @staticmethod
    def create(config: Config, settings: Any, device: str) -> PolicyTrainer:
        """A trainer of the run's base policy on `device` (`auto`, `cpu` or `cuda`). Blocks.

        Raises `ValueError`, or a subclass, that names what does not fit, and what would mend it.
        """
        ...

    @staticmethod
    def exported(config: Config, settings: Any, checkpoint: Path) -> "Iterator[tuple[str, Tensor]]":
        """Yield the policy of a trainer's checkpoint, under the names and in the shapes of the base policy's files.

        Raises `elastic.engine.model.stored.CheckpointError`.
        """
        ...

    @staticmethod
    def exported_adapter(config: Config, settings: Any, checkpoint: Path) -> "dict[str, Tensor]":
        """The adapter of a trainer's checkpoint under the names of peft's files, for a scale of 1; empty where whole
        models are trained. Raises `elastic.engine.model.stored.CheckpointError`."""
        return {}


SUFFIXES = (".safetensors", ".shards")
"""The suffixes of checkpoints that are files, and of those that are directories."""
UNFINISHED_PREFIX = ".checkpoint-"
"""The suffix of a directory that is not a checkpoint yet, or no longer: the next writer removes it."""


def saved(directory: Path) -> list[Path]:
    """The checkpoints in a directory, oldest first."""
    return sorted((path for suffix in SUFFIXES for path in directory.glob(f"[!.]*{suffix}")), key=lambda one: one.stem)


def remove_saved(path: Path) -> None:
    """Have no checkpoint at `path`, nor half of one; of a link only the link goes. Raises `OSError`."""
    if path.is_dir() and not path.is_symlink():
        gone = path.with_name(f"{UNFINISHED_PREFIX}former-{path.name}")
        shutil.rmtree(gone, ignore_errors=True)
        path.replace(gone)
        shutil.rmtree(gone)
    else:
        path.unlink(missing_ok=True)


def checkpoint_path(directory: Path, version: int, *, in_directories: bool) -> Path:
    """Where a trainer saves this version."""
    return directory / f"{version:08d}{SUFFIXES[in_directories]}"
