"""The world of a run that others train, alone on its stage."""

import dataclasses
import hashlib
from collections.abc import Callable
from functools import partial
from random import Random
from typing import Any

import msgspec

from elastic.config import IMPORTED, OUTSIDE, Config, validate
from elastic.core import events as e
from elastic.core.types import WorkerId
from elastic.protocol.offers import OfferedWeights, read_source, source_of_offer
from elastic.system.host import HOST
from elastic.testing.faults.kinds import Fault, FaultKind
from elastic.testing.faults.outcome import Lived
from elastic.testing.faults.shell.answers import host_of
from elastic.testing.faults.shell.checker import require
from elastic.testing.faults.shell.injection import inject
from elastic.testing.faults.shell.loops import Machine
from elastic.testing.faults.shell.models import ModelTrainer
from elastic.testing.faults.shell.outside.client import HOLD_S, OutsideClient
from elastic.testing.faults.shell.outside.directories import OutsideDirectories
from elastic.testing.faults.shell.outside.importer import WorldImporter, synced
from elastic.testing.faults.shell.outside.plan import OutsidePlan
from elastic.testing.faults.shell.process import Process
from elastic.testing.faults.shell.stage import Stage
from elastic.testing.faults.shell.world import BEGIN_AGAIN_S, World, settings_of
from elastic.worker.agent import BuildEngine
from elastic.worker.connection import Ticket
from elastic.worker.trainer_host import TrainerHost

DONE = "the trainer outside has all that it wanted"
"""The reason for which it stops the run."""


class OutsideWorld(World):
    def __init__(self, plan: OutsidePlan, stage: Stage) -> None:
        self._outside = plan
        now_ns = lambda: stage.clock.now_ns  # noqa: E731
        found = lambda what: stage.found.append(AssertionError(what))  # noqa: E731
        self.directories = OutsideDirectories(stage.directory, now_ns, Random(f"{plan.seed}/directories"), found)
        super().__init__(plan, stage)
        self.client = OutsideClient(plan, Random(f"{plan.seed}/client"), self.directories, now_ns, found)

    def _configured(self) -> Config:
        plan, theirs = self._outside, str(self.directories.root)
        settings = settings_of(plan, str(self.directories.base))
        more: dict[str, dict[str, Any]] = {
            "environment": {"kind": OUTSIDE, "name": OUTSIDE},
            "seeding": {"policy": "none"},
            "doors": {"roots": [theirs], "idle_s": plan.lull_s},
            "trainer": {"kind": IMPORTED, IMPORTED: {"roots": [theirs]}},
            "front": {"chats_max": 0, "hold_s": HOLD_S},
            "provisioning": {"hold": "rollouts"},
            "journal": {"forget_mb": plan.forget_mb},
            "rollout": {"max_turns": 1},
        }
        del settings["environment"], settings["seeding"], settings["rewards"]
        sections = {name: settings.get(name, {}) | more.get(name, {}) for name in (*settings, *more)}
        return validate(Config, sections, "chaos")

    def begin(self) -> None:
        super().begin()
        self._agents = self.begin_process("client", Machine(self.clock), self.client.live)

    def inject(self, fault: Fault) -> bool:
        if fault.kind is FaultKind.KILL_FRONT:
            return self.client.fronts.kill(fault.target, fault.duration_s)
        return inject(self, fault)

    def _begin_worker(self, name: str, bought: Ticket, trains: bool) -> Process:
        process = super()._begin_worker(name, bought, trains)
        if trains:
            host = host_of(process.loop.machine, self.network)
            process.loop.context.run(HOST.set, dataclasses.replace(host, fsync=synced))
        return process

    def _trainer_host(
        self,
        worker: WorkerId,
        engine: BuildEngine,
        make: Callable[..., ModelTrainer] = ModelTrainer,
        shares_device: bool = False,
    ) -> TrainerHost:
        """An importer, in place of a modelled trainer."""

        def has(version: int, bits: bytes) -> None:
            self._hosts[worker] = host
            self._weights_of[host.publisher, version] = bits
            self.directories.published(version, bits)

        def importer(_: Config) -> WorldImporter:
            self._building[worker] = None
            return WorldImporter(self.directories.base, self.directories.root, has)

        build = partial(self._no_engine, worker)
        host = TrainerHost(self.config, self.run.path, True, importer, build, shares_device, max(1.0, self.rare_s))
        return host

    def ended(self, process: Process) -> None:
        super().ended(process)
        if process is self._agents:
            self._stop()

    def _stop(self) -> None:
        """Stop the run, as often as it takes: a process of it may die before it has heard."""
        if self.result is None:
            if self.shell is not None and self.address:
                self.shell.stop(DONE)
            self.after(BEGIN_AGAIN_S, self._stop)

    def check(self) -> None:
        require(self.result == DONE, f"the run failed: {self.result}")
        require(not any(cloud.leases for cloud in self.clouds.values()), "a lease is left")
        require(self.client.answered > 0, "no request was answered")

    def outcome(self) -> Lived:
        """The journal's events, without what is of this machine: the world's place, and its files' inodes."""
        history, events, place = hashlib.blake2b(digest_size=16), 0, str(self.stage.directory).encode()
        with self.run.journals() as journals:
            for journal in journals:
                for t_ns, event in journal.events():
                    history.update(msgspec.msgpack.encode((t_ns, _without_look(event))).replace(place, b""))
                    events += 1
        return Lived(
            events=events, faults=self.stage.struck, history=history.hexdigest(), incarnations=self.incarnations
        )


def _without_look(event: e.Event) -> e.Event:
    if not isinstance(event, e.VersionOffered):
        return event
    named = read_source(event.source).directory
    return msgspec.structs.replace(event, source=source_of_offer(OfferedWeights(named)), look="")
