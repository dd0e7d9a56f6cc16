"""The connection to the run: what is asked over it, and what becomes of that when the run's process dies."""

import asyncio
import contextlib
import os
import socket
from functools import partial

import pytest

from elastic.front.link import NOT_MADE, ChoiceOver, ChoiceSettled, LinkLost, RunLink, TokensCame, TurnInbox
from elastic.protocol.connection import SessionRefused, over_socket
from elastic.protocol.frames import RefusedFrame
from elastic.protocol.front_messages import (
    FRONT_VERSION,
    RUN_SIDE,
    SOCKET,
    AgentCall,
    AgentCaller,
    AskUpstream,
    BranchFound,
    ClientGone,
    FrontHello,
    LookUp,
    OpenTurns,
    SettleTurn,
    TurnsTaken,
    UpstreamOver,
    UpstreamWaived,
)
from elastic.protocol.run_connection import connected
from elastic.protocol.sampled import ids_of, pack_ids
from tests.front.modelled_run import ModelledRun

CALLER = AgentCaller(trajectory="2/5/0", restart=1)


def look(body: bytes = b"d" * 16):
    return lambda number: LookUp(number, CALLER, AgentCall("/r", body))


def opens(choices: int = 1, body: bytes = b"d" * 16):
    return lambda number: OpenTurns(number, CALLER, AgentCall("/r", body), None, 0, pack_ids([1]), choices=choices)


@contextlib.asynccontextmanager
async def linked(directory):
    run = ModelledRun(directory)
    await run.start()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        link = RunLink(partial(connected, directory, listener))
        linking = asyncio.create_task(link.run())
        try:
            async with asyncio.timeout(20):
                await link.stands()
            yield run, link
        finally:
            linking.cancel()
            await asyncio.gather(linking, return_exceptions=True)
            await run.stop()


async def test_it_hands_over_the_listening_socket_and_says_hello(tmp_path):
    async with linked(tmp_path) as (run, link):
        assert (run.fds, link.run_name, link.up, link.lost_s) == (1, "run", True, None)


async def test_it_stands_only_while_more_can_be_said(tmp_path):
    """Whoever asks again whenever the link is lost would ask for ever, and let nobody see that it is."""
    async with linked(tmp_path) as (run, link), asyncio.timeout(20):
        await run.stop()
        while link.up:  # noqa: ASYNC110  # the very moment counts
            await asyncio.sleep(0)
        restarting = asyncio.create_task(run.start())
        await link.stands()
        assert link.up
        await restarting


async def test_a_directory_with_a_long_path(tmp_path):
    directory = tmp_path / ("d" * 100) / ("e" * 100)
    directory.mkdir(parents=True)
    async with linked(directory) as (_, link):
        assert isinstance(await link.ask(look()), BranchFound)


async def test_news_of_turns_come_to_their_call_in_order(tmp_path):
    async with linked(tmp_path) as (run, link):
        inbox = TurnInbox()
        taken = await link.ask(opens(2), inbox)
        assert isinstance(taken, TurnsTaken)
        first, second = run.turns
        run.tokens(first, [1, 2])
        run.tokens(second, [3])
        run.over(first, "length")
        link.send(SettleTurn(taken.turns[0].stream, 2))
        news = []
        while len(news) < 4:
            news += await inbox.take()
        assert [(one.choice, ids_of(one.ids)) for one in news if isinstance(one, TokensCame)] == [(0, [1, 2]), (1, [3])]
        assert [(one.choice, one.over.finish) for one in news if isinstance(one, ChoiceOver)] == [(0, "length")]
        assert ChoiceSettled(0) in news


async def test_of_two_turns_of_one_choice_one_is_heard(tmp_path):
    async with linked(tmp_path) as (run, link):
        inbox = TurnInbox()
        await link.ask(opens(), inbox)
        taken = await link.ask(opens(), inbox)
        assert isinstance(taken, TurnsTaken)
        assert taken.turns == []
        await run.until(lambda: run.of(ClientGone))
        assert run.turns[1].gone
        assert not run.turns[0].gone


async def test_turns_that_nobody_waits_for_any_more_are_given_back(tmp_path):
    async with linked(tmp_path) as (run, link):
        asking = asyncio.create_task(link.ask(opens(), TurnInbox()))
        await asyncio.sleep(0)
        asking.cancel()
        await run.until(lambda: run.of(ClientGone))
        inbox = TurnInbox()
        await link.ask(opens(), inbox)
        link.leave(inbox)
        await run.until(lambda: len(run.of(ClientGone)) == 2)
        link.leave(inbox)
        link.delivered(inbox)
        await link.ask(look(b"e" * 16))
        assert len(run.of(ClientGone)) == 2


def leave(number: int) -> AskUpstream:
    return AskUpstream(number, CALLER, "/r", "judge")


async def test_leave_that_nobody_waits_for_any_more_is_waived(tmp_path):
    async with linked(tmp_path) as (run, link):
        run.mute = True
        asking = asyncio.create_task(link.ask(leave))
        await run.until(lambda: run.of(AskUpstream))
        asking.cancel()
        await run.until(lambda: run.of(UpstreamWaived))
        assert run.of(UpstreamWaived) == [UpstreamWaived(run.of(AskUpstream)[0].request)]
        assert not run.of(UpstreamOver)


async def test_leave_that_comes_as_its_caller_goes_is_given_back(tmp_path):
    """Both answers come at once. Who has the first cancels the other, which has not yet run on with its own."""
    async with linked(tmp_path) as (run, link):

        async def cancels() -> None:
            await link.ask(look())
            asking.cancel()

        cancelling, asking = asyncio.create_task(cancels()), asyncio.create_task(link.ask(leave))
        await asyncio.gather(cancelling, asking, return_exceptions=True)
        assert asking.cancelled()
        await run.until(lambda: run.of(UpstreamOver))
        assert [(over.call, over.status) for over in run.of(UpstreamOver)] == [(1, NOT_MADE)]


async def test_everybody_hears_that_the_run_is_gone_and_it_is_dialled_again(tmp_path):
    async with linked(tmp_path) as (run, link):
        inbox = TurnInbox()
        await link.ask(opens(), inbox)
        run.tokens(run.turns[0], [1])
        await run.stop()
        news = await inbox.take()
        assert ids_of(news[0].ids) == [1]
        with pytest.raises(LinkLost):
            await inbox.take()
        assert not link.up
        assert link.lost_s is not None
        with pytest.raises(LinkLost):
            await link.ask(look())
        await run.start()
        async with asyncio.timeout(20):
            await link.stands()
        assert run.fds == 2
        assert isinstance(await link.ask(look(b"e" * 16)), BranchFound)


async def test_an_answer_that_does_not_come_is_lost_with_the_run(tmp_path):
    async with linked(tmp_path) as (run, link):
        run.mute = True
        asking = asyncio.create_task(link.ask(look()))
        await run.until(lambda: run.of(LookUp))
        await run.stop()
        with pytest.raises(LinkLost):
            await asking


@pytest.mark.parametrize("retry", [False, True])
async def test_a_run_that_wants_no_front_is_left_unless_it_says_to_come_again(tmp_path, retry):
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / SOCKET))
    listener.listen()
    listener.setblocking(False)
    link = RunLink(partial(connected, tmp_path))
    linking = asyncio.create_task(link.run())
    loop = asyncio.get_running_loop()
    for _ in range(2 if retry else 1):
        end, _ = await loop.sock_accept(listener)
        assert await loop.sock_recv(end, 1) == b"\0"
        wire = await over_socket(end, RUN_SIDE, "a front")
        hello = await wire.receive()
        assert hello == FrontHello(FRONT_VERSION, os.getpid())
        wire.close(RefusedFrame("another version", retry))
    if retry:
        assert not linking.done()
        linking.cancel()
        await asyncio.gather(linking, return_exceptions=True)
    else:
        with pytest.raises(SessionRefused, match="another version"):
            await linking
    listener.close()
