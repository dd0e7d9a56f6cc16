"""Lies of workers.

- A `ByzantineWorker`'s frames are of every type, with extreme and random values, drawn from the wire's own types: a
  new field is lied about without a change here.
- `false_events` are lies as events: the core is tested with them although the gateway would refuse the frames.
"""

import math
from array import array
from collections.abc import Callable, Sequence
from random import Random
from typing import Any, get_args

import msgspec
from msgspec import inspect

from elastic.core import events as e
from elastic.core.ids import group_of
from elastic.core.types import CHUNK_TOKENS_MAX, INTEGER_MAX, Account, Chunk, Chunks, FinishReason, LoadPhase, WorkerId
from elastic.protocol import wire

KINDS: tuple[type, ...] = get_args(wire.FromWorker)
POISONED = 0.6
"""Share of frames with a forbidden value in some field. The other frames are extreme but valid."""
GARBLED = 0.05
"""Share of frames whose bytes are no message, or not a whole one."""
LONGEST_LIST = 40

_STRANGE = (
    *(-1, 2**53, 2**63 - 1, 2**63, 2**64 - 1, -(2**63), 1.5, True, None, "", "x" * 5000, b"\xff", [], {}, [[]]),
    *(math.nan, math.inf, -math.inf, -1e30, -9999.0, 1e-3 + 1e-9, 0.5, 1e300, 5e-324, "\x00\n\x1b[31m", "NaN"),
)
_TYPES = {kind: inspect.type_info(kind) for kind in KINDS}
_encode = msgspec.msgpack.Encoder().encode


class ByzantineWorker:
    """`names` are what its texts are taken from: turns, groups and workers that there are, its own or others'."""

    def __init__(self, rng: Random, names: Callable[[], Sequence[str]]) -> None:
        self._rng = rng
        self._names = names
        self._leaves = 0
        self._poisoned: set[int] = set()

    def frame(self, kind: type) -> bytes:
        """The body of a frame that claims to be of this kind; perhaps a message, perhaps not."""
        rng = self._rng
        self._poisoned.clear()
        if rng.random() < POISONED:
            self._poisoned = {rng.randrange(24) for _ in range(rng.randint(1, 3))}
        self._leaves = 0
        body = _encode(self._value(_TYPES[kind]))
        return self._garbled(body) if rng.random() < GARBLED else body

    def _garbled(self, body: bytes) -> bytes:
        at = self._rng.randrange(len(body))
        return self._rng.choice(
            (body[:at], body[:at] + self._rng.randbytes(8) + body[at:], self._rng.randbytes(at + 1))
        )

    def _value(self, at: inspect.Type) -> Any:
        """Something of this type, or, in a poisoned place, something else."""
        rng = self._rng
        self._leaves += 1
        if self._leaves in self._poisoned:
            return rng.choice(_STRANGE)
        match at:
            case inspect.IntType(ge=least, le=most):
                return rng.choice((least or 0, 0, 1, 2, 3, rng.randrange(100), rng.randrange(2**53), 10**15, most))
            case inspect.FloatType(ge=least, gt=above, le=most):
                low, high = least if least is not None else above, most
                return rng.choice((low, high, 0.0, 0.5, -0.5, rng.random(), -100 * rng.random()))
            case inspect.StrType():
                return rng.choice((*self._names(), "", "x", "ü" * 4096, chr(rng.randrange(0xD800))))
            case inspect.BoolType():
                return rng.random() < 1 / 2
            case inspect.NoneType():
                return None
            case inspect.EnumType(cls=cls):
                return rng.choice([member.value for member in cls])
            case inspect.LiteralType(values=values):
                return rng.choice(list(values))
            case inspect.UnionType(types=types):
                return self._value(rng.choice(types))
            case inspect.ListType(item_type=item):
                return [self._value(item) for _ in range(rng.choice((0, 1, 1, 2, 3, rng.randrange(LONGEST_LIST))))]
            case inspect.DictType(key_type=key, value_type=value):
                return {str(self._value(key)): self._value(value) for _ in range(rng.randrange(4))}
            case inspect.BytesType():
                return rng.randbytes(4 * rng.randrange(8) + rng.choice((0, 0, 1)))
            case inspect.TupleType(item_types=types):
                return [self._value(item) for item in types]
            case inspect.StructType():
                return self._struct(at)
            case _:
                return rng.choice(_STRANGE)

    def _struct(self, at: inspect.StructType) -> Any:
        values = {field.name: self._value(field.type) for field in at.fields}
        if at.cls is wire.Tokens and self._rng.random() < 0.8:
            self._even_out(values)
        if not at.array_like:
            return values
        return [*([] if at.tag is None else [at.tag]), *values.values()]

    def _even_out(self, frame: dict[str, Any]) -> None:
        """Give a token frame columns that fit each other, since others are refused before anything else is checked."""
        rng = self._rng
        chunks = [
            Chunk(rng.choice((0, 1, 2, rng.randrange(100), INTEGER_MAX)), rng.choice((0, 3, 10**9)), count, version)
            for count in rng.choices((0, 1, 2, 40), k=rng.randrange(8))
            for version in rng.choices((0, 1, 2, INTEGER_MAX))
        ]
        ids = [rng.choice((0, 5, -1, 2**31 - 1)) if rng.random() < 1 / 8 else 5 for c in chunks for _ in range(c.count)]
        odd = rng.choice((math.nan, math.inf, -math.inf, 0.5, -1e30, -0.5))
        frame["chunks"] = Chunks.of(chunks)
        frame["token_ids"] = array("i", ids).tobytes()
        frame["logprobs"] = array("f", [odd if rng.random() < 1 / 8 else -0.5 for _ in ids]).tobytes()


def false_events(rng: Random, worker: WorkerId, epoch: int, trajectories: Sequence[str]) -> list[e.Event]:
    """Some lies of a worker, in this epoch; its tokens are of turns that it was never sent."""
    trajectory, version = rng.choice(trajectories), rng.choice((0, 1, 2, 3, INTEGER_MAX))
    group = group_of(trajectory)
    chunk = Chunk(
        rng.choice((10**6, INTEGER_MAX)),
        rng.choice((0, 1, INTEGER_MAX)),
        rng.choice((0, 1, CHUNK_TOKENS_MAX)),
        version,
        rng.choice((None, *FinishReason)),
        prefilled=rng.choice((0, 2**31 - 1)),
    )
    lies: list[e.Event] = [
        e.GroupTrained(worker=worker, epoch=epoch, group=group),
        e.WeightsPublished(worker=worker, epoch=epoch, version=version),
        e.TrainerFailed(worker=worker, epoch=epoch, error="so says a worker"),
        e.WorkerSlept(worker=worker, epoch=epoch),
        e.WorkerAwoke(worker=worker, epoch=epoch),
        e.WeightsApplied(worker=worker, epoch=epoch, version=INTEGER_MAX),
        e.WeightsFailed(worker=worker, epoch=epoch, version=version, reason="so says a worker"),
        e.TokensReceived(worker=worker, epoch=epoch, chunks=Chunks.of((chunk, chunk))),
        e.WorkerReported(
            worker=worker,
            epoch=epoch,
            capacity_turns=rng.choice((0, 1, 2**16)),
            pending=rng.choice((0, INTEGER_MAX)),
            executing=rng.choice((0, INTEGER_MAX)),
            progress=rng.choice((0, INTEGER_MAX)),
            accounts_ns={account: rng.choice((0, 1, INTEGER_MAX)) for account in Account},
            decoded_tokens=rng.choice((0, INTEGER_MAX)),
            loading=rng.choice(list(LoadPhase)),
            load_progress=rng.choice((0, INTEGER_MAX)),
        ),
    ]
    return rng.choices(lies, k=rng.randint(1, 6))
