"""The process of a front: it serves agents on a socket that it inherits, until its run is over."""

import asyncio
import os
import socket
import time
from functools import partial
from pathlib import Path

import structlog

from elastic.config import Config, DoorsConfig, FrontConfig, load_config
from elastic.front.addresses import agents_url
from elastic.front.app import AgentFront
from elastic.front.asked import ServedModel
from elastic.front.calls import CallTimes
from elastic.front.doors.access import DoorAccess, read_network
from elastic.front.doors.base import ServedModelFacts
from elastic.front.doors.doors import TrainerDoors
from elastic.front.doors.roots import WeightsRoots, read_root
from elastic.front.doors.served import LinkedRun
from elastic.front.link import RunLink
from elastic.front.rendering.renderer import make_renderer
from elastic.front.rendering.tokenizer import Tokenizer
from elastic.front.upstream import Upstream, UpstreamSettings
from elastic.protocol.connection import SessionRefused
from elastic.protocol.endpoint import is_loopback, is_wildcard
from elastic.protocol.http_server import PeerLimits, serving
from elastic.protocol.run_connection import connected
from elastic.protocol.run_secrets import RunSecrets
from elastic.protocol.sockets import address_of
from elastic.protocol.tls import Certificate, given_certificate, run_certificate
from elastic.system.given import read_json
from elastic.system.host import here
from elastic.system.machine import raise_descriptor_limit
from elastic.system.signals import TERMINATION, act_on

log = structlog.get_logger(__name__)

CONFIG = "config.json"
"""The run's configuration in its directory."""
MODEL_CONFIG = "config.json"
"""The policy's, in its own."""
DRAIN_S = 30.0
"""For calls in work when the front is told to end. The run keeps a turn for as long whose client has vanished."""
KEEP_ALIVE_S = 120
"""Longer than clients keep idle connections, so that these close them: a request may cross a close on its way."""
LOOK_S = 1.0
MIB = 1024 * 1024


async def serve_front(run_dir: Path, fd: int) -> None:
    """Serve agents of the run in this directory on the listening socket `fd`.

    Ends when it is told to by a signal, when the run wants no front or its directory is gone, or when no process has
    been at the run for `run.orchestrator_timeout_s`. Raises `ConfigError` for a model without a usable tokenizer or
    renderer, and `OSError`.
    """
    config = load_config(run_dir / CONFIG)
    front = config.front or FrontConfig()  # type: ignore[call-arg]
    os.set_inheritable(fd, False)
    listener = socket.socket(fileno=fd)
    certificate = front_certificate(config, run_dir)
    raise_descriptor_limit()
    with here().executor(1, "render") as renders, listener.dup() as shared:
        link = RunLink(partial(connected, run_dir, shared))
        serves = AgentFront(
            link=link,
            model=served_model(config, front),
            secrets=RunSecrets.of(run_dir),
            base_url=agents_url(config, address_of(listener)),
            times=CallTimes(front.hold_s),
            body_bytes_max=int(front.body_mb * MIB),
            renders=renders,
            cache={
                "block_size": str(config.engine.kv_block_tokens),
                "num_gpu_blocks": str(config.engine.kv_blocks),
            },
            upstream=_upstream(front, link),
        )
        if config.doors is not None:
            serves.doors = open_doors(config, config.doors, serves, front.open_turns_max)
        told = asyncio.Event()
        heed_no_more = act_on(TERMINATION, told.set)
        linking = asyncio.create_task(link.run(), name="run")
        try:
            async with serving(
                serves.app(),
                listener,
                PeerLimits(connections_max=front.connections),
                certificate=certificate,
                drained=lambda: serves.drained(DRAIN_S),
                accepted_at_once=1,
                plain=() if serves.doors is None else serves.doors.access.plain,
                timeout_keep_alive=KEEP_ALIVE_S,
            ) as url:
                log.info("front ready", run=run_dir.name, url=url)
                await _over(link, linking, told, run_dir, config.run.orchestrator_timeout_s)
        finally:
            if serves.upstream is not None:
                await serves.upstream.aclose()
            heed_no_more()
            linking.cancel()
            await asyncio.wait({linking})


def front_certificate(config: Config, run_dir: Path) -> Certificate | None:
    """The certificate of fronts beyond loopback; None on it.

    The run's own is made here if there is none yet. So a run calls this before it starts its fronts.
    """
    run, front = config.run, config.front or FrontConfig()  # type: ignore[call-arg]
    if is_loopback(front.host):
        return None
    if run.certificate is not None and run.certificate_key is not None:
        return given_certificate(run.certificate, run.certificate_key)
    names = dict.fromkeys((run.advertised_host, run.host, front.host, "localhost", "127.0.0.1"))
    return run_certificate(run_dir, [name for name in names if name and not is_wildcard(name)])


def open_doors(config: Config, doors: DoorsConfig, front: AgentFront, turns_max: int) -> TrainerDoors:
    """What the front opens to those who train its run."""
    link, model = front.link, front.model

    async def decode(ids: list[int]) -> str:
        return await asyncio.get_running_loop().run_in_executor(front.renders, model.tokenizer.decode, ids)

    described = read_json(config.model.checkpoint / MODEL_CONFIG)
    facts = ServedModelFacts(
        name=model.name,
        max_model_len=model.context_tokens,
        vocab_size=model.vocab_size,
        dtype=str(described.get("dtype") or described.get("torch_dtype") or "bfloat16"),
        created_s=model.created_s,
        turns_max=turns_max,
        adapts=doors.adapts,
        config=described,
    )
    return TrainerDoors(
        run=LinkedRun(link, model.tokenizer.decoder, facts, frozenset(model.tokenizer.special), front.times.hold_s),
        roots=WeightsRoots(read_root(said) for said in doors.roots),
        access=DoorAccess(front.secrets, [read_network(said) for said in doors.plain]),
        alive=lambda: link.up,
        metrics=front.exposed,
        decode=decode,
        opened=doors.names,
    )


def _upstream(front: FrontConfig, link: RunLink) -> Upstream | None:
    """Raises `HttpSettingsError`."""
    if not front.upstream:
        return None
    settings = UpstreamSettings(
        url=front.upstream,
        key=os.environ.get(front.upstream_key_env, "").strip() if front.upstream_key_env else "",
        timeout_s=front.upstream_timeout_s,
        hold_s=front.hold_s,
        concurrency=front.upstream_concurrency,
        answer_bytes_max=int(front.upstream_answer_mb * MIB),
    )
    return Upstream(settings, link)


def served_model(config: Config, front: FrontConfig) -> ServedModel:
    """Raises `ConfigError` for a model without a usable tokenizer or renderer."""
    tokenizer = Tokenizer(config.model.checkpoint)
    renderer = make_renderer(
        tokenizer,
        renderer=front.renderer,
        tool_parser=front.tool_parser,
        reasoning_parser=front.reasoning_parser,
    )
    return ServedModel(
        config.served_name,
        config.engine.max_context_tokens,
        tokenizer.vocab_size,
        tokenizer,
        renderer,
        int(time.time()),
        front.policies,
        bool(front.upstream),
    )


async def _over(link: RunLink, linking: asyncio.Task[None], told: asyncio.Event, run_dir: Path, away_s: float) -> None:
    """Wait until the front is of no more use."""
    while not told.is_set():
        if linking.done():
            refusal = linking.exception()
            if not isinstance(refusal, SessionRefused):
                linking.result()
            log.info("the run wants no front", reason=str(refusal))
            return
        if not await asyncio.to_thread(run_dir.is_dir):
            log.info("the run's directory is gone")
            return
        if link.lost_s is not None and here().monotonic() - link.lost_s > away_s:
            log.warning("no process has been at the run for too long; its front ends", timeout_s=away_s)
            return
        try:
            await asyncio.wait_for(told.wait(), LOOK_S)
        except TimeoutError:
            continue
