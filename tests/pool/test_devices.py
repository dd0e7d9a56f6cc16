"""Devices: which a node has, what its residents see of them, and who refuses to start."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import hypothesis.strategies as st
import pytest
from hypothesis import given

from elastic.compose.pool_config import PoolConfig, pool_devices
from elastic.config import ConfigError
from elastic.core.cluster.types import PhaseKind
from elastic.pool import messages as w
from elastic.pool.devices import DeviceAllotment, StartDeath, unfit
from elastic.system.devices import DEVICES_VARIABLE, faults, kind_of, machine_gpus, mismatch, visible
from tests.pool.test_node_agent import kept

NVIDIA = """#!/bin/sh
test "$1" = --query-gpu=index,uuid || exit 9
printf '0, GPU-aa\\n1, GPU-ab\\n2, GPU-ba\\n3, GPU-bb\\n'
"""
ROCM = """#!/bin/sh
printf 'device,Unique ID\\ncard0,0x1\\ncard1,0x2\\n'
"""
COUNTS = st.lists(st.integers(1, 3), max_size=8)


def config(devices: str, gpus: int = 2) -> PoolConfig:
    nodes = {"nodes": 1, "gpus": gpus, "usd_per_gpu_hour": 1.0, "memory_gb": 8}
    return PoolConfig.model_validate({"pool": {"devices": devices, "rollout": nodes, "train": nodes}})


def stand_in(path: Path, name: str, text: str) -> None:
    (path / name).write_text(text)
    (path / name).chmod(0o755)


def test_a_machine_s_gpus_are_those_that_its_tool_lists_and_that_this_process_may_see(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    stand_in(tmp_path, "nvidia-smi", "#!/bin/sh\nexit 9\n")
    assert machine_gpus({}) == ()
    stand_in(tmp_path, "rocm-smi", ROCM)
    assert machine_gpus({}) == ("rocm:0", "rocm:1")
    assert machine_gpus({"HIP_VISIBLE_DEVICES": "1"}) == ("rocm:1",)
    stand_in(tmp_path, "nvidia-smi", NVIDIA)
    assert machine_gpus({}) == ("cuda:0", "cuda:1", "cuda:2", "cuda:3")
    assert machine_gpus({"CUDA_VISIBLE_DEVICES": "3,1"}) == ("cuda:1", "cuda:3")
    assert machine_gpus({"CUDA_VISIBLE_DEVICES": "GPU-b"}) == ("cuda:2", "cuda:3")
    assert pool_devices(config("auto")) == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


def test_a_pool_whose_nodes_need_more_devices_than_there_are_is_refused_in_numbers() -> None:
    two = ("cuda:0", "cuda:1")
    assert pool_devices(config("all"), lambda: two) == ()
    assert pool_devices(config("cpu"), lambda: two) == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    assert pool_devices(config("auto"), lambda: ()) == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    assert pool_devices(config("cuda", gpus=1), lambda: two) == [*two]
    with pytest.raises(ConfigError, match=r"pool.devices: auto: the nodes .* need 4 GPUs; found cuda:0, cuda:1;"):
        pool_devices(config("auto"), lambda: two)
    with pytest.raises(ConfigError, match="need 2 GPUs; found none"):
        pool_devices(config("rocm", gpus=1), lambda: two)


@given(COUNTS, st.data())
def test_no_device_is_two_nodes_and_none_that_was_set_aside_is_given(counts: list[int], data: st.DataObject) -> None:
    allotment, there = DeviceAllotment([f"cpu:{number}" for number in range(6)]), dict[str, tuple[str, ...]]()
    for number, count in enumerate(counts):
        free = list(allotment.free)
        if allotment.take(f"node-{number}", count):
            there[f"node-{number}"] = allotment.of(f"node-{number}")
            assert set(there[f"node-{number}"]) <= set(free)
        else:
            assert len(free) < count
        for node in [node for node in there if data.draw(st.booleans())]:
            if data.draw(st.booleans()):
                allotment.put_aside(node, "ill")
            allotment.give_back(node)
            del there[node]
        taken = [device for devices in there.values() for device in devices]
        assert len(taken) == len(set(taken))
        assert not set(allotment.free) & {*taken, *allotment.set_aside}
    ill = list(allotment.set_aside)
    assert all(allotment.put_back(device) for device in ill)
    assert not any(allotment.put_back(device) for device in ill)


@pytest.mark.parametrize(
    ("devices", "gpus", "told"),
    [
        (("cuda:2", "cuda:3"), 2, {"CUDA_VISIBLE_DEVICES": "2,3", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}),
        (("rocm:1",), 1, {"HIP_VISIBLE_DEVICES": "1", "CUDA_VISIBLE_DEVICES": "1"}),
        (("cpu:0",), 0, {"HIP_VISIBLE_DEVICES": "-1", "CUDA_VISIBLE_DEVICES": "-1"}),
    ],
)
def test_a_process_sees_its_node_s_devices_alone_and_knows_if_it_sees_others(
    devices: tuple[str, ...], gpus: int, told: dict[str, str]
) -> None:
    assert visible(devices) == {DEVICES_VARIABLE: ",".join(devices), **told}
    assert not mismatch(visible(devices), gpus)
    assert not mismatch({}, gpus)
    assert f"it sees {gpus + 1} GPUs; allowed: {gpus}" in mismatch(visible(devices), gpus + 1)
    for variable in told:
        assert f"{variable}: found '0,9'" in mismatch({**visible(devices), variable: "0,9"}, gpus)


def test_a_device_is_unfit_if_residents_die_there_alone_or_its_fault_is_known() -> None:
    once, again, other = StartDeath("a", "it died"), StartDeath("a", "it died again"), StartDeath("b", "it died, too")
    ill = StartDeath("a", "it died", "cuda:1 has had 3 uncorrected ECC errors")
    assert not unfit([], {"a", "b"})
    assert not unfit([once], {"a"})
    assert not unfit([ill], ())
    assert not unfit([once, again], ())
    assert not unfit([once, again], {"c"}), "one job that dies is at fault itself"
    assert not unfit([once, other], ()), "if all of them die everywhere, no device is at fault"
    two = "2 residents in a row have died there as they started"
    assert unfit([once, again], {"a"}) == f"{two}, and not elsewhere: it died again"
    assert unfit([once, other], {"c"}) == f"{two}, and not elsewhere: it died, too"
    assert unfit([once, ill], ()) == f"{two}: {ill.fault}"


def test_what_the_vendor_s_tool_says_is_wrong_with_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    stand_in(tmp_path, "nvidia-smi", "#!/bin/sh\nprintf '0, 0\\n1, 3\\n2, [N/A]\\n'\n")
    assert not faults(("cuda:0", "cuda:2"))
    assert not faults(("cpu:1",))
    assert faults(("cuda:0", "cuda:1")) == "cuda:1 has had 3 uncorrected ECC errors"
    assert faults(("cuda:3",)) == "nvidia-smi does not list cuda:3 any more"


async def test_the_node_agent_of_a_resident_that_dies_as_it_starts_says_what_is_wrong_with_its_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    stand_in(tmp_path, "nvidia-smi", "#!/bin/sh\nprintf '0, 3\\n'\n")
    async with kept(tmp_path, ("cuda:0",)) as node:
        _, gone = await node.resident(PhaseKind.ROLLOUT, status=1)
        assert (gone.code, gone.fault) == (1, "cuda:0 has had 3 uncorrected ECC errors")
        _, script = await node.resident(PhaseKind.TRAIN, script=True, status=1)
        assert not script.fault


def test_devices_of_two_kinds_or_of_none_are_not_a_node_s() -> None:
    for devices in (("cuda:0", "cpu:0"), (), ("tpu:0",)):
        with pytest.raises(ValueError, match=r"found cuda:0, cpu:0|found none|tpu"):
            kind_of(devices)


async def test_residents_see_their_node_s_devices_alone_whatever_their_job_passes_on(
    tmp_path: Path,
) -> None:
    for number, devices in enumerate((("cuda:2", "cuda:3"), ("cpu:1",), ())):
        (path := tmp_path / str(number)).mkdir()
        async with kept(path, devices) as node:
            for phase, script in ((PhaseKind.ROLLOUT, False), (PhaseKind.TRAIN, False), (PhaseKind.TRAIN, True)):
                found, _ = await node.resident(phase, script=script, CUDA_VISIBLE_DEVICES="7")
                want = visible(devices) or {"CUDA_VISIBLE_DEVICES": "7"}
                assert want.items() <= found.items()
                assert (DEVICES_VARIABLE in found) == bool(devices)
            _, gone = await node.resident(PhaseKind.TRAIN, status=w.UNFIT_STATUS)
            assert gone.cause.startswith("it sees other devices than its node has")


@pytest.mark.slow
def test_a_resident_that_sees_other_devices_refuses_to_start() -> None:
    """A real resident: the variables that a vendor's library reads are a process's own."""
    ours, theirs = socket.socketpair()
    seen = {**visible(("cuda:0",)), "CUDA_VISIBLE_DEVICES": "0,1"}
    environment = {**os.environ, **seen, w.NODE_AGENT_VARIABLE: str(theirs.fileno())}
    command = [sys.executable, "-m", "elastic.cli", "pool-resident"]
    with ours, theirs:
        ended = subprocess.run(
            command,
            env=environment,
            pass_fds=[theirs.fileno()],
            capture_output=True,
            text=True,
            check=False,
            timeout=120,
        )
    assert ended.returncode == w.UNFIT_STATUS, ended.stderr
    assert "CUDA_VISIBLE_DEVICES: found '0,1'; allowed: '0', of cuda:0" in ended.stderr + ended.stdout
