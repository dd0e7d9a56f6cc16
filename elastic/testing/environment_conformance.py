"""What every kind of environments that env workers play must do, as tests of pytest.

A real env worker plays for a run that stands in (`elastic.testing.environments`). A third party's kind passes the suite
from one file:

    from elastic.testing.environment_conformance import *
    from elastic.testing.environments import EnvironmentUnderTest

    @pytest.fixture(params=[EnvironmentUnderTest(name="mine", write=write)], ids=str)
    def environment_under_test(request):
        return request.param
"""

# pyright: basic

import asyncio
import contextlib

import pytest

from elastic.environments.env_worker import CAUSE_CHARACTERS
from elastic.front.tiny import write_tokenizer
from elastic.system.last_words import RUN_KEY
from elastic.testing.environments import EnvWorkerUnderTest, StandInRun

WITHIN_S = 240.0
"""For a process to import its packages and play, on a busy machine."""
QUIET_S = 5.0
"""A process that is not held up says something several times meanwhile."""


@pytest.fixture
def playing(environment_under_test, tmp_path):
    """Makes a run with an env worker of the kind, for a while; `worker` starts another process."""

    @contextlib.asynccontextmanager
    async def run(*, big=False):
        write_tokenizer(tmp_path / "policy")
        section = environment_under_test.write(tmp_path, big)
        stand_in = StandInRun(tmp_path / "run", tmp_path / "policy", {"name": environment_under_test.name, **section})
        workers = []

        def worker():
            workers.append(EnvWorkerUnderTest(stand_in, environment_under_test))
            return workers[-1]

        async with stand_in.serving():
            try:
                yield stand_in, worker
            finally:
                for one in workers:
                    one.kill()

    return run


async def over(heard, worker):
    """Wait for a trajectory's end."""
    ended = asyncio.ensure_future(worker.ended())
    waiting = asyncio.ensure_future(heard.over.wait())
    try:
        await asyncio.wait({ended, waiting}, timeout=WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        how = f"it ended with {ended.result()}" if ended.done() else f"it is silent for {WITHIN_S:g} s"
        assert waiting.done(), f"{how}: {worker.words()[-4000:]}"
    finally:
        ended.cancel()
        waiting.cancel()


async def test_each_trajectory_has_an_end_and_only_a_good_one_a_reward(playing, environment_under_test):
    """What raises or gives no number has failed for that, and the next one is played as if nothing were."""
    bad = ("raise", "nan", "text", "huge")
    async with playing() as (run, start):
        worker = start()
        first = run.play("good")
        failed = {said: run.play(said) for said in bad}
        tells_reward = not environment_under_test.token_level  # Else the run takes it by itself.
        refused = run.play("good", refuses_reward=tells_reward)
        cut = run.play("truncate", cut=True)
        loud = [run.play("secret"), run.play("flood")]
        last = run.play("good")
        for heard in (first, *failed.values(), refused, cut, *loud, last):
            await over(heard, worker)
        for heard in (first, cut, *loud, last):
            assert (heard.rewards, heard.cause) == ([1.0], "")
        for said, heard in failed.items():
            assert heard.rewards == [], said
            assert 0 < len(heard.cause) <= CAUSE_CHARACTERS, said
            assert not heard.ended.truncated, said
        assert "no such tool" in failed["raise"].cause
        assert ("its reward was refused" in refused.cause) == tells_reward
        assert not refused.ended.truncated
        assert not first.ended.truncated
        assert cut.ended.truncated
        assert not worker.has_ended
        words = worker.words()
    assert RUN_KEY.search(words) is None


async def test_what_never_returns_is_no_reward_and_holds_up_nobody_unnoticed(playing):
    """Either the env worker falls silent, so that the run ends it, or its other episodes go on."""
    async with playing() as (run, start):
        worker = start()
        await over(run.play("good"), worker)
        hanging = run.play("hang")
        async with asyncio.timeout(WITHIN_S):
            await hanging.asked.wait()
        await asyncio.sleep(1.0)  # For its answer to come, and to be heard.
        loop, other = asyncio.get_running_loop(), asyncio.ensure_future(run.play("good").over.wait())
        async with asyncio.timeout(WITHIN_S):
            while not other.done() and loop.time() - run.heard_s < QUIET_S:
                await asyncio.wait({other}, timeout=QUIET_S / 50)
        other.cancel()
        assert (hanging.rewards, hanging.ended) == ([], None)


@pytest.mark.parametrize("said", ["exit", "leave"])
async def test_a_process_that_ends_in_the_middle_has_given_no_reward_and_another_one_plays(playing, said):
    """Or the trajectory has failed for that, where what ends is not the env worker."""
    async with playing() as (run, start):
        worker = start()
        await over(run.play("good"), worker)
        ending = run.play(said)
        ended = asyncio.ensure_future(worker.ended())
        waiting = asyncio.ensure_future(ending.over.wait())
        done, left = await asyncio.wait({ended, waiting}, timeout=WITHIN_S, return_when=asyncio.FIRST_COMPLETED)
        for one in left:
            one.cancel()
        assert done
        assert ending.rewards == []
        if ended in done:
            ending.said = "good"
            run.again(ending)
            await over(ending, start())
            assert ending.rewards == [1.0]
        else:
            assert ending.cause


async def test_a_task_of_10_mb_that_the_run_refuses_has_failed(playing):
    async with playing(big=True) as (run, start):
        worker = start()
        for heard in (run.play("good"), run.play("good")):
            await over(heard, worker)
            assert heard.rewards == []
            assert 0 < len(heard.cause) <= CAUSE_CHARACTERS
        assert not worker.has_ended
