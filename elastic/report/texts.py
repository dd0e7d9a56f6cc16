"""What trajectories say, by the tokenizer of their checkpoint, within bounds.

A checkpoint's files are data: no code of them runs. But they may have been made to be slow, or
to take much memory, so a server has another process do this.
"""

import functools
import stat
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import msgspec

from elastic.front.rendering.templates import RendererError
from elastic.front.rendering.tokenizer import Tokenizer, TokenizerError
from elastic.front.rendering.transcripts import SpokenMessage, Transcriber
from elastic.protocol.api import HostedBranch, HostedCall, HostedContext, HostedMessage, HostedTrajectoryDetail
from elastic.report.bounds import bounded, cut, whole
from elastic.report.history import config_of, history_of
from elastic.report.samples import Chosen, choose
from elastic.report.trajectories import NoSuchTrajectory, spans_of
from elastic.runtime.journal import JournalError, StoredRun
from elastic.system.plain_values import told

DECODED_CHARACTERS_MAX = 4 * 2**20
"""The most characters of the texts of one trajectory, over all of its contexts; later text is left out."""
MESSAGES_BYTES_MAX = 2**20
"""The most bytes of the messages of one context, and of its text."""
MESSAGES_MAX = 4096
NO_TOKENS = "its tokens are kept no longer"
_LIBRARY_PANICS = "PanicException"

ContextT = TypeVar("ContextT", bound=HostedContext)
T = TypeVar("T")


class Reading(NamedTuple):
    """Where a run's tokenizer is, and by which names its fronts read answers: those of `[front]`."""

    checkpoint: Path
    renderer: str = "auto"
    tool_parser: str = ""
    reasoning_parser: str = ""

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> "Reading":
        """By a run's configuration, as far as that is known."""
        front = config.get("front") or {}
        names = (front.get("renderer", "auto"), front.get("tool_parser", ""), front.get("reasoning_parser", ""))
        return cls(Path(config.get("model", {}).get("checkpoint", "")), *names)


def with_texts(details: Sequence[HostedTrajectoryDetail], reading: Reading) -> list[HostedTrajectoryDetail]:
    """The trajectories with their texts and messages; where they have none, with why."""
    return by_tokenizer(
        reading,
        lambda transcriber: [_told(detail, transcriber) for detail in details],
        lambda why: without_texts(details, why),
    )


def by_tokenizer(reading: Reading, read: Callable[[Transcriber], T], without: Callable[[str], T]) -> T:
    """Return what `read` makes of tokens; where they cannot become text, what `without` makes of why. Raises what
    reading journals raises."""
    try:
        return read(_transcriber(reading, _stamp(reading.checkpoint)))
    except (TokenizerError, RendererError) as error:
        return without(str(error).replace(str(reading.checkpoint), reading.checkpoint.name))
    except (JournalError, NoSuchTrajectory):
        raise
    except BaseException as error:  # What the library raises where it fails is no `Exception`.
        of_tokenizer = isinstance(error, Exception) or type(error).__name__ == _LIBRARY_PANICS
        if not of_tokenizer or isinstance(error, MemoryError):
            raise
        return without(f"the tokenizer of {reading.checkpoint.name} cannot be used: {told(error)}")


def told_samples(run: StoredRun) -> Chosen | None:
    """The trajectories that a run's report shows, with their texts. Raises `JournalError`."""
    with history_of(run) as history:
        chosen, meta = choose(history), history.segments[-1].meta()
    if chosen is None:
        return None
    reading = Reading.of(config_of(meta) or {})
    return msgspec.structs.replace(chosen, details=with_texts(chosen.details, reading))


def without_texts(details: Sequence[HostedTrajectoryDetail], why: str) -> list[HostedTrajectoryDetail]:
    return [detail.model_copy(update={"no_text": why}) for detail in details]


def _stamp(checkpoint: Path) -> int:
    path = checkpoint / "tokenizer.json"
    try:
        found = path.stat()
    except OSError as error:
        raise TokenizerError(f"{path}: cannot be read ({error.strerror})") from error
    if not stat.S_ISREG(found.st_mode):
        raise TokenizerError(f"{path}: is no file")
    return found.st_mtime_ns


@functools.lru_cache(maxsize=2)
def _transcriber(reading: Reading, stamp: int) -> Transcriber:
    return Transcriber(Tokenizer(reading.checkpoint), reading.renderer, reading.tool_parser, reading.reasoning_parser)


def _told(detail: HostedTrajectoryDetail, transcriber: Transcriber) -> HostedTrajectoryDetail:
    if not detail.token_ids:
        return detail.model_copy(update={"no_text": NO_TOKENS if detail.policy_tokens else ""})
    first = _context(detail, transcriber, DECODED_CHARACTERS_MAX)
    left, branches = DECODED_CHARACTERS_MAX - _characters(first), list[HostedBranch]()
    for branch in detail.branches:
        branches.append(_context(branch, transcriber, left))
        left -= _characters(branches[-1])
    return first.model_copy(update={"branches": branches})


def _characters(context: HostedContext) -> int:
    return sum(map(len, context.pieces or ()))


def _context(context: ContextT, transcriber: Transcriber, most_characters: int) -> ContextT:
    pieces = list(transcriber.pieces(context.token_ids, most_characters))
    tokens = len(pieces)
    trained, token_ids = context.trained[:tokens], context.token_ids[:tokens]
    found = transcriber.messages(token_ids, spans_of(trained))
    messages = [_message(one) for one in found[:MESSAGES_MAX]]
    return context.model_copy(
        update={
            "token_ids": token_ids,
            "trained": trained,
            "logprobs": context.logprobs[:tokens],
            "versions": context.versions[:tokens],
            "left_out_tokens": context.left_out_tokens + len(context.token_ids) - tokens,
            "text": cut("".join(pieces), MESSAGES_BYTES_MAX),
            "pieces": pieces,
            "messages": bounded(messages, MESSAGES_BYTES_MAX),
            "left_out_messages": len(found) - len(messages),
        }
    )


def _message(one: SpokenMessage) -> HostedMessage:
    return HostedMessage(
        role=whole(one.role),
        content=whole(one.said.content),
        reasoning=whole(one.said.reasoning),
        tool_calls=[HostedCall(name=whole(call.name), arguments=whole(call.arguments)) for call in one.said.tool_calls],
        by_policy=one.by_policy,
        start=one.start,
        tokens=one.tokens,
    )
