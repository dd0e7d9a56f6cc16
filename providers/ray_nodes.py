"""A pool's nodes on a Ray cluster: a placement group for each, with an actor that keeps the node's agent in it.

Group and actor are detached and have one name: they outlive the pool's process, and its next one finds them. An actor
whose node agent has ended gives its group back itself, in case nobody else does.
"""

import asyncio
import contextlib
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgspec
from pydantic import Field

from elastic.core.cluster.types import NodeKind
from elastic.pool.machines import NodeTicket
from elastic.pool.node_requests import NodeClusterSilent, NodeRequest
from elastic.system.devices import DeviceKind
from elastic.system.plain_values import told
from elastic.system.supervision import how_ended
from providers.ray_actors import (
    ActorQuestions,
    ActorsSaid,
    ActorStatus,
    RayClusterSettings,
    WorkerActor,
    end_actor,
    named_actors,
    node_resources,
    places,
    told_resources,
)
from providers.ray_connection import HEAD, RayConnection, RayUnusable, ray
from providers.vendor_calls import call

TICKET_VARIABLE = "ELASTIC_TICKET"
LAST_WORDS_S, LAST_WORDS_CHARACTERS = 1.0, 300
PLACED, PENDING, REMOVED = "CREATED", ("PENDING", "PREPARED"), "REMOVED"
"""What Ray calls the states of placement groups."""


class RayNodesSettings(RayClusterSettings):
    """What is asked for a node: its pool's `gpus` and `memory_gb`, and what is given here."""

    runtime_env: dict[str, Any] = Field(
        default_factory=dict, description="what Ray ships to nodes, such as `py_modules`, `working_dir`, `pip`"
    )
    site_label: str = Field(
        "ray.io/availability-zone", description="the label of Ray's nodes that names their site, if the pool does not"
    )
    directory: str = Field("/tmp/elastic-nodes", min_length=1, description="where nodes keep their files, on each")
    files_gb: float = Field(200.0, ge=0.001, le=1e6, description="what files of jobs may take of a node's disk")


class NodeAgentActor(WorkerActor):
    """The actor that keeps a node's agent on a node of the cluster, at the site that a label of that node names."""

    stderr = subprocess.PIPE

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], site_label: str) -> None:
        site = ray().get_runtime_context().get_node_labels().get(site_label, "")
        self._last, self._relaying = b"", threading.Thread(target=lambda: None)
        super().__init__((*command, "--site", str(site)), environment)

    def _began(self, process: "subprocess.Popen[bytes]") -> None:
        self._relaying = threading.Thread(target=self._relay, args=(process,), daemon=True)
        self._relaying.start()

    def _relay(self, process: "subprocess.Popen[bytes]") -> None:
        """Pass on what the node agent says, which Ray keeps, and remember its last line."""
        assert process.stderr is not None
        for line in process.stderr:
            self._last = line.strip() or self._last
            sys.stderr.buffer.write(line)
            sys.stderr.buffer.flush()

    def _last_words(self) -> str:
        if self._relaying.ident is not None:
            self._relaying.join(LAST_WORDS_S)
        return self._last.decode(errors="replace")[:LAST_WORDS_CHARACTERS]

    def _over(self) -> None:
        group = ray().util.get_current_placement_group()
        with contextlib.suppress(Exception):  # The cluster may be ending, too.
            ray().util.remove_placement_group(group)


class _Look(NamedTuple):
    """The states of placement groups by name, what actors say, and the largest that there is for a node."""

    groups: Mapping[str, str]
    actors: ActorsSaid
    named: frozenset[str]
    nodes: Sequence[Mapping[str, float]]


class Deputy:
    """The actor on the head that asks the cluster for one pool's nodes of one kind: `prefix` begins their names. It may
    be asked again what it has done. Of Ray's client itself a process of the cluster would do much of that, such as
    telling of groups, and each time another one may have to start.
    """

    def __init__(self, settings: RayNodesSettings, prefix: str) -> None:
        self._settings, self._prefix = settings, prefix
        self._questions = ActorQuestions(settings.namespace)

    def look(self) -> _Look:
        groups = self._groups()
        placed = sorted(name for name, state in groups.items() if state == PLACED)
        actors = self._questions.ask(placed, self._settings.poll_s)
        return _Look(groups, actors, named_actors(self._settings.namespace, self._prefix), node_resources())

    def ask(
        self,
        name: str,
        bundle: Mapping[str, float],
        command: Sequence[str],
        environment: Mapping[str, str],
        site_label: str,
    ) -> None:
        """Have a group, and an actor that starts once that has a machine."""
        try:
            group = ray().util.get_placement_group(name)
        except ValueError:
            group = ray().util.placement_group([dict(bundle)], strategy="STRICT_PACK", name=name, lifetime="detached")
        within = ray().util.scheduling_strategies.PlacementGroupSchedulingStrategy(
            group, placement_group_bundle_index=0
        )
        known = ("CPU", "GPU", "memory")
        actor: Any = (
            ray()
            .remote(NodeAgentActor)
            .options(
                name=name,
                namespace=self._settings.namespace,
                get_if_exists=True,
                lifetime="detached",
                num_cpus=bundle.get("CPU", 0),
                num_gpus=bundle.get("GPU", 0),
                memory=bundle.get("memory", 0) or None,
                resources={name: amount for name, amount in bundle.items() if name not in known},
                max_restarts=0,
                scheduling_strategy=within,
            )
        )
        actor.remote(list(command), dict(environment), site_label)

    def give_back(self, name: str) -> None:
        """End the actor and the group of this name, and return once neither is known. Raises `TimeoutError`."""
        timeout_s = self._settings.answer_timeout_s
        deadline_s = time.monotonic() + timeout_s
        end_actor(name, self._settings.namespace, timeout_s)
        while name in self._groups():
            if time.monotonic() > deadline_s:
                raise TimeoutError(f"Ray still knows placement group {name} after {timeout_s:g} s")
            with contextlib.suppress(ValueError):  # It may be gone meanwhile.
                ray().util.remove_placement_group(ray().util.get_placement_group(name))
            time.sleep(0.1)

    def _groups(self) -> dict[str, str]:
        """The states of placement groups, by name."""
        table = ray().util.placement_group_table().values()
        return {
            one["name"]: one["state"]
            for one in table
            if one["name"].startswith(self._prefix) and one["state"] != REMOVED
        }


class RayNodes:
    """The `NodeCluster` that is a Ray cluster, for nodes of one `kind`. `tag` is their name there, which nodes of no
    other kind or pool have. A node has its kind's GPUs; or if its `devices` are `cpu` as many arenas, of which the
    first node's first is number `first_arena`."""

    def __init__(
        self, settings: RayNodesSettings, tag: str, kind: NodeKind, devices: str, first_arena: int = 0
    ) -> None:
        self.name, self.look_s = f"the Ray cluster at {settings.address}", settings.poll_s
        self._settings, self._tag, self._gpus = settings, tag, kind.gpus
        self._arenas, self._first_arena = devices == DeviceKind.CPU, first_arena
        self._prefix = f"elastic/{tag}/"
        asked = settings.asked_with(0 if self._arenas else kind.gpus)
        self._bundle = asked | ({"memory": kind.memory_bytes} if kind.memory_bytes else {})
        self._connection = RayConnection(settings.address, settings.runtime_env)
        self._deputy: Any = None
        self._connected = False

    async def open(self) -> None:
        """Connect. Raises `RayUnusable`, which is `passing` if it only does not answer."""
        await asyncio.to_thread(self._connection.open, self._settings.answer_timeout_s)
        self._connected = True

    async def look(self) -> Sequence[NodeRequest]:
        seen = await self._asked("look")
        found = [self._request(name, state, seen) for name, state in sorted(seen.groups.items())]
        return found + [self._of(name, ended="it has no resources") for name in sorted(seen.named - seen.groups.keys())]

    async def ask(self, ticket: NodeTicket, number: int) -> None:
        name = f"{self._prefix}{ticket.node}/{number}"
        environment = {TICKET_VARIABLE: msgspec.json.encode(ticket).decode()}
        site_label = "" if ticket.site else self._settings.site_label
        await self._asked("ask", name, self._bundle, self._command(ticket), environment, site_label)

    async def give_back(self, request: NodeRequest) -> None:
        await self._asked("give_back", f"{self._prefix}{request.node}/{request.number}")

    async def aclose(self) -> None:
        with contextlib.suppress(Exception):
            await call(self._settings.answer_timeout_s, self._connection.close)

    def _command(self, ticket: NodeTicket) -> Sequence[str]:
        its = self._settings
        words = ["-P", "-m", "elastic.cli", "pool", "join", "--directory", f"{its.directory}/{self._tag}"]
        words += ["--files-gb", f"{its.files_gb:g}"]
        if self._arenas:  # Several nodes may be on one machine, and no two of them share an arena.
            first = self._first_arena + (int(ticket.node.rpartition("-")[2]) - 1) * self._gpus
            words += ["--devices", ",".join(f"{DeviceKind.CPU}:{first + number}" for number in range(self._gpus))]
        return words

    def _of(self, name: str, waits: str = "", ended: str = "") -> NodeRequest:
        node, _, number = name.removeprefix(self._prefix).partition("/")
        return NodeRequest(node, int(number) if number.isdecimal() else 0, waits, ended)

    def _request(self, name: str, state: str, seen: _Look) -> NodeRequest:
        if state in PENDING:
            largest = "; ".join(sorted({told_resources(node) for node in seen.nodes})) or "nothing"
            beyond = not any(places(node, self._bundle) for node in seen.nodes)
            no_node = f", and none of its nodes has as much: they have {largest}" if beyond else ""
            return self._of(name, waits=f"room in {self.name}: {told_resources(self._bundle)}{no_node}")
        if state != PLACED:
            return self._of(name, ended="its machine is lost, as Ray says")
        if name in seen.actors.gone:
            return self._of(name, ended=f"Ray says of its node agent: {seen.actors.gone[name]}")
        said = seen.actors.said.get(name)
        return self._of(name, ended="" if said is None or said.runs else _ending(said))

    async def _asked(self, what: str, *arguments: Any) -> Any:
        """Ask the deputy, after a new connection if the last one has failed. Raises `NodeClusterSilent`."""
        try:
            if not self._connected:
                await self.open()
            return await self._connection.ask(self._settings.answer_timeout_s, self._answer, what, *arguments)
        except RayUnusable as error:
            raise NodeClusterSilent(str(error)) from error
        except Exception as error:
            self._connected, self._deputy = False, None
            with contextlib.suppress(Exception):
                await call(self._settings.answer_timeout_s, self._connection.reset)
            raise NodeClusterSilent(
                f"{self.name} cannot be asked ({told(error)}): start its head again, or open its client port to this "
                "machine"
            ) from error

    def _answer(self, what: str, *arguments: Any) -> Any:
        if self._deputy is None:
            again = {"max_restarts": -1, "max_task_retries": -1}
            deputy: Any = ray().remote(Deputy).options(num_cpus=0, resources={HEAD: 0.001}, **again)
            self._deputy = deputy.remote(self._settings, self._prefix)
        try:
            return ray().get(getattr(self._deputy, what).remote(*arguments), timeout=self._settings.answer_timeout_s)
        except ray().exceptions.RayTaskError as error:
            raise error.cause from error


def _ending(said: ActorStatus) -> str:
    if said.status is None:
        return "its node agent could not be started"
    return f"its node agent {how_ended(said.status)}{f': {said.words}' if said.words else ''}"
