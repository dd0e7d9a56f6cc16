"""Submissions of whoever, however large: checked within bounds, beside the server; errors tell nothing of files."""

import gzip
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.config import TrainerConfig
from elastic.protocol.api import AccessRole
from elastic.protocol.api import Submission as Body
from elastic.server.intake import checking, submissions
from elastic.server.problems import DETAIL_CHARACTERS, ERROR_CHARACTERS, ERRORS_MAX, ApiProblem
from tests.server.conftest import Site, Submission
from traces.errors import UNTRUSTED_BYTES, TraceError, untrusted
from traces.spot import read_spot_trace

CANARY = "CANARY=8f1e"
ANSWER_BYTES_MAX = 2 * ERRORS_MAX * ERROR_CHARACTERS + 2 * DETAIL_CHARACTERS


def dry(site: Site, body: dict[str, Any]) -> Any:
    answer = site.member(AccessRole.RUNNER).post("/v1/runs/dry-run", json=body)
    assert len(answer.content) < ANSWER_BYTES_MAX
    return answer


@pytest.mark.parametrize(("section", "key"), [("spot", "trace"), ("serving", "load.trace"), ("spot", "kind")])
@pytest.mark.parametrize("name", [".env", "Makefile", "./.env", "sub/.env"])
def test_the_servers_own_directory_is_no_place_to_name(
    shared_site: Site,
    submission: Submission,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    section: str,
    key: str,
    name: str,
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / name).write_text(CANARY)
    monkeypatch.chdir(tmp_path)
    body = submission(providers=[section])
    table = body["config"]["providers"].setdefault(section, {})
    for part in key.split(".")[:-1]:
        table = table.setdefault(part, {})
    table[key.rpartition(".")[2]] = name
    answer = dry(shared_site, body)
    assert answer.status_code == 400, answer.text
    assert CANARY.split("=")[0] not in answer.text


def _stored(site: Site, name: str, content: bytes) -> None:
    path = site.settings.storage(site.projects["ours"]) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)


@pytest.mark.parametrize(
    "text", [CANARY, f"time_s,event,instance_id\n0,{CANARY},a\n", f"time_s,event,instance_id\n{CANARY},add,a\n"]
)
def test_errors_repeat_nothing_of_a_file(shared_site: Site, submission: Submission, text: str) -> None:
    _stored(shared_site, "market.csv", text.encode())
    body = submission()
    body["config"]["providers"]["spot"]["trace"] = "market.csv"
    answer = dry(shared_site, body)
    assert answer.status_code == 400
    assert "market.csv" in answer.text
    assert CANARY not in answer.text
    with pytest.raises(TraceError, match=CANARY):  # Whose file it is may read it.
        read_spot_trace(shared_site.settings.storage(shared_site.projects["ours"]) / "market.csv")


@pytest.mark.parametrize("line", ["0,add,a\n", "\n", "x" * 4_000_000], ids=["lines", "empty lines", "one line"])
def test_what_unpacks_to_much_is_not_read(tmp_path: Path, line: str) -> None:
    path = tmp_path / "bomb.csv.gz"
    with gzip.open(path, "wt", compresslevel=1) as file:
        file.write("time_s,event,instance_id\n")
        piece = line * max(1, 2**20 // len(line))
        for _ in range(-(-UNTRUSTED_BYTES // len(piece)) if len(line) < 2**20 else 1):
            file.write(piece)
    with untrusted(), pytest.raises(TraceError) as refused:
        read_spot_trace(path)
    assert len(str(refused.value)) < 1_000


def _nested(depth: int) -> dict[str, Any]:
    inner: dict[str, Any] = {}
    for _ in range(depth):
        inner = {"a": inner}
    return inner


@pytest.mark.parametrize(
    "config",
    [
        {"rollout": {str(number): "a/b" for number in range(100_000)}},
        {f"section{number}": {} for number in range(100_000)},
        {"engine": {"vllm": {"x": [[0] * 1000] * 100}}},
        _nested(200),
        {"run": {"name": "x" * 1_000_000}},
        {"y" * 1_000_000: 1},
    ],
    ids=["paths", "sections", "lists", "depth", "name", "key"],
)
def test_big_submissions_cost_little(shared_site: Site, submission: Submission, config: dict[str, Any]) -> None:
    body = submission()
    body["config"] |= config
    began_s = time.process_time()
    assert dry(shared_site, body).status_code == 400
    assert time.process_time() - began_s < 3.0


NUMBERS = [1e308, -1e308, 1e16, 2**63, -(2**70), 10**400, 1e15, 2**62]


@given(
    place=st.sampled_from(
        [
            *("providers.spot.usd_per_gpu_hour", "providers.spot.max_workers", "providers.spot.gpus_per_worker"),
            *(
                "trainer.usd_per_gpu_hour",
                "trainer.gpus",
                "rewards.usd_per_s",
                "rewards.usd_per_call",
                "run.budget_usd",
            ),
            *("run.steps", "run.seed", "scheduler.drain_timeout_s", "scheduler.release_timeout_s"),
        ]
    ),
    number=st.sampled_from(NUMBERS),
)
def test_no_number_is_an_error_of_the_servers(
    shared_site_and: tuple[Site, Submission], place: str, number: Any
) -> None:
    site, submission = shared_site_and
    body = submission()
    *sections, key = place.split(".")
    table = body["config"]
    for section in sections:
        table = table.setdefault(section, {})
    table[key] = number
    answer = site.client().post(
        "/v1/runs/dry-run", content=json.dumps(body), headers={"content-type": "application/json"}
    )
    assert answer.status_code in (200, 400), (place, number, answer.text)


@pytest.fixture(scope="module")
def shared_site_and(shared_site: Site) -> tuple[Site, Submission]:
    import tomllib

    from tests.server.conftest import CONFIG

    return shared_site, lambda **fields: {"config": tomllib.loads(CONFIG), "providers": ["spot"], **fields}


@pytest.mark.parametrize("own", [0, 1e-9, 0.001])
@pytest.mark.parametrize("prices", [{}, {"spot-replay": 7.0, "trainer": 11.0}])
def test_a_price_of_ones_own_is_not_below_the_servers(
    shared_site: Site, submission: Submission, own: float, prices: dict[str, float]
) -> None:
    """A budget in dollars holds for who says that all is free."""
    settings, project = replace(shared_site.settings, prices=prices), shared_site.projects["ours"]

    def checked(price: float | None) -> tuple[float | None, ...]:
        body = submission()
        for section in (body["config"]["providers"]["spot"], body["config"]["trainer"]):
            section |= {} if price is None else {"usd_per_gpu_hour": price}
        config = submissions.check(settings, Body(**body), project)[0].config
        return config.providers["spot"].get("usd_per_gpu_hour"), config.trainer.usd_per_gpu_hour

    with pytest.raises(ApiProblem) as refused:
        checked(own)
    pointers = {one.pointer for one in refused.value.errors or ()}
    assert "#/config/trainer/usd_per_gpu_hour" in pointers
    assert ("#/config/providers/spot/usd_per_gpu_hour" in pointers) == bool(prices)
    assert checked(20.0) == (20.0, 20.0)
    assert checked(None) == ((7.0, 11.0) if prices else (None, TrainerConfig.model_fields["usd_per_gpu_hour"].default))


def test_a_check_that_takes_too_long_ends_and_the_next_is_made(shared_site: Site, submission: Submission) -> None:
    """A process reaches its real time limit, and another one begins."""
    assert dry(shared_site, submission()).status_code == 200
    impatient = replace(shared_site.settings, check_timeout_s=0.0)
    with pytest.raises(ApiProblem, match="took longer than 0 s"):
        checking.checked(impatient, Body(**submission()), shared_site.projects["ours"])
    assert dry(shared_site, submission()).status_code == 200
