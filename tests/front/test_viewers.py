"""What a viewer's key gets of a front: chats, and metrics; and what it does not."""

import asyncio

import pytest

from elastic.compose.chat import ChatFailed, ChatRefused, ChatSettings, SpareCreditAnswers
from elastic.protocol.front_messages import AgentCaller, Declined, LookUp, OpenTurns
from tests.front.exposed import exposed
from tests.front.fronted import DRIVER, HELLO, SECRETS, bearer, fronted, says
from tests.front.test_app import CHAT, assert_error

VIEWER = SECRETS.viewer_key()
PLAIN = ChatSettings()


async def test_a_viewers_calls_are_of_no_trajectory_and_say_that_nothing_is_trained(served):
    for path in (CHAT, f"/t/2-5-0{CHAT}", f"/t/{VIEWER}{CHAT}"):
        answer = await served.client.post(path, json={"messages": HELLO, "session_id": "s"}, headers=bearer(VIEWER))
        assert answer.status_code == 200, answer.text
        assert answer.headers["x-elastic-trained"] == "false"
        assert served.run.of(LookUp)[-1].caller == AgentCaller(viewer="main")
    async with served.streamed(headers=bearer(VIEWER)) as pieces:
        assert [piece async for piece in pieces][-1] == "[DONE]"
    assert "x-elastic-trained" not in (await served.chat()).headers


async def test_a_viewer_opens_no_trajectory_and_reads_metrics(served):
    begun = await served.client.post("/trajectories", json={"task": {}, "group": "g"}, headers=bearer(VIEWER))
    assert_error(begun, 403, "permission_denied")
    assert exposed((await served.client.get("/metrics", headers=bearer(VIEWER))).text)


async def test_a_drivers_key_counts_before_a_viewers(served):
    await served.client.post(
        CHAT, json={"messages": HELLO, "session_id": "s"}, headers={**bearer(DRIVER), "x-api-key": VIEWER}
    )
    assert served.run.of(LookUp)[-1].caller == AgentCaller(driver="tests", named="s")


@pytest.mark.parametrize("streams", [True, False])
async def test_a_chat_under_which_the_run_dies_says_that_it_is_lost(tmp_path, streams):
    async with fronted(tmp_path) as served:
        body = {"messages": HELLO, "stream": streams}
        asked = asyncio.create_task(served.client.post(CHAT, json=body, headers=bearer(VIEWER)))
        await served.until(lambda: served.run.turns)
        served.run.tokens(served.run.turns[0], [*b"hi"])
        await asyncio.sleep(0)
        await served.run.restart()
        answer = await asked
        await served.link.stands()
        if not streams or answer.status_code != 200:
            assert_error(answer, 503, "chat_lost", "ask again")
        else:
            assert '"chat_lost"' in answer.text
            assert "[DONE]" not in answer.text
        assert len(served.run.of(OpenTurns)) == 1, "nothing is generated that nobody asked for"


def told(url: str, settings: ChatSettings = PLAIN) -> str:
    with SpareCreditAnswers(f"{url}/v1", VIEWER) as answers:
        return "".join(piece.content for piece in answers.answer(HELLO, settings))


async def test_elastic_chat_shows_what_comes(tmp_path):
    async with fronted(tmp_path, answer=says("hi there")) as served:
        assert await asyncio.to_thread(told, served.url, ChatSettings(7, 0.5)) == "hi there"
        sampling = served.run.of(OpenTurns)[0].sampling
        assert (sampling.max_tokens, sampling.temperature) == (7, 0.5)


async def test_elastic_chat_says_why_there_is_no_answer(tmp_path):
    async with fronted(tmp_path) as served:
        served.run.decline = lambda message: Declined(0, 503, "no_capacity", "no place", retry_after_s=1.0)
        with pytest.raises(ChatFailed, match="no place"):
            await asyncio.to_thread(told, served.url)
        served.run.decline = lambda message: Declined(0, 403, "no_chats", "front.chats_max is 0", retry=False)
        with pytest.raises(ChatRefused, match=r"front\.chats_max is 0"):
            await asyncio.to_thread(told, served.url)
        served.run.decline = lambda message: None
        asking = asyncio.create_task(asyncio.to_thread(told, served.url))
        await served.until(lambda: served.run.turns)
        served.run.tokens(served.run.turns[0], [*b"hi"])
        await served.run.restart()
        with pytest.raises(ChatFailed, match="ask again"):
            await asking
        await served.link.stands()
        url = served.url
    with pytest.raises(ChatFailed, match="the run is not reached at http"):
        await asyncio.to_thread(told, url)
