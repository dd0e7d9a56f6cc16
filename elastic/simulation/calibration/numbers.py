"""The numbers of a profile: measured ones, and estimates from another profile for those that were not measured."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from elastic.simulation.calibration.fit import IterationSample, Rates
from elastic.simulation.performance.profile import (
    KEYS,
    TABLE,
    Number,
    load_profile,
    numbers_of,
    read_profile,
    write_profile,
)

UNKNOWN_FACTOR = 10.0
"""An estimate of which nothing is known lies within this factor of its value."""

DEFAULT_BASE = "local"

ENVIRONMENT_SERIAL = Number(1.0, source="elastic.runtime.rollout: all environments share one event loop")


class CalibrationError(Exception):
    """The measurement lacks a number that a profile needs. The message names the number."""


class EngineNumbers(msgspec.Struct, frozen=True, kw_only=True):
    """An engine on its device. `decode_step_s` maps batch sizes to the time of an iteration."""

    prefill_tokens_per_s: Number
    decode_step_s: dict[int, Number]
    context_s: Number
    overhead_s: Number
    kv_tokens: Number

    def by_key(self) -> dict[str, Number]:
        return {key: getattr(self, key) for key in self.__struct_fields__ if key != TABLE}


class Measured(msgspec.Struct, frozen=True, kw_only=True):
    """A whole profile, with where each of its numbers is from."""

    numbers: dict[str, Number]
    decode_step_s: dict[int, Number]

    @property
    def estimates(self) -> dict[str, Number]:
        """Numbers that were not measured, by their keys in the file."""
        steps = {f"{TABLE}.{batch}": number for batch, number in self.decode_step_s.items()}
        return {key: number for key, number in (self.numbers | steps).items() if number.estimate}


class Base:
    """A profile that fills in what was not measured; its numbers are marked as estimates.

    `name` is as for `elastic simulate --profile`. Raises `ProfileError` for an unknown profile.
    """

    def __init__(self, name: str) -> None:
        self._profile = load_profile(name)
        self._name = name
        self._numbers = numbers_of(name)

    def estimate(self, key: str, why: str) -> Number:
        """Return the profile's number, with its own bounds or else those of `UNKNOWN_FACTOR`."""
        value = float(getattr(self._profile, key))
        known = self._numbers.get(key, Number(value))
        low = value / UNKNOWN_FACTOR if known.low is None else known.low
        high = value * UNKNOWN_FACTOR if known.high is None else known.high
        return Number(value, estimate=f"{why}; as in profile {self._name}", low=low, high=high)

    def value(self, key: str) -> float:
        return float(getattr(self._profile, key))


def speeds(rates: Rates, samples: Sequence[IterationSample], how: str) -> tuple[Number, dict[int, Number]]:
    """What was fitted of prefill and decoding, `how` it says; estimates where it is hidden by how much times vary."""
    prefill, decodes = rates.prefill_tokens_per_s, rates.decode_step_s
    if rates.prefill_hidden:
        slowest = min(prefill, max(sample.prefilled * sample.iterations / sample.seconds for sample in samples))
        why = "iterations took no longer with more tokens to prefill than they vary by themselves"
        prefill_number = Number(prefill, estimate=why, low=slowest, high=prefill)
    else:
        prefill_number = Number(prefill, source=how)
    why = "what an iteration takes all the same, or by its prefills, hides what decoding adds"
    steps = {
        batch: Number(step_s, estimate=why, low=0.0, high=step_s + rates.noise_s)
        if batch in rates.batches_hidden
        else Number(step_s, source=how)
        for batch, step_s in decodes.items()
    }
    return prefill_number, steps


def complete(engine: EngineNumbers, around: Mapping[str, Number], base: Base, why: str) -> Measured:
    """The profile of an engine and what is `around` it; what that lacks is estimated, for the reason `why`."""
    known = engine.by_key() | dict(around)
    numbers = {key: known[key] if key in known else base.estimate(key, why) for key in KEYS}
    return Measured(numbers=numbers, decode_step_s=engine.decode_step_s)


def save(measured: Measured, path: Path) -> None:
    """Write the profile, and read it as `elastic simulate` will. Raises `ProfileError`."""
    write_profile(path, measured.numbers, measured.decode_step_s)
    read_profile(path)
