"""What a door asks of the run behind it, whatever protocol its peer speaks.

A door translates: a body of its peer's becomes a `TokenRequest` or a `WeightsOffer`, what `ServedRun` answers becomes a
body again, and `DoorRefused` an error in the peer's shape. It decides nothing, and keeps nothing between two calls. It
checks who asks, and that a directory which a peer names lies below the roots that it may name; the run and its importer
check the rest.

All calls may be made at once, from the front's event loop. A cancelled call means that its peer has left: turns of the
call are given up, and an offer goes on. While the run is started again a call waits, up to `[front] hold_s`; earlier
calls are not lost.
"""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from enum import StrEnum
from pathlib import Path
from typing import Protocol

import msgspec


class DoorRefused(Exception):
    """A call that was refused; the message says why.

    With `again` a later repetition can help (503, after `retry_after_s`), otherwise it cannot (4xx). `param` is the
    faulty field of the request, or empty. With `missing` nothing has that name (404).
    """

    def __init__(
        self,
        message: str,
        *,
        again: bool = False,
        param: str = "",
        missing: bool = False,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.again, self.param, self.missing = again, param, missing
        self.retry_after_s = retry_after_s


class PauseMode(StrEnum):
    """What becomes of running turns while new ones are held in the queue."""

    KEEP = "keep"
    """They go on."""
    WAIT = "wait"
    """They go on, and are waited for."""
    ABORT = "abort"
    """They end with what they have, for the reason `abort`."""


class TokenRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Continue a prompt of token ids, `choices` times. None stands for what the run does by itself.

    `key` makes two requests one: one that is asked again under its key joins the turns of the first. Without a key only
    a request whose client has vanished is taken up, by one with the same fields. `session` says which requests go well
    together on one worker, and no more; any name will do.
    """

    prompt_ids: Sequence[int]
    model: str = ""
    """The model's name, or an adapter's that was offered; empty for whatever is served."""
    choices: int = 1
    max_tokens: int | None = None
    """None: as many as the context has room for, or the run's limit allows."""
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    session: str = ""
    key: str = ""


class VersionRun(msgspec.Struct, frozen=True, kw_only=True):
    """A stretch of an answer's tokens that was sampled from one version of the weights. `label` is what
    its trainer calls that, empty for the base policy and where it has said nothing."""

    version: int
    tokens: int
    label: str = ""


class TokenChoice(msgspec.Struct, frozen=True, kw_only=True):
    """One continuation. `logprobs` are of the sampled `ids`, in nats, one for each. `text` is what they say, up to a
    stop string. `finish` is `stop`, `length`, or `abort` for one that was ended from outside with what it had, which
    may be nothing; `stopped_by` is the stop string, or the token id, that ended it, where one of the request's has."""

    ids: list[int]
    logprobs: list[float]
    text: str
    finish: str
    runs: tuple[VersionRun, ...] = ()
    stopped_by: str | int | None = None

    @property
    def versions(self) -> list[int]:
        """The version of each token."""
        return [run.version for run in self.runs for _ in range(run.tokens)]


class TokenAnswer(msgspec.Struct, frozen=True, kw_only=True):
    """All choices of a request, in their order. `id` names it; `now` is the version that new turns have."""

    id: str
    choices: list[TokenChoice]
    prompt_tokens: int
    now: VersionRun
    cached_tokens: int = 0


class WeightsOffer(msgspec.Struct, frozen=True, kw_only=True):
    """Serve the weights of this directory from now on. It is the run's own path, below one of its roots.

    `label` is what the trainer calls the version. With an `adapter`'s name the directory is a PEFT adapter to the base.
    `abort_running` ends running turns, for the reason `abort`, before the offer is answered.
    """

    directory: Path
    label: str = ""
    adapter: str = ""
    abort_running: bool = False
    lasting: bool = False
    """Whether the protocol names a new directory each time: its files are never written again, and may be kept by
    links."""


class ServingState(msgspec.Struct, frozen=True, kw_only=True):
    """How the run stands. `now` is the version that new turns have, of no tokens. `adapters` are the names under which
    it was offered, the newest last. `running` turns are at a worker, `waiting` ones are not."""

    now: VersionRun
    paused: bool
    workers: int
    running: int
    waiting: int
    adapters: tuple[str, ...] = ()


class ServedModelFacts(msgspec.Struct, frozen=True, kw_only=True):
    """What does not change while the run lasts. `world_size` is how many ranks a peer may count on: of a run whose
    workers come and go it is one engine's. `dtype` is as in the policy's `config.json`. `turns_max` is how many turns
    may be open at once."""

    name: str
    max_model_len: int
    vocab_size: int
    dtype: str
    created_s: int
    turns_max: int
    world_size: int = 1
    config: Mapping[str, object] = {}
    """The policy's `config.json`."""
    adapts: bool = False
    """Whether versions are adapters to it, else they are whole models."""


class ServedRun(Protocol):
    """The run behind a front's doors. Every call raises `DoorRefused`."""

    @property
    def model(self) -> ServedModelFacts: ...

    async def generate(self, request: TokenRequest, answering: ExitStack) -> TokenAnswer:
        """Sample all choices, whatever becomes of the workers meanwhile.

        `answering` ends once the peer has the whole answer, or with an exception where it has not: until then a request
        that comes again is given the same tokens.
        """
        ...

    async def offer(self, offer: WeightsOffer) -> VersionRun:
        """Have a directory's weights served; returns the version that they are, once every new turn has that or a
        later one.

        Offers follow one another in the order in which they came. The same directory, unchanged, is answered again.
        """
        ...

    async def pause(self, mode: PauseMode) -> None:
        """Hold new turns in the queue. Returns when running turns have ended or go on, as `mode` says. Idempotent."""
        ...

    async def resume(self) -> None:
        """Hold none any more."""
        ...

    async def abort_all(self) -> int:
        """End all turns, running and waiting, with what they have; returns how many there were."""
        ...

    async def status(self) -> ServingState: ...
