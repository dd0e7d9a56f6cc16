"""`elastic chat`: talk with the policy of a run, while it goes on or once it is over."""

import logging
import sys
from collections.abc import Iterator
from http import HTTPStatus
from pathlib import Path
from typing import Annotated, Any

import typer

from elastic.cli.account import run_on_disk
from elastic.cli.options import AnyRunName, AsJson, Overrides, Remote, RunsDirectory
from elastic.cli.output import EXIT_BAD_INPUT, EXIT_FAILED, bad_input, emit, say
from elastic.cli.remote import is_hosted, latest, server
from elastic.compose.chat import (
    Answerer,
    ChatFailed,
    ChatPiece,
    ChatRefused,
    ChatSettings,
    Message,
    SpareCreditAnswers,
    checkpoint_answers,
    live_answers,
)
from elastic.compose.runs import is_claimed, load_run_config
from elastic.protocol.api import ENDED
from elastic.protocol.api_client import ApiError
from elastic.protocol.run_secrets import RunSecrets
from elastic.runtime.agents.limits import TEMPERATURE_MAX, TEMPERATURE_MIN
from elastic.runtime.journal import AGENTS, RunDirectory
from elastic.system.logs import STANDARD_ERROR, log_to

EXIT_WORDS = ("/exit", "/quit")
NO_TEXT = "has bytes that are no UTF-8"
FRESH_WORD = "/new"
PROMPT = "> "
MESSAGE_CHARS_MAX = 1_000_000
_CONTROLS = dict.fromkeys((*range(9), *range(11, 32), *range(127, 160)), "\ufffd")
"""Characters that would command a terminal, and what is shown for them; lines and tabs are as they are."""


def chat(
    name: AnyRunName = "latest",
    message: Annotated[
        str | None, typer.Option("--message", "-m", metavar="TEXT", help="Say this, print the answer and end.")
    ] = None,
    system: Annotated[str, typer.Option(metavar="TEXT", help="The system message, before all others.")] = "",
    max_tokens: Annotated[int | None, typer.Option(min=1, help="Most tokens of an answer.")] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help=f"Of sampling, from {TEMPERATURE_MIN:g} to {TEMPERATURE_MAX:g}; the run's unless given."),
    ] = None,
    overrides: Overrides = None,
    remote: Remote = False,
    as_json: AsJson = False,
    directory: RunsDirectory = Path("runs"),
) -> int:
    """Talk with a run's policy: while the run goes on by its spare credit, later by an engine here.

    A run that goes on answers with capacity that its rollouts leave, never before them, and trains nothing of it. Once
    it is over, an engine starts here with its last checkpoint, and ends with this command. Ctrl-C stops an answer,
    /new begins another chat, /exit or Ctrl-D ends. What comes by a pipe is one message.

    Example: elastic chat latest -m "Write vowels."
    """
    if temperature is not None and not TEMPERATURE_MIN <= temperature <= TEMPERATURE_MAX:
        bad_input(f"--temperature: found {temperature:g}; allowed: from {TEMPERATURE_MIN:g} to {TEMPERATURE_MAX:g}")
    log_to(STANDARD_ERROR, logging.WARNING)
    said = _given(message)
    if said is None and as_json:
        bad_input("--json: prints one answer; give the message with --message, or by a pipe")
    settings = ChatSettings(max_tokens, temperature)
    history: list[Message] = [{"role": "system", "content": system}] if system else []
    named, answerer = _answerer(name, overrides or [], remote=remote, directory=directory)
    with answerer:
        if said is None:
            return _talk(answerer, history, settings)
        return _say_once(named, answerer, [*history, _of_user(said)], settings, as_json=as_json)


def _given(message: str | None) -> str | None:
    """The one message that was given; None where somebody is at a terminal to say more."""
    if message is None and sys.stdin.isatty():
        return None
    said = sys.stdin.read(MESSAGE_CHARS_MAX + 1) if message is None else message
    if not _is_text(said):
        bad_input(f"the message {NO_TEXT}")
    if not said.strip():
        where = "--message" if message is not None else "standard input"
        bad_input(f"{where}: the message is empty")
    if len(said) > MESSAGE_CHARS_MAX:
        bad_input(f"the message has more than {MESSAGE_CHARS_MAX} characters")
    return said if message is not None else said.removesuffix("\n")


def _is_text(said: str) -> bool:
    """Whether it can be sent: bytes that are no UTF-8 were read as halves of surrogates."""
    return not any("\ud800" <= letter <= "\udfff" for letter in said)


def _answerer(name: str, overrides: list[str], *, remote: bool, directory: Path) -> tuple[str, Answerer]:
    """Return what answers for the run, and the run's name."""
    if remote or is_hosted(name):
        if overrides:
            bad_input("--set is for runs on disk that are over: their engine starts here")
        return _hosted(name)
    run = run_on_disk(directory, name)
    if not is_claimed(run.path):
        config = load_run_config(run.path, overrides)
        say(f"run {run.name} is over")
        return run.name, checkpoint_answers(config, run.path, say)
    if overrides:
        bad_input(f"--set: run {run.name} goes on, and answers as it is; an engine starts here once it is over")
    return run.name, _live(run)


def _live(run: RunDirectory) -> SpareCreditAnswers:
    from elastic.cli.agents import base_url

    with run.newest_journal() as journal:
        served = AGENTS in journal.meta()
    if not served:
        bad_input(f"{_without_fronts(run.name)}; once it is over, an engine here answers with its last checkpoint")
    say(f"run {run.name} goes on: its spare credit answers, and nothing of it is trained")
    return live_answers(load_run_config(run.path), run.path, base_url(run), RunSecrets.of(run.path).viewer_key())


def _without_fronts(name: str) -> str:
    return f'run {name} has no fronts now, which runs have while agents drive them (environment.name = "outside")'


def _hosted(name: str) -> tuple[str, SpareCreditAnswers]:
    with server() as client:
        run = client.run(latest(client, name))
        if run.phase in ENDED:
            bad_input(
                f"run {run.id} is over, and its checkpoints are on its server: an engine starts where these are, by "
                "`elastic chat` there"
            )
        try:
            hosted = client.agents(run.id)
        except ApiError as error:
            if error.problem.status != HTTPStatus.NOT_FOUND:
                raise
            bad_input(_without_fronts(run.id))
    say(f"run {run.id} goes on: its spare credit answers, and nothing of it is trained")
    return run.id, SpareCreditAnswers(hosted.base_url, hosted.viewer_key)


def _say_once(named: str, answerer: Answerer, messages: list[Message], settings: ChatSettings, *, as_json: bool) -> int:
    shown = _Shown(quiet=as_json)
    try:
        last = shown.all_of(answerer.answer(messages, settings))
    except ChatFailed as error:
        shown.end_line()
        return _failed(error)
    shown.end_line()
    if as_json:
        message: dict[str, Any] = {"role": "assistant", "content": shown.content}
        if shown.reasoning:
            message["reasoning"] = shown.reasoning
        usage = {"prompt_tokens": last.prompt_tokens, "completion_tokens": last.tokens}
        emit(
            {
                "run": named,
                "version": answerer.version,
                "trained": False,
                "message": message,
                "finish_reason": last.finish,
                "usage": usage,
            }
        )
    return 0


def _talk(answerer: Answerer, history: list[Message], settings: ChatSettings) -> int:
    """Until the user ends it. An answer that was stopped stays in the chat as far as it came."""
    begun = list(history)
    while True:
        try:
            said = input(PROMPT)
        except EOFError:
            typer.echo()
            return 0
        except KeyboardInterrupt:
            typer.echo()
            continue
        if said.strip() in EXIT_WORDS:
            return 0
        if said.strip() == FRESH_WORD:
            history = list(begun)
            continue
        if not said.strip():
            continue
        if not _is_text(said):
            typer.echo(f"that {NO_TEXT}", err=True)
            continue
        history.append(_of_user(said))
        shown = _Shown(quiet=False)
        try:
            shown.all_of(answerer.answer(history, settings))
        except KeyboardInterrupt:
            shown.end_line()
        except ChatFailed as error:
            shown.end_line()
            _failed(error)
            history.pop()
            continue
        shown.end_line()
        history.append({"role": "assistant", "content": shown.content})


class _Shown:
    """What is shown of an answer on standard output, its reasoning on standard error."""

    def __init__(self, *, quiet: bool) -> None:
        self.content = self.reasoning = ""
        self._quiet = quiet
        self._plain = sys.stdout.isatty()
        """What a policy says commands no terminal."""

    def all_of(self, pieces: Iterator[ChatPiece]) -> ChatPiece:
        """Show an answer as it comes; returns its last piece."""
        last = ChatPiece()
        for last in pieces:
            self.content += last.content
            self.reasoning += last.reasoning
            if not self._quiet:
                if last.reasoning:
                    typer.secho(last.reasoning.translate(_CONTROLS), nl=False, err=True, dim=True)
                typer.echo(last.content.translate(_CONTROLS) if self._plain else last.content, nl=False)
        return last

    def end_line(self) -> None:
        if not self._quiet and self.content and not self.content.endswith("\n"):
            typer.echo()


def _of_user(said: str) -> Message:
    return {"role": "user", "content": said}


def _failed(error: ChatFailed) -> int:
    say(f"error: {error}")
    return EXIT_BAD_INPUT if isinstance(error, ChatRefused) else EXIT_FAILED
