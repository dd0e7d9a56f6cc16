"""The process of a pool's node: its node agent, which imports no more than it needs."""

import asyncio
import os
from pathlib import Path

import structlog

from elastic.compose.processes import run_loop
from elastic.config import ConfigError
from elastic.pool.client import FINGERPRINT_VARIABLE, POOL_VARIABLE, TOKEN_VARIABLE
from elastic.pool.node_agent import NodeAgent, NodeAgentTicket
from elastic.protocol.endpoint import Endpoint
from elastic.system.devices import named_devices
from elastic.system.signals import TERMINATION, act_on

log = structlog.get_logger(__name__)

NAME_VARIABLE, NODE_VARIABLE, RECORDS_VARIABLE = "ELASTIC_POOL_NAME", "ELASTIC_POOL_NODE", "ELASTIC_POOL_RECORDS"


def run_pool_host() -> int:
    """Be a node's agent, as the environment says, until the pool does without it; returns the exit code.

    Raises `ConfigError` where the environment names no pool.
    """
    needed = (POOL_VARIABLE, NAME_VARIABLE, NODE_VARIABLE, TOKEN_VARIABLE)
    missing = [name for name in needed if not os.environ.get(name)]
    if missing:
        raise ConfigError(f"elastic pool-host: {', '.join(missing)} not set, which a pool hands to its node agents")
    records = os.environ.get(RECORDS_VARIABLE, "")
    ticket = NodeAgentTicket(
        endpoint=Endpoint(os.environ[POOL_VARIABLE], fingerprint=os.environ.get(FINGERPRINT_VARIABLE, "")),
        pool=os.environ[NAME_VARIABLE],
        node=os.environ[NODE_VARIABLE],
        token=os.environ.pop(TOKEN_VARIABLE),
        records=Path(records) if records else None,
        devices=named_devices(),
    )
    return run_loop(_keep(ticket))


async def _keep(ticket: NodeAgentTicket) -> int:
    keeping = asyncio.create_task(NodeAgent(ticket).run(), name="node_agent")
    act_on(TERMINATION, keeping.cancel)
    try:
        log.info("node agent ends", node=ticket.node, cause=(await keeping).reason)
    except asyncio.CancelledError:
        log.info("node agent ends", node=ticket.node, cause="it was told to")
    return 0
