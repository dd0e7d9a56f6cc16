"""Connections of fronts and env workers to their run, over the Unix socket in the run's directory."""

import asyncio
import socket
from pathlib import Path
from typing import TypeAlias

from elastic.protocol.connection import Connection, ConnectionLost, SessionRefused, over_socket
from elastic.protocol.frames import RefusedFrame
from elastic.protocol.front_messages import (
    FRONT_SIDE,
    SOCKET,
    DriverHello,
    FromFront,
    FromRun,
    FrontHello,
    FrontWelcome,
)
from elastic.protocol.run_control import socket_address

RunConnection: TypeAlias = Connection[FromFront, FromRun]
"""The end of a front or an env worker."""
PeerConnection: TypeAlias = Connection[FromRun, FromFront]
"""The run's end."""
WELCOME_TIMEOUT_S = 5.0
REDIAL_S, REDIAL_MAX_S = 0.1, 1.0
"""How long to wait before the next attempt to reach the run: the first time, and at the most."""


async def connected(run_dir: Path, listener: socket.socket | None = None) -> RunConnection:
    """Connect to the run in this directory, and hand it the socket at which fronts listen, if any. Raises `OSError`."""
    end = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        with socket_address(run_dir, SOCKET) as address:
            end.connect(address)
        socket.send_fds(end, [b"\0"], [] if listener is None else [listener.fileno()])
        return await over_socket(end, FRONT_SIDE, "the run")
    except BaseException:
        end.close()
        raise


async def welcomed(connection: RunConnection, hello: FrontHello | DriverHello) -> FrontWelcome:
    """Say hello, and return the run's welcome; without one the connection is aborted. Raises `ConnectionLost`, and
    `SessionRefused` where asking again is of no use."""
    welcome: FromRun | None = None
    try:
        connection.send(hello)
        async with asyncio.timeout(WELCOME_TIMEOUT_S):
            welcome = await connection.receive()
    except (TimeoutError, ConnectionLost) as error:
        raise ConnectionLost(str(error) or "the run said nothing") from error
    finally:
        if not isinstance(welcome, FrontWelcome):
            connection.abort()
    match welcome:
        case FrontWelcome():
            return welcome
        case RefusedFrame(reason, retry):
            raise ConnectionLost(reason) if retry else SessionRefused(reason)
        case _:
            raise ConnectionLost(f"the run broke the protocol: {type(welcome).__name__} before its welcome")
