"""Identifiers: a prefix for the kind of thing, then the time and chance. They sort by age, and nobody guesses one."""

import re
import secrets
import time

_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"
_TIME_CHARACTERS, _RANDOM_CHARACTERS = 10, 16
RUN, PROJECT, KEY, AUDIT, REQUEST = "run", "proj", "key", "aud", "req"
WEBHOOK, DELIVERY = "hook", "msg"
USER, MEMBER, UPLOAD = "user", "mem", "upl"
JOB = "job"


def new_id(prefix: str, unix_ms: int | None = None) -> str:
    """A new identifier, such as `run_01JD3K…`; a later one sorts after an earlier one of another millisecond."""
    ms = time.time_ns() // 1_000_000 if unix_ms is None else unix_ms
    random = secrets.randbits(5 * _RANDOM_CHARACTERS)
    return f"{prefix}_{_base32(ms, _TIME_CHARACTERS)}{_base32(random, _RANDOM_CHARACTERS)}"


def pattern(prefix: str) -> str:
    """Return a regular expression of what could be an identifier of this kind."""
    return rf"{prefix}_[{_ALPHABET}]{{{_TIME_CHARACTERS + _RANDOM_CHARACTERS}}}"


def is_id(text: str, prefix: str) -> bool:
    """Whether `text` could be an identifier of this kind."""
    return re.fullmatch(pattern(prefix), text) is not None


def _base32(number: int, characters: int) -> str:
    return "".join(_ALPHABET[number >> 5 * place & 31] for place in reversed(range(characters)))
