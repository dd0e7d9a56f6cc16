"""What tokens and turns cost on their way from workers to agents, through a run and its fronts, and what it adds.

The run is live and whole (`_streaming.py`), its fronts are processes, and agents drive it (`environment.name =
"outside"`). Stand-ins for workers stream to it (`_stand_ins.py`). Agents stream chats from its fronts, read by hand in
a process of their own (`_chatters.py`): 64 that get 50 tokens a second, and then 1,000 that get 10. First all of these
have long turns, and nothing begins or ends. Then more agents talk beside them, in short turns.

Of 64 streams, and under `streams` of both loads:

- us_per_token: CPU time of the run and its fronts a token, while nothing begins or ends; `run_…` and `fronts_…` are
  the parts;
- us_per_turn: what a short turn takes of both besides its tokens, from the call to the end of its answer;
- ttft_added_ms_p50, _p99: from the worker's frame with a turn's first token to the agent's read;
- turn_end_added_ms_p50: from its frame with the last token to the agent's read of the end;
- token_delay_ms_p99: from a token's production to the agent's read, long turns' alone; it waits for the next flush.
  `flush_interval_ms` is how often workers were told to send at the end;
- tokens_per_s, core_share, client_core_share, generator_core_share: what was carried, the share of a core that run and
  fronts took, and those of the agents' process and the stand-ins'.

routes is the first load by each route, long turns alone: `us_per_token`, and its `ratio` to that of chats (a median of
rounds, in each of which all routes are measured one after the other).

bytes_per_token is what a token of an open trajectory takes of the memory of run and fronts: of so many `trajectories`
with 32k tokens each, in turns that agents had from the fronts. `--quick` leaves out the second load, and
all routes but chats.

Beside it, with the same agents and loads, are LiteLLM's proxy over a stub that streams one event a token, at what it
carries (`litellm.us_per_token`, `ratio` is how many times ours that is), and vLLM's server and router.
"""

import asyncio
import contextlib
import gc
import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import psutil

from benchmarks._chatters import (
    BeginChats,
    LookAtChats,
    LookedAtChats,
    PlayTurns,
    ServerFailed,
    StreamChats,
    TalkShortly,
    TellOfChats,
    ToldOfChats,
    chatters,
)
from benchmarks._common import Arguments, Figures, benchmark, option
from benchmarks._processes import Child
from benchmarks._relays import cpu_s, install, litellm, skipped_without_litellm
from benchmarks._spoken import CHAT, ROUTES
from benchmarks._stand_ins import Look, StandInPace, TellTimes, TurnTimes
from benchmarks._streaming import (
    GROUP_SIZE,
    STREAMS_PER_WORKER,
    StandInFleet,
    StreamedRun,
    percentile_ms,
    streamed_run,
    streaming_config,
    used,
)
from benchmarks._waiting import awaited
from elastic.compose.agents import agents_wiring
from elastic.compose.plan import resolve
from elastic.compose.processes import run_loop
from elastic.config import OUTSIDE, Config
from elastic.front.tiny import PLAIN, SPECIAL, VOCABULARY, write_tokenizer
from elastic.protocol.endpoint import Address
from elastic.protocol.run_secrets import RunSecrets
from elastic.runtime.agents import AgentsWiring
from elastic.runtime.journal import CONFIG, RunDirectory

WORDS = range(256, VOCABULARY - len(SPECIAL) - len(PLAIN))
"""Token ids of the tiny tokenizer whose texts are whole characters."""
LONG_TOKENS = 1 << 15
"""More than a stream gets here."""
PROBE_EVERY = 8
TALK_TOKENS, TALK_TURNS_PER_S, TALK_SHARE = 10, 40, 0.5
"""Of a talker's turns: their tokens, how many there are of all talkers, and the share of its time that it talks."""
SETTLE_S = 3.0
"""Until the flush interval suits the load."""
TALK_SETTLE_S = 1.0
START_S, FILL_S = 240.0, 1_800.0
RIVAL_LOOKS, RIVAL_LOOKS_QUICK = 12, 1
"""Each after `SETTLE_S`, until all streams have begun."""
"""Longest times, for machines that are busy with other things."""
FILLED, FILLED_TOKENS = 1_000, 32_000
FILLED_TURNS, FILLED_AT_ONCE = 8, 32
FILL_TOKENS_PER_S = 20_000
"""Of a stream, of which there are `FILLED_AT_ONCE`: as fast as it is taken."""
QUICK_SHARE = 20
NEVER_S = 1e6
WITHOUT_VLLM = "vLLM is not installed in .cache/vllm, and this machine has no figures of its own for it"


class ChatLoad(NamedTuple):
    streams: int
    tokens_per_s: int

    @property
    def talkers(self) -> int:
        return round(TALK_TURNS_PER_S * self.talk_period_s)

    @property
    def talk_period_s(self) -> float:
        return TALK_TOKENS / self.tokens_per_s / TALK_SHARE


LOADS = ChatLoad(64, 50), ChatLoad(1_000, 10)


def fronted_config(checkpoint: Path, workers: int, trajectories: int) -> Config:
    """Agents drive the run, and the least limit of theirs is the machine's."""
    outside = {"name": OUTSIDE, "settings": {"deadline_s": NEVER_S, "idle_s": NEVER_S}}
    more = {"environment": outside, "front": {"renderer": "template"}}
    return streaming_config(workers, -(-trajectories // GROUP_SIZE) * GROUP_SIZE, policy=checkpoint, **more)


def write_checkpoint(directory: Path) -> Path:
    """What fronts read of a policy: there are no weights."""
    write_tokenizer(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": VOCABULARY}))
    return directory


class FrontedRun(NamedTuple):
    """A run under way that agents drive, with its fronts' processes and the agents' one."""

    streamed: StreamedRun
    agents: Child
    fronts: Sequence[psutil.Process]

    def use(self) -> "FrontedUse":
        return FrontedUse(time.monotonic(), time.process_time(), sum(map(cpu_s, self.fronts)), self.streamed.accepted)

    def resident_bytes(self) -> int:
        return sum(process.memory_info().rss for process in (psutil.Process(), *self.fronts))


class FrontedUse(NamedTuple):
    """What run and fronts had computed then, and the tokens that the run had accepted."""

    at_s: float
    run_s: float
    fronts_s: float
    tokens: int

    def since(self, before: "FrontedUse") -> "FrontedUse":
        return FrontedUse(
            self.at_s - before.at_s,
            self.run_s - before.run_s,
            self.fronts_s - before.fronts_s,
            self.tokens - before.tokens,
        )

    @property
    def cpu_s(self) -> float:
        return self.run_s + self.fronts_s


@contextlib.asynccontextmanager
async def fronted_run(
    trajectories: int, pace: StandInPace, streams: int, route: str = CHAT
) -> AsyncIterator[FrontedRun]:
    """With so many trajectories open, of which so many have turns at once, by one route."""
    workers = -(-streams // STREAMS_PER_WORKER)
    served: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    with tempfile.TemporaryDirectory() as checkpoint, contextlib.ExitStack() as ending:
        config = fronted_config(write_checkpoint(Path(checkpoint) / "tiny"), workers, trajectories)
        plan = resolve(config, (), "front.py")

        def wired(kept: RunDirectory) -> AgentsWiring | None:
            (kept.path / "logs").mkdir()
            (kept.path / CONFIG).write_text(config.model_dump_json())
            return agents_wiring(plan, kept.path, {}, served.set_result)

        fleet = StandInFleet(1, STREAMS_PER_WORKER, pace=pace)
        agents = ending.enter_context(Child(chatters))
        async with streamed_run(config, workers, fleet, make_agents=wired) as run:
            url = await asyncio.wait_for(served, START_S)
            at = Address.parse(url.removeprefix("http://").removesuffix("/v1"))
            key = RunSecrets.of(run.kept.path).driver_key("main")
            await agents.ask(BeginChats(at.host, at.port, key, trajectories, GROUP_SIZE, route))
            known = run.scheduler.fleet.workers
            await awaited("workers", lambda: sum(worker.connected for worker in known.values()) == workers, START_S)
            yield FrontedRun(run, agents, [psutil.Process(pid) for pid in _front_pids(run.kept.path)])


def _front_pids(run_dir: Path) -> list[int]:
    found: list[int] = []
    for path in sorted((run_dir / "leases").glob("front-*.json")):
        found += (process["pid"] for process in json.loads(path.read_bytes())["processes"].values())
    return found


async def measure_load(load: ChatLoad, seconds: float) -> Figures:
    pace = StandInPace(load.tokens_per_s, own_lengths=False, ids=WORDS)
    streams = load.streams + load.talkers
    async with fronted_run(streams, pace, streams) as run:
        await run.agents.ask(StreamChats(load.streams, LONG_TOKENS, PROBE_EVERY))
        await awaited("all streams", lambda: run.streamed.streaming() == load.streams, START_S)
        await asyncio.sleep(SETTLE_S)
        settled_s = time.monotonic()
        long, lasted = await _window(run, seconds)
        await run.agents.ask(TalkShortly(load.talkers, TALK_TOKENS, load.talk_period_s))
        await asyncio.sleep(TALK_SETTLE_S)
        began_s = time.monotonic()
        talked, talk = await _window(run, seconds)
        (looked,) = await run.streamed.fleet.ask(Look())
        (times,) = await run.streamed.fleet.ask(TellTimes())
        told = await run.agents.ask(TellOfChats())
    us_per_token, turns = long.cpu_s / long.tokens * 1e6, (talk.begun + talk.ended) / 2
    delays = ChatDelays.of(told, times, load.tokens_per_s, settled_s, began_s)
    return {
        "us_per_token": us_per_token,
        "us_per_turn": (talked.cpu_s * 1e6 - us_per_token * talked.tokens) / turns,
        "ttft_added_ms_p50": percentile_ms(delays.firsts_s, 50),
        "ttft_added_ms_p99": percentile_ms(delays.firsts_s, 99),
        "turn_end_added_ms_p50": percentile_ms(delays.ends_s, 50),
        "token_delay_ms_p99": percentile_ms(delays.tokens_s, 99),
        "flush_interval_ms": looked.flush_interval_s * 1e3,
        "run_us_per_token": long.run_s / long.tokens * 1e6,
        "fronts_us_per_token": long.fronts_s / long.tokens * 1e6,
        "events_per_token": lasted.events / long.tokens,
        "tokens_per_s": long.tokens / long.at_s,
        "core_share": long.cpu_s / long.at_s,
        "client_core_share": max(lasted.core_share, talk.core_share),
        "generator_core_share": lasted.generator_core_share,
        "turns": turns,
    }


async def measure_route(route: str, load: ChatLoad, seconds: float) -> Figures:
    pace = StandInPace(load.tokens_per_s, own_lengths=False, ids=WORDS)
    async with fronted_run(load.streams, pace, load.streams, route) as run:
        await run.agents.ask(StreamChats(load.streams, LONG_TOKENS, load.streams + 1))
        await awaited(f"all streams by {route}", lambda: run.streamed.streaming() == load.streams, START_S)
        await asyncio.sleep(SETTLE_S)
        used, heard = await _window(run, seconds)
    return {
        "us_per_token": used.cpu_s / used.tokens * 1e6,
        "fronts_us_per_token": used.fronts_s / used.tokens * 1e6,
        "events_per_token": heard.events / used.tokens,
    }


class ChattersUse(NamedTuple):
    """What the agents had and took between two looks, and what the stand-ins took."""

    events: int
    begun: int
    ended: int
    core_share: float
    generator_core_share: float


async def _window(run: FrontedRun, seconds: float) -> tuple[FrontedUse, ChattersUse]:
    generated = await run.streamed.fleet.ask(Look())
    looked: LookedAtChats = await run.agents.ask(LookAtChats())
    before = run.use()
    await asyncio.sleep(seconds)
    after = run.use()
    now: LookedAtChats = await run.agents.ask(LookAtChats())
    generating = used(generated, await run.streamed.fleet.ask(Look()))
    agents = ChattersUse(
        now.events - looked.events,
        now.begun - looked.begun,
        now.ended - looked.ended,
        (now.cpu_s - looked.cpu_s) / (now.at_s - looked.at_s),
        generating.core_share,
    )
    return after.since(before), agents


class ChatDelays(NamedTuple):
    """In seconds: of first tokens and of ends of short turns, and of all tokens of long ones."""

    firsts_s: npt.NDArray[np.float64]
    ends_s: npt.NDArray[np.float64]
    tokens_s: npt.NDArray[np.float64]

    @classmethod
    def of(
        cls, told: ToldOfChats, times: dict[str, TurnTimes], tokens_per_s: float, settled_s: float, talking_s: float
    ) -> "ChatDelays":
        """Of tokens that came after `settled_s`, and of turns that began after `talking_s`."""
        turns = [(turn, times[turn.turn]) for turn in told.turns if turn.talked and turn.first_s > talking_s]
        delays: list[npt.NDArray[np.float64]] = []
        reached: dict[str, int] = {}
        for turn, at_s, tokens in told.probed:
            if turn in reached and at_s > settled_s:
                numbers = np.arange(reached[turn], tokens)
                delays.append(at_s - times[turn].begun_s - (numbers + 1) / tokens_per_s)
            reached[turn] = tokens
        return cls(
            np.array([turn.first_s - sent.first_s for turn, sent in turns]),
            np.array([turn.last_s - sent.last_s for turn, sent in turns]),
            np.concatenate(delays) if delays else np.array([]),
        )


async def weigh(trajectories: int) -> Figures:
    """The memory of tokens. What processes take for their first turns, they take before."""
    pace = StandInPace(FILL_TOKENS_PER_S, own_lengths=False, ids=WORDS)
    async with fronted_run(trajectories, pace, FILLED_AT_ONCE) as run:
        await run.agents.ask(PlayTurns(1, TALK_TOKENS, FILLED_AT_ONCE))
        before, tokens = await _settled_bytes(run), run.streamed.accepted
        filled = PlayTurns(FILLED_TURNS, FILLED_TOKENS // FILLED_TURNS, FILLED_AT_ONCE)
        await run.agents.ask(filled, FILL_S)
        after, tokens = await _settled_bytes(run), run.streamed.accepted - tokens
    return {"bytes_per_token": (after - before) / tokens, "trajectories": trajectories, "tokens": tokens}


async def _settled_bytes(run: FrontedRun) -> int:
    await asyncio.sleep(1.0)
    gc.collect()
    await asyncio.sleep(1.0)
    return run.resident_bytes()


async def measure_litellm(load: ChatLoad, seconds: float, looks: int = RIVAL_LOOKS) -> Figures:
    """At what it carries of the load, at the latest after so many looks."""
    with Child(chatters) as agents:
        async with litellm(load.tokens_per_s) as relay:
            await agents.ask(BeginChats("127.0.0.1", relay.port, relay.key, load.streams))
            await agents.ask(StreamChats(load.streams, LONG_TOKENS, load.streams + 1))
            for _ in range(looks):
                await asyncio.sleep(SETTLE_S)
                if (await agents.ask(LookAtChats())).streaming == load.streams:
                    break
            before, began_s = await agents.ask(LookAtChats()), relay.cpu_s()
            await asyncio.sleep(seconds)
            took_s, after = relay.cpu_s() - began_s, await agents.ask(LookAtChats())
    tokens = after.events - before.events
    return {
        "us_per_token": took_s / tokens * 1e6 if tokens else None,
        "tokens_per_s": tokens / (after.at_s - before.at_s),
        "core_share": took_s / (after.at_s - before.at_s),
    }


def rivals(loads: Sequence[ChatLoad], seconds: float, looks: int, ours: Figures, skipped: str) -> Figures:
    vllm: Figures = {"us_per_token": None, "skipped_because": WITHOUT_VLLM}
    found: Figures = {"us_per_token": None, "skipped_because": skipped}
    if not skipped:
        try:
            streams = {str(load.streams): run_loop(measure_litellm(load, seconds, looks)) for load in loads}
        except (OSError, ServerFailed) as error:
            found["skipped_because"] = f"LiteLLM's proxy does not do it: {error}"
        else:
            for size, one in streams.items():
                one["ratio"] = one["us_per_token"] and one["us_per_token"] / ours[size]["us_per_token"]
            found = {**streams[str(loads[0].streams)], "streams": streams}
    return {"litellm": found, "vllm_server": vllm, "vllm_router": dict(vllm)}


def in_process(results: Any, load: ChatLoad | None, amount: float, route: str) -> None:
    """A run in a process of its own: a load for so many seconds (by a route alone, if one is named), or so many
    trajectories to be filled."""
    if load is not None and route:
        measuring = measure_route(route, load, amount)
    else:
        measuring = measure_load(load, amount) if load else weigh(round(amount))
    results.send(run_loop(measuring))


def measured(load: ChatLoad | None, amount: float, route: str = "") -> Figures:
    with Child(in_process, load, amount, route, daemon=False, ends_within_s=START_S) as run:
        return run.hear(FILL_S)


def middle(rounds: Sequence[Figures]) -> Figures:
    return {key: median(one[key] for one in rounds) for key in rounds[0]}


def by_route(load: ChatLoad, seconds: float, rounds: int) -> dict[str, Figures]:
    found = {route: list[Figures]() for route in ROUTES}
    for _ in range(rounds):
        chat: Figures = {}
        for route, figures in found.items():
            one = measured(load, seconds, route)
            chat = chat or one
            figures.append({**one, "ratio": one["us_per_token"] / chat["us_per_token"]})
    return {route: middle(figures) for route, figures in found.items()}


def main(arguments: Arguments) -> Figures:
    quick = arguments.quick
    seconds, rounds, looks = (2.0, 1, RIVAL_LOOKS_QUICK) if quick else (10.0, 3, RIVAL_LOOKS)
    skipped = install() if arguments.with_litellm else skipped_without_litellm()
    loads = LOADS[:1] if quick else LOADS
    by_load = {load: list[Figures]() for load in loads}
    for _ in range(rounds):
        for load, figures in by_load.items():
            figures.append(measured(load, seconds))
    streams = {str(load.streams): middle(figures) for load, figures in by_load.items()}
    share = QUICK_SHARE if quick else 1
    return {
        **streams[str(LOADS[0].streams)],
        **measured(None, FILLED // share),
        "streams": streams,
        "routes": {CHAT: {"us_per_token": streams[str(LOADS[0].streams)]["us_per_token"], "ratio": 1.0}}
        if quick
        else by_route(LOADS[0], seconds, rounds),
        **rivals(loads, seconds, looks, streams, skipped),
    }


if __name__ == "__main__":
    benchmark(
        __doc__,
        main,
        option("--with-litellm", action="store_true", help="make LiteLLM's environment if it is not there"),
    )
