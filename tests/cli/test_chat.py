"""`elastic chat` of runs that are over, whose checkpoint an engine here takes up, and what it refuses."""

import json
import os
import pty
import select
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks._shapes import write_chat_policy
from elastic.compose.chat import ChatFailed, ChatSettings, SpareCreditAnswers
from elastic.compose.runs import claimed, load_run_config, new_run_dir
from elastic.config import JournalConfig, load_config
from elastic.protocol.proxies import HttpSettingsError
from elastic.runtime.journal import RunDirectory
from elastic.worker.trainer import checkpoint, create_trainer
from elastic.worker.trainer.checkpoint import MASTER

VERSION = 3


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat_policy(tmp_path_factory.mktemp("policy") / "tiny")


def made(directory: Path, policy: Path, environment: str = "outside", trainer: str = "embedded") -> RunDirectory:
    """A run that has a configuration, and nothing else."""
    path = directory / "run.toml"
    path.write_text(
        f'[run]\nname = "small"\ndirectory = "{directory}/runs"\n[model]\ncheckpoint = "{policy}"\n'
        f'[environment]\nname = "{environment}"\n[engine]\nmax_context_tokens = 512\n[trainer]\nkind = "{trainer}"\n'
    )
    return RunDirectory(new_run_dir(load_config(path)))


@pytest.fixture
def over(tmp_path: Path, policy: Path) -> RunDirectory:
    """A run that has ended with a checkpoint."""
    from elastic.engine.model.checkpoint import read_config, read_tensors

    run = made(tmp_path, policy)
    weights = {f"{MASTER}{name}": tensor.float() for name, tensor in read_tensors(policy, read_config(policy)).items()}
    path = run.path / "checkpoints" / f"{VERSION:08d}.safetensors"
    checkpoint.write(path, weights, checkpoint.Counters(version=VERSION, updates=VERSION))
    return run


def test_a_run_that_is_over_answers_by_an_engine_here(elastic, over: RunDirectory) -> None:
    told = elastic("chat", over.path, "-m", "hello", "--json", "--max-tokens", 7, "--system", "Be short.")
    assert told.code == 0, told.err
    answer = json.loads(told.out)
    assert (answer["run"], answer["version"], answer["trained"]) == (over.name, VERSION, False)
    assert answer["message"]["role"] == "assistant"
    assert 0 < answer["usage"]["completion_tokens"] <= 7 < answer["usage"]["prompt_tokens"]
    assert answer["finish_reason"] in ("stop", "length")
    for words in (f"run {over.name} is over", "starting the engine (torch)", f"loading the weights of step {VERSION}"):
        assert words in told.err


@pytest.mark.nightly
@pytest.mark.slow
def test_a_pipe_has_one_message(over: RunDirectory) -> None:
    """The command as a process with a real pipe, and an engine that loads a checkpoint."""
    command = [sys.executable, "-m", "elastic.cli", "chat", str(over.path), "--max-tokens", "9"]
    ended = subprocess.run(command, input="one\ntwo\n", capture_output=True, encoding="utf-8", check=False, timeout=120)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip()


class Terminal:
    """`elastic chat` at a terminal."""

    def __init__(self, run: RunDirectory) -> None:
        command = [sys.executable, "-m", "elastic.cli", "chat", str(run.path), "--max-tokens", "400"]
        self.near, far = pty.openpty()
        self.process = subprocess.Popen(
            command, stdin=far, stdout=far, stderr=far, start_new_session=True, preexec_fn=_controlled
        )
        os.close(far)
        self.seen = ""

    def until(self, words: str) -> None:
        """Read until these are shown, behind what was read before."""
        shown = ""
        while words not in shown:
            ready, _, _ = select.select([self.near], [], [], 120)
            assert ready, f"{words!r} does not come after {self.seen!r}"
            shown += os.read(self.near, 4096).decode(errors="replace")
        self.seen += shown

    def type(self, text: str) -> None:
        os.write(self.near, text.encode())


def _controlled() -> None:
    """Have the terminal on standard input send its signals here."""
    import fcntl
    import termios

    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


@pytest.mark.nightly
def test_a_terminal_stops_answers_and_ends(over: RunDirectory) -> None:
    terminal = Terminal(over)
    try:
        terminal.until("> ")
        terminal.type("hello\n")
        terminal.until("hello\r\n")
        terminal.type("\x03\n")  # A line, too: a signal between the prompt and its reading is seen with that.
        terminal.until("> ")
        terminal.type("/new\n")
        terminal.until("> ")
        terminal.type("/exit\n")
        assert terminal.process.wait(60) == 0
    finally:
        terminal.process.kill()
        terminal.process.wait()
        os.close(terminal.near)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["-m", " "], ["--message: the message is empty"]),
        (["-m", "caf\udce9"], ["no UTF-8"]),
        (["-m", "x", "--temperature", "0"], ["--temperature: found 0", "from 0.01 to 2"]),
        (["-m", "x", "--temperature", "nan"], ["--temperature: found nan"]),
        (["-m", "x", "--max-tokens", "0"], ["--max-tokens"]),
        (["-m", "x", "--set", "engine.kind=nosuch"], ["unknown engine 'nosuch'"]),
        (["-m", "x " * 600], ["the context holds 512"]),
    ],
)
def test_what_cannot_be_answered_is_refused(elastic, refused, over: RunDirectory, arguments, words) -> None:
    refused(elastic("chat", over.path, *arguments), *words)


def test_runs_that_cannot_chat_are_refused(elastic, refused, tmp_path: Path, policy: Path, checkpoint: Path) -> None:
    runs = ["--directory", tmp_path / "runs"]
    refused(elastic("chat", "nosuch", *runs, "-m", "x"), "no run 'nosuch'")
    run = made(tmp_path, policy)
    refused(elastic("chat", run.name, *runs, "-m", "x"), f"run {run.name} has no checkpoint", "every 5 steps")
    speechless = made(tmp_path, checkpoint, "frozenlake")
    (speechless.path / "checkpoints").mkdir()
    (speechless.path / "checkpoints" / "00000001.safetensors").write_bytes(b"none")
    refused(elastic("chat", speechless.name, *runs, "-m", "x"), "tokenizer")
    prompted = shutil.copytree(policy, tmp_path / "prompted")
    (prompted / "chat_template.jinja").unlink()
    without = made(tmp_path, prompted)
    (without.path / "checkpoints").mkdir()
    (without.path / "checkpoints" / "00000001.safetensors").write_bytes(b"none")
    refused(elastic("chat", without.name, *runs, "-m", "x"), f"run {without.name}: this model has no chat template")
    (run.path / "checkpoints").mkdir()
    (run.path / "checkpoints" / "00000001.safetensors").write_bytes(b"none")
    refused(elastic("chat", run.name, *runs, "-m", "x"), "00000001.safetensors: cannot be read")


def test_a_run_that_goes_on_without_fronts_says_so(elastic, refused, tmp_path: Path, checkpoint: Path) -> None:
    run = made(tmp_path, checkpoint, "frozenlake")
    run.begin_journal(JournalConfig()).close()  # type: ignore[call-arg]
    with claimed(run.path):
        refused(elastic("chat", run.path, "-m", "x"), "has no fronts now", "once it is over")
        refused(elastic("chat", run.path, "-m", "x", "--set", "engine.kind=torch"), "--set", "goes on")
    refused(elastic("agents", "key", run.path, "--viewer", "--trajectory", "0-0-0"), "--trajectory, --viewer: found 2")
    refused(elastic("agents", "key", run.path, "--control"), "is for one of `elastic serve-rollouts`")


def test_a_run_that_says_nothing_any_more_is_gone() -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute:
        url = f"http://127.0.0.1:{mute.getsockname()[1]}/v1"
        with (
            SpareCreditAnswers(url, "key", silence_s=0.1) as answers,
            pytest.raises(ChatFailed, match=r"the run is gone.*timed out"),
        ):
            list(answers.answer([{"role": "user", "content": "hello"}], ChatSettings()))


def test_a_hosted_run_is_trusted_as_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SSL_CERT_FILE", "/nosuch/authority.pem")
    with pytest.raises(HttpSettingsError, match="SSL_CERT_FILE"):
        SpareCreditAnswers("https://far.example/v1", "key")


@pytest.mark.trainers
@pytest.mark.alone
def test_a_policy_that_transformers_trained_answers(elastic, tmp_path: Path, policy: Path) -> None:
    pytest.importorskip("transformers")
    run = made(tmp_path, policy, trainer="transformers")
    trainer = create_trainer(load_run_config(run.path))
    trainer.save(run.path / "checkpoints" / "00000000.safetensors")
    told = elastic("chat", run.path, "-m", "hello", "--json", "--max-tokens", 7)
    assert told.code == 0, told.err
    assert json.loads(told.out)["usage"]["completion_tokens"] > 0
