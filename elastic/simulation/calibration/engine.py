"""Measures the configured engine in a process of its own, whose end frees the device in any case."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

from elastic.compose.plan import read_model_config
from elastic.config import Config, EngineConfig
from elastic.core.types import WeightMode
from elastic.simulation.calibration.fit import FitError, IterationSample, Rates, fit_rates
from elastic.simulation.calibration.numbers import (
    DEFAULT_BASE,
    ENVIRONMENT_SERIAL,
    Base,
    CalibrationError,
    EngineNumbers,
    Measured,
    complete,
    save,
    speeds,
)
from elastic.simulation.calibration.probe import REPEATS, Observe, Probe, Probed
from elastic.simulation.performance.profile import Number
from elastic.system.imports import importing
from elastic.weights.source import TensorSource

START_TIMEOUT_S = 600.0
"""How long an engine may take to start, with compilation and weights."""
LOAD_TIMEOUT_S = 300.0
"""How long one load of the probe may take."""
EXIT_TIMEOUT_S = 10.0
VERSION = 0


class _Step(NamedTuple):
    done: int
    total: int
    what: str


class _Outcome(NamedTuple):
    probed: Probed
    weights_bytes: int


class _Failure(NamedTuple):
    message: str


_Message: TypeAlias = _Step | _Outcome | _Failure


def profile_engine(
    config: Config, path: Path, *, base: str = DEFAULT_BASE, observe: Observe = lambda *_: None, repeats: int = REPEATS
) -> Measured:
    """Measure the configured engine alone, and write a profile to `path` in which all else is estimated by `base`.

    Raises as `measure_engine`, and `ProfileError` where there is no such base.
    """
    around = Base(base)
    outcome = _drive(config, observe, repeats)
    numbers = _of_weights(outcome.weights_bytes, around)
    numbers["environment_serial"] = ENVIRONMENT_SERIAL
    engine = engine_numbers(outcome.probed, config.engine)
    measured = complete(engine, numbers, around, "the engine alone was measured")
    save(measured, path)
    return measured


def measure_engine(config: Config, *, observe: Observe = lambda *_: None, repeats: int = REPEATS) -> EngineNumbers:
    """The engine's own numbers, as `profile_run` takes them.

    Blocks; `observe` is called meanwhile. Raises `ConfigError` without a base policy, `CalibrationError` when the
    engine cannot be measured.
    """
    return engine_numbers(_drive(config, observe, repeats).probed, config.engine)


def _drive(config: Config, observe: Observe, repeats: int) -> _Outcome:
    model = read_model_config(config)
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(
        target=_measure, args=(theirs, model, config.model.checkpoint, config.engine, repeats), daemon=True
    )
    process.start()
    theirs.close()
    try:
        outcome = _follow(ours, observe)
        process.join(EXIT_TIMEOUT_S)
    finally:
        process.kill()
        process.join()
        ours.close()
    return outcome


def engine_numbers(probed: Probed, settings: EngineConfig) -> EngineNumbers:
    """The coefficients that fit the probe's samples best. Raises `CalibrationError`."""
    decodes = [sample for sample in probed.samples if sample.batch]
    if not decodes or len(decodes) == len(probed.samples):
        raise CalibrationError(
            f"engine.max_context_tokens: found {settings.max_context_tokens}, and {probed.kv_tokens} tokens of KV "
            "cache; that is too little for a prompt and some tokens after it"
        )
    batches = sorted({round(sample.batch) for sample in decodes})
    by_context = len({sample.context for sample in decodes}) > len(batches)
    try:
        rates = fit_rates(probed.samples, batches, context=by_context, overhead=True)
    except FitError as error:
        raise CalibrationError(f"{probed.engine}: {error}") from error
    how = f"measured: {probed.engine}, medians, fitted with a median error of {rates.error:.2%}"
    if probed.left_out:
        how += f"; not taken as meant: {', '.join(map(str, probed.left_out))}"
    prefill, steps = speeds(rates, probed.samples, how)
    return EngineNumbers(
        prefill_tokens_per_s=prefill,
        decode_step_s=steps,
        context_s=_context_s(rates, decodes, how),
        overhead_s=_overhead_s(rates, how),
        kv_tokens=Number(float(probed.kv_tokens), source=f"the engine's statistics: {probed.engine}"),
    )


def _context_s(rates: Rates, decodes: Sequence[IterationSample], how: str) -> Number:
    longest = max(sample.context for sample in decodes)
    if rates.context_s > 0:
        return Number(rates.context_s, source=f"{how}; up to {longest:.0f} tokens of context in a batch")
    why = "iterations took no longer with more context than they vary by themselves"
    return Number(0.0, estimate=why, low=0.0, high=rates.noise_s / longest)


def _overhead_s(rates: Rates, how: str) -> Number:
    if rates.overhead_s > 0:
        return Number(rates.overhead_s, source=f"{how}; what an iteration takes that prefills next to nothing")
    why = "prefills took no longer than their tokens, but for what they vary by themselves"
    return Number(0.0, estimate=why, low=0.0, high=rates.noise_s)


def _of_weights(weights_bytes: int, base: Base) -> dict[str, Number]:
    whole = float(weights_bytes)
    delta = whole * min(1.0, base.value("delta_bytes") / base.value("keyframe_bytes"))
    return {
        "keyframe_bytes": Number(whole, estimate="the weights before compression", low=0.5 * whole, high=whole),
        "delta_bytes": Number(delta, estimate="the share of a keyframe that the base profile has", low=0.0, high=whole),
    }


def _follow(connection: Connection, observe: Observe) -> _Outcome:
    timeout_s = START_TIMEOUT_S
    while True:
        try:
            if not connection.poll(timeout_s):
                raise CalibrationError(f"the engine's process has said nothing for {timeout_s:g} s")
            message: _Message = connection.recv()
        except EOFError as error:
            raise CalibrationError("the engine's process has died; its own messages are above") from error
        match message:
            case _Step():
                observe(*message)
                timeout_s = LOAD_TIMEOUT_S
            case _Failure(why):
                raise CalibrationError(why)
            case _Outcome():
                return message


# In the engine's process.


def _measure(
    connection: Connection, model: Mapping[str, Any], checkpoint: Path, settings: EngineConfig, repeats: int
) -> None:
    # Ctrl-C goes to the whole group: the process that started this one ends it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # Standard output belongs to the command; what engines print goes beside it.
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    try:
        outcome = _probe_engine(
            model, checkpoint, settings, lambda done, total, what: connection.send(_Step(done, total, what)), repeats
        )
    except Exception as error:
        connection.send(_Failure(str(error) or type(error).__name__))
    else:
        connection.send(outcome)


def _probe_engine(
    model: Mapping[str, Any], checkpoint: Path, settings: EngineConfig, observe: Observe, repeats: int
) -> _Outcome:
    with importing():
        import torch

        from elastic.engine import create_engine
        from elastic.engine.model.checkpoint import read_config, read_tensors

    tensors = {
        name: tensor.to(torch.bfloat16) for name, tensor in read_tensors(checkpoint, read_config(checkpoint)).items()
    }
    engine = create_engine(model, settings)
    try:
        probe = Probe(engine, settings, model["vocab_size"])
        engine.start(probe.sink)
        engine.load_version(TensorSource(VERSION, tensors), WeightMode.FINISH)
        probed = probe.measure(observe, repeats)
    finally:
        engine.close()
    return _Outcome(probed, sum(tensor.nbytes for tensor in tensors.values()))
