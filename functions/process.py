"""The process that a local pool's function runs in: `python -m functions.process PARENT_PID FUNCTION`.

Frames are a length (4 bytes, big-endian) and msgpack: payloads come on standard input, answers go to what was
standard output, which from then on is standard error to the function. Where that is a file, it is added to until it has
`LOG_BYTES_MAX` at the end of a call; what the function says later is lost. The first answer says whether it could be
loaded. An answer has at most `ANSWER_BYTES_MAX` bytes. The process dies with the pool's, and ends when its input does.
"""

import asyncio
import ctypes
import importlib
import inspect
import os
import signal
import stat
import struct
import sys
from collections.abc import Awaitable, Callable
from typing import Any, BinaryIO

import msgspec

from elastic.system.plain_values import plain, told, with_article

HEADER = struct.Struct("!I")
ANSWER_BYTES_MAX = 2**20
"""A result is a number, or little more; what a function has to say besides belongs in its log."""
STANDARD_OUTPUT, STANDARD_ERROR = 1, 2
LOG_BYTES_MAX = 16 * 2**20
_ANSWER_OVERHEAD_BYTES = 64
PR_SET_PDEATHSIG = 1


class Loaded(msgspec.Struct, tag=True):
    """The function can be called."""


class Missing(msgspec.Struct, tag=True):
    """The function cannot be loaded; the process ends."""

    error: str


class Returned(msgspec.Struct, tag=True):
    """The function's result, as msgpack."""

    result: msgspec.Raw


class Raised(msgspec.Struct, tag=True):
    error: str


class Unsendable(msgspec.Struct, tag=True):
    """The function returned what msgpack does not know, or too much of it."""

    error: str


Answer = Loaded | Missing | Returned | Raised | Unsendable


def load(function: str) -> Callable[[Any], Any]:
    """The function that `module:attribute` names. Raises whatever is wrong with it."""
    module, _, attribute = function.partition(":")
    found: Any = importlib.import_module(module)
    for name in attribute.split("."):
        found = getattr(found, name)
    if not callable(found):
        raise TypeError(f"it is {with_article(type(found).__name__)}, not a function")
    return found


def call(function: Callable[[Any], Any], payload: Any) -> Answer:
    try:
        result = function(payload)
        if inspect.isawaitable(result):
            result = asyncio.run(_awaited(result))
    except BaseException as error:  # `sys.exit` in a function is a failed call, not the end of its process.
        return Raised(told(error))
    try:
        encoded = msgspec.msgpack.encode(result, enc_hook=plain)
    except Exception as error:
        return Unsendable(f"{type(result).__name__} cannot be sent: {told(error)}")
    if len(encoded) + _ANSWER_OVERHEAD_BYTES > ANSWER_BYTES_MAX:
        return Unsendable(f"{type(result).__name__} has {len(encoded)} bytes; at most {ANSWER_BYTES_MAX} can be sent")
    return Returned(msgspec.Raw(encoded))


async def _awaited(result: Awaitable[Any]) -> Any:
    return await result


def serve(function: str, requests: BinaryIO, answers: BinaryIO) -> None:
    try:
        loaded = load(function)
    except BaseException as error:
        _answer(answers, Missing(told(error)))
        return
    _bound_log()
    _answer(answers, Loaded())
    while len(header := requests.read(HEADER.size)) == HEADER.size:
        payload = msgspec.msgpack.decode(requests.read(HEADER.unpack(header)[0]))
        answer = call(loaded, payload)
        _bound_log()
        _answer(answers, answer)


def _bound_log() -> None:
    """Have what is said from now on lead nowhere, if the log is full."""
    log = os.fstat(STANDARD_ERROR)
    if stat.S_ISREG(log.st_mode) and log.st_size >= LOG_BYTES_MAX:
        os.write(STANDARD_ERROR, b"\nthis log is full: what the function says from now on is lost\n")
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, STANDARD_OUTPUT)
        os.dup2(nowhere, STANDARD_ERROR)
        os.close(nowhere)


def _answer(answers: BinaryIO, answer: Answer) -> None:
    body = msgspec.msgpack.encode(answer)
    answers.write(HEADER.pack(len(body)) + body)
    answers.flush()


def _die_with(parent_pid: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent_pid:
            sys.exit("the process that started this one has died")


def main() -> None:
    parent_pid, function = sys.argv[1:]
    _die_with(int(parent_pid))
    with os.fdopen(os.dup(sys.stdout.fileno()), "wb") as answers:
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        serve(function, sys.stdin.buffer, answers)


if __name__ == "__main__":
    main()
