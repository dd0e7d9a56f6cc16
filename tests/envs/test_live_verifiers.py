"""A live run of an environment for verifiers 0.4: what is trained is, token for token, what verifiers has of it."""

import json
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any

import msgspec
import pytest

from benchmarks._agents import AgentsRun
from elastic.protocol.sampled import Sampled, SampledBranch, ids_of
from elastic.runtime.journal import RunDirectory
from tests import proof
from tests.envs.test_kinds import python_of

pytestmark = pytest.mark.environments

GROUPS, SIZE = 2, 2
PACKAGE = """
import json
from collections.abc import Iterable
from pathlib import Path

import verifiers.v1 as vf
from openai import AsyncOpenAI

TRACES = Path(__file__).parent / "traces"


class SumTask(vf.Task[vf.TaskData, vf.State]):
    @vf.reward
    async def words(self, trace):
        TRACES.mkdir(exist_ok=True)
        branches = [[branch.token_ids, branch.sampled_mask] for branch in trace.branches]
        (TRACES / f"{trace.id}.json").write_text(json.dumps(branches))
        return float(len(trace.last_reply.split()))


class SumTaskset(vf.Taskset[SumTask]):
    def load(self) -> Iterable[SumTask]:
        for number in range(4):
            yield SumTask(vf.TaskData(prompt=f"What is {number} + 2?"), self.config.task)


class TwiceAsking(vf.Harness[vf.HarnessConfig]):
    EXECUTES_CODE = False
    NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data):
        client = AsyncOpenAI(base_url=endpoint, api_key=secret)
        messages = [{"role": "user", "content": data.prompt}]
        for _ in range(2):
            answer = await client.chat.completions.create(model="tiny", messages=messages)
            said = {"role": "assistant", "content": answer.choices[0].message.content or ""}
            messages += [said, {"role": "user", "content": "Once more?"}]
        return vf.ProgramResult(0, "", "")


__all__ = ["SumTaskset", "TwiceAsking"]
"""


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    python = python_of("verifiers")
    if not python.exists():
        pytest.skip(f"{python} is not there: `make test-environments` makes it")
    (tmp_path / "twice_sums.py").write_text(PACKAGE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    agent = '{ harness = { id = "twice_sums" }, runtime = { type = "subprocess" } }'
    settings = (
        *("run.steps=1", f"rollout.groups={GROUPS}", f"rollout.group_size={SIZE}", 'run.pass_env=["PYTHONPATH"]'),
        *("environment.name=verifiers", f'environment.python="{python}"', "environment.settings.id=twice_sums"),
        f"environment.settings.config={{ agent = {agent} }}",
    )
    with AgentsRun(tmp_path, *settings) as under_way:
        yield under_way


def test_trained_tokens_are_those_of_verifiers_own_branches(run: Any, tmp_path: Path) -> None:
    run.wait()
    rows = proof.trajectories(RunDirectory(run.run_dir))
    assert len(rows) == GROUPS * SIZE
    assert [row.cause for row in rows.values() if row.reward is None] == []
    traces = [json.loads(path.read_text()) for path in (tmp_path / "traces").iterdir()]
    of_verifiers = {stretch for branches in traces for ids, mask in branches for stretch in sampled(ids, mask)}
    of_ours = {stretch for row in rows.values() for stretch in trained(row)}
    assert len(traces) == len(rows)
    assert of_ours == of_verifiers
    assert len(of_ours) == 2 * len(rows)


def sampled(ids: Sequence[int], mask: Sequence[bool]) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """What was sampled in a branch in one go, behind all that stood before it."""
    for is_sampled, places in groupby(range(len(ids)), key=mask.__getitem__):
        if is_sampled:
            stretch = list(places)
            yield tuple(ids[: stretch[0]]), tuple(ids[place] for place in stretch)


def trained(row: Any) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The same of a trajectory that was trained."""
    contexts = [(row.token_ids, msgspec.msgpack.decode(row.sampled, type=Sampled))]
    if row.branches:
        branches = msgspec.msgpack.decode(row.branches, type=list[SampledBranch])
        contexts += ((bytes(branch.token_ids), branch.sampled) for branch in branches)
    for packed, of in contexts:
        ids = ids_of(packed)
        for start, count in of.spans:
            yield tuple(ids[:start]), tuple(ids[start : start + count])
