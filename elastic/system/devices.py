"""Devices of a machine, by name, and how a process is kept to some of them.

A device's name is its kind and its number on the machine: `cuda:0`, `rocm:1`, or `cpu:2` for an arena, a share of a
machine's cores and memory that counts as a device.
"""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from enum import StrEnum
from typing import TypeAlias

DeviceName: TypeAlias = str

DEVICES_VARIABLE = "ELASTIC_DEVICES"
"""Environment variable with the names of the devices that a process may see, between commas."""
ASK_TIMEOUT_S = 20.0
"""For a vendor's tool to answer: it may have to load the driver."""
_NONE = "-1"


class DeviceKind(StrEnum):
    CUDA = "cuda"
    ROCM = "rocm"
    CPU = "cpu"


def kind_of(devices: Sequence[DeviceName]) -> DeviceKind:
    """Return the kind of these devices of one machine. Raises `ValueError` for names that are none."""
    kinds = {DeviceKind(name.partition(":")[0]) for name in devices}
    if len(kinds) != 1:
        raise ValueError(f"devices: found {', '.join(devices) or 'none'}; allowed: some of one kind")
    return kinds.pop()


def visible(devices: Sequence[DeviceName]) -> dict[str, str]:
    """Return the environment variables by which a process sees these devices alone; nothing for no devices.

    Numbers are those of NVIDIA's tool, which sorts by PCI bus. CPU arenas see no GPU.
    """
    if not devices:
        return {}
    numbers = ",".join(name.partition(":")[2] for name in devices)
    told = {DEVICES_VARIABLE: ",".join(devices)}
    match kind_of(devices):
        case DeviceKind.CUDA:
            return told | {"CUDA_DEVICE_ORDER": "PCI_BUS_ID", "CUDA_VISIBLE_DEVICES": numbers}
        case DeviceKind.ROCM:
            return told | {"HIP_VISIBLE_DEVICES": numbers, "CUDA_VISIBLE_DEVICES": numbers}
        case DeviceKind.CPU:
            return told | {"HIP_VISIBLE_DEVICES": _NONE, "CUDA_VISIBLE_DEVICES": _NONE}


def named_devices(environment: Mapping[str, str] = os.environ) -> tuple[DeviceName, ...]:
    """Return the devices that a process was told to see; none if it may see all."""
    return tuple(filter(None, environment.get(DEVICES_VARIABLE, "").split(",")))


def mismatch(environment: Mapping[str, str], gpus: int | None) -> str:
    """Return how what a process sees differs from what it was told to see; empty if it does not. It sees so many
    GPUs, if that is known."""
    devices = named_devices(environment)
    for variable, value in visible(devices).items():
        if (found := environment.get(variable)) != value:
            return f"{variable}: found {found!r}; allowed: {value!r}, of {', '.join(devices)}"
    if (
        devices
        and gpus is not None
        and gpus != (there_are := 0 if kind_of(devices) is DeviceKind.CPU else len(devices))
    ):
        return f"it sees {gpus} GPUs; allowed: {there_are}, of {', '.join(devices)}"
    return ""


def machine_gpus(environment: Mapping[str, str] = os.environ) -> tuple[DeviceName, ...]:
    """Return the GPUs of this machine that this process may see, as NVIDIA's or AMD's tool lists them. Blocks."""
    return _cuda(environment) or _rocm(environment)


def devices_here(
    kind: str, needed: int, gpus: Callable[[], Sequence[DeviceName]] = machine_gpus
) -> Sequence[DeviceName]:
    """Return this machine's GPUs of a kind, which may be fewer than `needed`; or so many arenas of the CPU, also for
    the kind "auto" where there is no GPU. `gpus` lists this machine's. Blocks."""
    found = [] if kind == DeviceKind.CPU else gpus()
    if not found and kind in ("auto", DeviceKind.CPU):
        return [f"{DeviceKind.CPU}:{number}" for number in range(needed)]
    return [device for device in found if kind in ("auto", kind_of([device]))]


def faults(devices: Sequence[DeviceName]) -> str:
    """Return what NVIDIA's tool says is wrong with these devices; empty where nothing is, or nobody says. Blocks."""
    if not devices or kind_of(devices) is not DeviceKind.CUDA:
        return ""
    query = "--query-gpu=index,ecc.errors.uncorrected.volatile.total"
    told = dict(line.split(", ", 1) for line in _asked("nvidia-smi", query, "--format=csv,noheader") if ", " in line)
    found: list[str] = []
    for name in devices:
        errors = told.get(name.partition(":")[2])
        if errors is None:
            found.append(f"nvidia-smi does not list {name} any more")
        elif errors.isdecimal() and int(errors):
            found.append(f"{name} has had {errors} uncorrected ECC errors")
    return "; ".join(found)


def model_of(devices: Sequence[DeviceName]) -> str:
    """Return what the vendor's tool calls the first of these devices, or the kind where nobody says. Blocks."""
    kind, number = kind_of(devices), devices[0].partition(":")[2]
    if kind is DeviceKind.CUDA:
        for line in _asked("nvidia-smi", "--query-gpu=index,name", "--format=csv,noheader"):
            index, _, name = line.partition(", ")
            if index == number and name:
                return name
    return kind


def _cuda(environment: Mapping[str, str]) -> tuple[DeviceName, ...]:
    rows = [line.split(", ") for line in _asked("nvidia-smi", "--query-gpu=index,uuid", "--format=csv,noheader")]
    found = [(row[0], row[1]) for row in rows if len(row) == 2 and row[0].isdecimal()]
    named = _among(environment, "CUDA_VISIBLE_DEVICES")
    return tuple(f"cuda:{number}" for number, uuid in found if named(number, uuid))


def _rocm(environment: Mapping[str, str]) -> tuple[DeviceName, ...]:
    rows = [line.partition(",")[0] for line in _asked("rocm-smi", "--showuniqueid", "--csv")]
    numbers = [row.removeprefix("card") for row in rows if row.startswith("card")]
    named = _among(environment, "HIP_VISIBLE_DEVICES")
    return tuple(f"rocm:{number}" for number in numbers if number.isdecimal() and named(number, ""))


def _among(environment: Mapping[str, str], variable: str) -> Callable[[str, str], bool]:
    """Whether a GPU, by its number and unique name, is among those that the variable leaves visible."""
    told = environment.get(variable)
    wanted = [] if told is None else [one.strip() for one in told.split(",")]
    return lambda number, uuid: (
        told is None or number in wanted or any(one and uuid.startswith(one) for one in wanted if not one.isdecimal())
    )


def _asked(*command: str) -> Sequence[str]:
    """Return the lines that a vendor's tool prints; none where there is no such tool, or no such device."""
    try:
        told = subprocess.run(command, capture_output=True, text=True, timeout=ASK_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ()
    return told.stdout.splitlines() if told.returncode == 0 else ()
