"""A live run that others train: its importer, workers, fronts and orchestrator are killed, and its trainer goes on.

`make test-clients` runs these.
"""

import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch

from benchmarks import _served
from elastic.engine.model.checkpoint import load_model

pytestmark = [pytest.mark.clients, pytest.mark.alone]

PROMPT = [5, 6, 7, 8]
WITHIN_NATS = 0.02
"""Log-probabilities of the embedded engine beside those of the same model in one forward pass."""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[Any]:
    with _served.DoorsRun(tmp_path, "run.orchestrator_timeout_s=120") as run:
        yield run


@pytest.fixture
def client(run: Any) -> Iterator[httpx.Client]:
    with _served.client(run) as client:
        yield client


def repeated(ask: Callable[[], httpx.Response]) -> httpx.Response:
    """As peers do: once more after a 5xx, or where the connection breaks."""
    while True:
        try:
            answer = ask()
        except httpx.TransportError:
            continue
        if answer.status_code < 500:
            return answer


def completed(client: httpx.Client, tokens: int = 16, **body: Any) -> dict[str, Any]:
    asked = {"model": "tiny", "prompt": PROMPT, "max_tokens": tokens, "n": 1, "return_token_ids": True, "logprobs": 0}
    answer = repeated(lambda: client.post("/v1/completions", json=asked | {"ignore_eos": True} | body))
    assert answer.status_code == 200, answer.text
    (choice,) = answer.json()["choices"]
    return choice


def updated(client: httpx.Client, directory: Path) -> None:
    """As prime-rl does: it pauses, names the directory and goes on."""
    asks = (
        ("/pause?mode=keep&clear_cache=false", {}),
        ("/update_weights", {"weight_dir": str(directory)}),
        ("/resume", {}),
    )
    for path, body in asks:
        answer = repeated(lambda path=path, body=body: client.post(path, json=body))
        assert answer.status_code == 200, answer.text


def is_of(directory: Path, base: Path, choice: dict[str, Any]) -> bool:
    """Whether a model with the directory's weights gives the answer its log-probabilities."""
    model = load_model(base, torch.device("cpu"))
    from safetensors.torch import load_file

    model.load_state_dict(load_file(directory / "model.safetensors"), strict=False)
    ids = choice["token_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + ids])).float()[0, len(PROMPT) - 1 : -1]
    expected = torch.log_softmax(logits, -1)[torch.arange(len(ids)), torch.tensor(ids)]
    found = torch.tensor(choice["logprobs"]["token_logprobs"])
    return bool((expected - found).abs().max() < WITHIN_NATS)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def test_three_updates_while_a_worker_and_the_importer_are_killed(run: Any, client: httpx.Client) -> None:
    assert completed(client)["finish_reason"] == "length"
    for version in (1, 2, 3):
        directory = _served.write_version(run, version)
        if version == 2:
            run.kill_processes("worker", run.workers())
        if version == 3:
            run.kill_processes("importer", run.importers())
        updated(client, directory)
        choice = completed(client, tokens=24)
        assert len(choice["token_ids"]) == 24
        assert is_of(directory, run.base, choice)
    assert same(run.pulled(3), _served.stepped(run.base, 3))


def test_answers_go_on_over_the_deaths_of_their_worker_front_and_orchestrator(run: Any, client: httpx.Client) -> None:
    completed(client)
    directory = _served.write_version(run, 1)
    updated(client, directory)

    def while_under_way(kill: Callable[[], None]) -> dict[str, Any]:
        with ThreadPoolExecutor(1) as threads:
            asked: Future[dict[str, Any]] = threads.submit(completed, client, 200)
            run.until("a turn under way", lambda: under_way(client))
            kill()
            return asked.result(_served.WAIT_S)

    def resumed() -> None:
        run.kill("orchestrator")
        run.resume()

    for kill in (
        lambda: run.kill_processes("worker", run.workers()),
        lambda: run.kill_processes("front", run.fronts()[:1]),
        resumed,
    ):
        choice = while_under_way(kill)
        assert (len(choice["token_ids"]), choice["finish_reason"]) == (200, "length")
        assert is_of(directory, run.base, choice)
    updated(client, _served.write_version(run, 2))
    assert same(run.pulled(2), _served.stepped(run.base, 2))


def under_way(client: httpx.Client) -> bool:
    told = repeated(lambda: client.get("/v1/loads?include=core")).json()
    return any(load.get("num_running_reqs", 0) for load in told.get("loads", []))


def test_a_pause_that_aborts_and_what_waits_behind_it(run: Any, client: httpx.Client) -> None:
    completed(client)
    with ThreadPoolExecutor(2) as threads:
        long = threads.submit(completed, client, 1500)
        run.until("a turn under way", lambda: under_way(client))
        assert client.post("/pause?mode=abort").status_code == 200
        assert long.result(30)["finish_reason"] == "abort"
        held = threads.submit(completed, client, 4)
        run.until("a turn that waits", lambda: waiting(client))
        assert not held.done()
        assert client.post("/resume").status_code == 200
        assert held.result(30)["finish_reason"] == "length"


def waiting(client: httpx.Client) -> bool:
    told = client.get("/v1/loads?include=core").json()
    return any(load.get("num_waiting_reqs", 0) for load in told.get("loads", []))


def test_what_cannot_be_served_is_told_and_what_was_goes_on(run: Any, client: httpx.Client) -> None:
    completed(client)
    (run.root / "empty").mkdir()
    for named, said in (("missing", "is not there"), ("empty", "found neither"), ("../tiny", "below a root")):
        began_s = time.monotonic()
        answer = client.post("/update_weights", json={"weight_dir": str(run.root / named)})
        assert answer.status_code == 400
        assert said in answer.json()["error"]["message"]
        assert time.monotonic() - began_s < 20
    assert completed(client)["finish_reason"] == "length"
