"""The assumed speed of a device: numbers with their sources, read from files, and figures computed from them.

A profile is a file (`local`, or one that `elastic profile` has written) or `DEVICE/MODEL`, such as `H100/Qwen3-8B` or
`H20/Qwen3-32B:tp2`, computed from the data sheets of both. Every number names its source, or says that it is an
estimate and gives its bounds.
"""

import math
import re
import tomllib
from collections.abc import Mapping
from functools import cached_property
from importlib import resources
from pathlib import Path
from typing import Any

import msgspec

from elastic.core.profiles import decode_step_s
from elastic.system.given import expanded, read_text

DATA = Path(str(resources.files("elastic.simulation") / "data"))
HARDWARE, MODELS, EFFICIENCY = "hardware.toml", "models.toml", "efficiency.toml"
BATCHES = (1, 8, 16, 32, 64, 128, 256)
BYTES_PER_WEIGHT = 2
FLOPS_PER_WEIGHT = 2
"""Operations of a forward pass per weight and token (Kaplan et al. 2020). Training takes three times as many."""


class ProfileError(ValueError):
    """A profile cannot be used; the message names the file, the key, what was found and what is allowed."""


class Number(msgspec.Struct, frozen=True):
    """A value with its `source`, or an `estimate` (with its reason) between `low` and `high`."""

    value: float
    source: str = ""
    estimate: str = ""
    low: float | None = None
    high: float | None = None


class EngineRates(msgspec.Struct, frozen=True, kw_only=True, dict=True):
    """The speed of an engine on its device. `decode_step_s` maps batch sizes to the time of an iteration, linear in
    between.

    Each token of context in the batch adds `context_s` to an iteration; every iteration costs `overhead_s` besides.
    Workers declare `tflops` and `memory_gb_per_s`.
    """

    prefill_tokens_per_s: float
    decode_step_s: dict[int, float]
    context_s: float = 0.0
    overhead_s: float = 0.0
    kv_tokens: int
    kv_block_tokens: int
    prefill_chunk_tokens: int
    max_batch: int
    max_pending: int
    max_context_tokens: int
    tflops: float | None = None
    memory_gb_per_s: float | None = None

    @cached_property
    def _known_decode_s(self) -> dict[int, float]:
        return {}

    def decode_s(self, batch: int) -> float:
        """Return the time of one iteration at a batch size, without the context's part."""
        known_s = self._known_decode_s.get(batch)
        if known_s is None:
            known_s = self._known_decode_s[batch] = decode_step_s(batch, self.decode_step_s)
        return known_s


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about devices, links and processes that takes time in a simulated run; times in seconds.

    A lease is granted `spot_queue_s`, … after it was asked for. `boot_s` runs from a worker process's start to its
    first words; serving hosts that the run starts itself are warm and may be lent after `serving_start_s`. `load_s` is
    what a pull takes besides its bytes. A group is trained in `train_group_s` and, on each of the trainer's GPUs,
    `train_tokens_per_s`. Environments answer in `reset_s` and `step_s`; with `environment_serial` one after the other,
    as they do on one event loop.
    """

    name: str
    prefill_tokens_per_s: float
    decode_step_s: dict[int, float]
    context_s: float
    overhead_s: float
    kv_tokens: float
    message_s: float
    spot_queue_s: float
    reserved_queue_s: float
    serverless_queue_s: float
    boot_s: float
    serving_start_s: float
    serving_boot_s: float
    trainer_boot_s: float
    exit_s: float
    keyframe_bytes: float
    delta_bytes: float
    link_bytes_per_s: float
    relay_bytes_per_s: float
    first_load_s: float
    load_s: float
    apply_s: float
    train_tokens_per_s: float
    train_group_s: float
    update_s: float
    reset_s: float
    step_s: float
    environment_serial: float
    reward_s: float


class ComputedProfile(Profile, frozen=True, kw_only=True):
    """The profile of a worker with `gpus` devices of one kind, with `tflops` and `memory_gb_per_s` in all."""

    model: str
    gpus: int
    tflops: float
    memory_gb_per_s: float


class Device(msgspec.Struct, frozen=True, kw_only=True):
    """The hardware of one provider's workers."""

    profile: Profile
    rates: EngineRates


TABLE = "decode_step_s"
KEYS = tuple(field for field in Profile.__struct_fields__ if field not in ("name", TABLE))
_RATES = ("prefill_tokens_per_s", "kv_tokens", "link_bytes_per_s", "relay_bytes_per_s", "train_tokens_per_s")
"""Numbers by which an amount of work is divided to get a time."""
_COMPUTED = re.compile(r"(?P<device>\w[\w.-]*)/(?P<model>\w[\w.-]*)(:(?P<parallel>.*))?")


def profile_names() -> list[str]:
    """Return the profiles that come with the package. Any device can be combined with any model."""
    devices, models = _read(DATA / HARDWARE), _read(DATA / MODELS)
    files = sorted(p.stem for p in DATA.glob("profile-*.toml"))
    return [name.removeprefix("profile-") for name in files] + [f"{d}/{m}" for d in devices for m in models]


def load_profile(name: str, gpus: int = 1) -> Profile:
    """Load a profile by name or path. `DEVICE/MODEL` has `gpus` devices per worker, unless the name ends in `:tpN`.

    Raises `ProfileError`.
    """
    if (path := _file_of(name)) is not None:
        return read_profile(path)
    computed = _COMPUTED.fullmatch(name)
    if computed is None or name.endswith(".toml"):
        raise ProfileError(f"no profile {name!r}: neither a file nor one of {', '.join(profile_names())}")
    return _computed(name, computed["device"], computed["model"], _parallel(name, computed["parallel"], gpus))


def _file_of(name: str) -> Path | None:
    """Return the file of a profile that has one."""
    shipped = DATA / f"profile-{name}.toml"
    if "/" not in name and shipped.is_file():
        return shipped
    try:
        path = expanded(Path(name))
    except ValueError as error:
        raise ProfileError(f"profile {name!r}: {error}") from error
    return path if path.is_file() else None


def _parallel(name: str, text: str | None, gpus: int) -> int:
    if text is None:
        return gpus
    count = text.removeprefix("tp")
    if count == text or not (count.isascii() and count.isdigit()) or int(count) < 1:
        raise ProfileError(f"{name}: found {text!r}; allowed: DEVICE/MODEL or DEVICE/MODEL:tpN, N from 1 on")
    return int(count)


def read_profile(path: Path) -> Profile:
    raw = _read(path)
    unknown = sorted(set(raw) - {*KEYS, TABLE})
    if unknown:
        raise ProfileError(f"{path}: {unknown[0]}: unknown key; allowed: {', '.join((*KEYS, TABLE))}")
    values: dict[str, float] = {key: _number(path, raw, key).value for key in KEYS}
    return Profile(name=path.stem.removeprefix("profile-"), decode_step_s=_steps(path, raw), **values)


def numbers_of(name: str) -> dict[str, Number]:
    """Return the numbers in the file of a profile; a computed profile has none. Raises `ProfileError`."""
    path = _file_of(name)
    if path is None:
        return {}
    raw = _read(path)
    return {key: _number(path, raw, key) for key in KEYS}


def with_numbers(profile: Profile, numbers: Mapping[str, float]) -> Profile:
    """Return the profile with these numbers replaced. Raises `ProfileError`."""
    for key, value in numbers.items():
        if key not in KEYS:
            raise ProfileError(f"{key}: unknown key; allowed: {', '.join(KEYS)}")
        if not math.isfinite(value) or value < 0 or (value == 0 and key in _RATES):
            allowed = "a positive number" if key in _RATES else "a finite number from 0 on"
            raise ProfileError(f"{key}: found {value}; allowed: {allowed}")
    return msgspec.structs.replace(profile, **numbers)


def write_profile(path: Path, numbers: Mapping[str, Number], decode_step_s: Mapping[int, Number]) -> None:
    """Write a profile that `read_profile` can read."""
    lines = [f"{key} = {_inline(number)}" for key, number in numbers.items()]
    lines += ["", "[decode_step_s]", *(f"{batch} = {_inline(n)}" for batch, n in decode_step_s.items())]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _inline(number: Number) -> str:
    parts = [f"value = {number.value!r}"]
    parts += [f"{key} = {_quoted(text)}" for key in ("source", "estimate") if (text := getattr(number, key))]
    parts += [f"{key} = {bound!r}" for key in ("low", "high") if (bound := getattr(number, key)) is not None]
    return "{ " + ", ".join(parts) + " }"


def _quoted(text: str) -> str:
    return msgspec.json.encode(text).decode()


def _read(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(read_text(path))
    except OSError as error:
        raise ProfileError(f"{path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ProfileError(f"{path}: not valid TOML: {error}") from error


def _number(path: Path, table: Mapping[str, Any], key: str, where: str = "") -> Number:
    name = f"{where}.{key}" if where else key
    if key not in table:
        raise ProfileError(f"{path}: {name}: missing; every profile needs it, with its source or as an estimate")
    try:
        number = msgspec.convert(table[key], Number)
    except msgspec.ValidationError as error:
        allowed = "{ value = 1.0, source = … } or { value = 1.0, estimate = …, low = …, high = … }"
        raise ProfileError(f"{path}: {name}: {error}; allowed: {allowed}") from error
    if not math.isfinite(number.value) or number.value < 0:
        raise ProfileError(f"{path}: {name}: found {number.value}; allowed: a finite number from 0 on")
    if number.value == 0 and key in _RATES:
        raise ProfileError(f"{path}: {name}: found 0; allowed: a positive number, as time is divided by it")
    if bool(number.source) == bool(number.estimate):
        raise ProfileError(f"{path}: {name}: needs either a source or an estimate with low and high")
    if number.estimate and (number.low is None or number.high is None):
        raise ProfileError(f"{path}: {name}: an estimate needs low and high")
    if number.low is not None and number.high is not None and not number.low <= number.value <= number.high:
        raise ProfileError(f"{path}: {name}: {number.value} is not between {number.low} and {number.high}")
    return number


def _steps(path: Path, raw: Mapping[str, Any]) -> dict[int, float]:
    table = raw.get("decode_step_s")
    if not isinstance(table, dict) or not table:
        raise ProfileError(f"{path}: decode_step_s: missing; give the time of an iteration for at least one batch size")
    steps: dict[int, float] = {}
    for batch in table:
        if not batch.isdecimal() or int(batch) < 1:
            raise ProfileError(f"{path}: decode_step_s.{batch}: allowed: batch sizes from 1 on")
        steps[int(batch)] = _number(path, table, batch, "decode_step_s").value
        if steps[int(batch)] <= 0:
            raise ProfileError(f"{path}: decode_step_s.{batch}: found 0; allowed: a positive time")
    return steps


# Device and model


def _computed(name: str, device_name: str, model_name: str, gpus: int) -> ComputedProfile:
    """Compute a roofline: prefill and training by arithmetic, decode by the memory that must be read, each at the
    share of the device's peak that `efficiency.toml` estimates."""
    device = _sheet(DATA / HARDWARE, device_name, "device")
    model = _sheet(DATA / MODELS, model_name, "model")
    share = {key: _number(DATA / EFFICIENCY, _read(DATA / EFFICIENCY), key).value for key in _read(DATA / EFFICIENCY)}
    flops_per_s = device["bf16_tflops"] * 1e12 * gpus
    bytes_per_s = device["memory_gb_per_s"] * 1e9 * gpus * share["memory_bandwidth_share"]
    weights_bytes = model["parameters"] * BYTES_PER_WEIGHT
    kv_bytes = 2 * model["layers"] * model["kv_heads"] * model["head_dim"] * BYTES_PER_WEIGHT
    kv_room = device["memory_gb"] * 1e9 * gpus * share["memory_share"] - weights_bytes
    if kv_room <= 0:
        raise ProfileError(
            f"{name}: {weights_bytes / 1e9:.1f} GB of weights do not fit into {share['memory_share']:.0%} of "
            f"{gpus} x {device['memory_gb']:g} GB; allowed: more devices in tensor parallel, such as "
            f"{device_name}/{model_name}:tp{2 * gpus}"
        )
    token_flops = FLOPS_PER_WEIGHT * model["parameters"]
    read_s = weights_bytes / bytes_per_s
    compute_s = token_flops / (flops_per_s * share["prefill_flops_share"])
    return ComputedProfile(
        name=name,
        model=model_name,
        gpus=gpus,
        tflops=device["bf16_tflops"] * gpus,
        memory_gb_per_s=device["memory_gb_per_s"] * gpus,
        prefill_tokens_per_s=flops_per_s * share["prefill_flops_share"] / token_flops,
        decode_step_s={batch: max(read_s, batch * compute_s) for batch in BATCHES},
        context_s=kv_bytes / bytes_per_s,
        overhead_s=share["iteration_overhead_s"],
        kv_tokens=float(int(kv_room / kv_bytes)),
        keyframe_bytes=weights_bytes,
        delta_bytes=weights_bytes * share["delta_share"],
        train_tokens_per_s=flops_per_s / gpus * share["training_flops_share"] / (3 * token_flops),
        apply_s=weights_bytes * 2 / bytes_per_s,
        **{key: share[key] for key in KEYS if key in share},
    )


def _sheet(path: Path, name: str, kind: str) -> dict[str, float]:
    raw = _read(path)
    if name not in raw:
        raise ProfileError(f"no {kind} {name!r} in {path}; there are: {', '.join(raw)}")
    required = {"device": ("bf16_tflops", "memory_gb", "memory_gb_per_s")}.get(
        kind, ("parameters", "layers", "kv_heads", "head_dim")
    )
    return {key: _number(path, raw[name], key, name).value for key in required}
