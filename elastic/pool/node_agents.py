"""Node agents of nodes as the pool's process knows them: started, expected back, given up for lost, replaced."""

from collections import deque
from collections.abc import Iterator
from typing import Protocol

import structlog

from elastic.core.cluster import events as e
from elastic.core.cluster.types import JobId, Nanoseconds, NodeId, PhaseKind
from elastic.core.types import Offer
from elastic.pool import messages as w
from elastic.pool.devices import unfit
from elastic.pool.holdings import NS_PER_S, PoolHoldings, PoolNode, PoolRoom, Resident
from elastic.pool.machines import JoinRules, devices_on
from elastic.pool.residents import NodeResidents
from elastic.pool.scripts import PoolScripts
from elastic.pool.sites import SiteNode, site_orders
from elastic.pool.slice_workers import SliceWorkers
from elastic.pool.slices import PoolSlices
from elastic.system.devices import DeviceName

log = structlog.get_logger(__name__)

REPLACED = "another node takes its place"


class LostInstance(Protocol):
    """An instance that is gone, by the name of the node that was on it."""

    @property
    def lease(self) -> NodeId: ...


class NodeMarket(Protocol):
    """Instances for rollout nodes, which come and go by themselves."""

    @property
    def next_ns(self) -> Nanoseconds | None:
        """When the next one comes or goes; None for never."""
        ...

    def advance(self, now_ns: Nanoseconds) -> Iterator[LostInstance]:
        """Go on until now; yields the instances that were taken from nodes."""
        ...

    def offer(self) -> Offer:
        """Return how many instances can be had now."""
        ...

    def take(self, lease: NodeId) -> str:
        """Place a node on an instance that can be had."""
        ...

    def forget(self, lease: NodeId) -> None:
        """Give a node's instance back."""
        ...


class NodeAgents(PoolRoom):
    """The nodes of a pool, and those on their way.

    With a `market` each rollout node is on an instance of it: the node is lost with its instance, and there are no
    more nodes than instances. With rules by which machines `join`, rollout nodes are those that do.
    """

    def __init__(
        self,
        pool: PoolHoldings,
        workers: SliceWorkers,
        slices: PoolSlices,
        residents: NodeResidents,
        scripts: PoolScripts,
        market: NodeMarket | None = None,
        joins: JoinRules | None = None,
    ) -> None:
        super().__init__(pool)
        self._joins = joins
        self._workers, self._slices = workers, slices
        self._residents, self._scripts = residents, scripts
        self._market = market
        self._numbers = dict.fromkeys(PhaseKind, 0)
        self._deaths = dict.fromkeys(PhaseKind, 0)
        self._within_ns: dict[NodeId, Nanoseconds] = {}

    def held_by_other(self, hello: w.NodeAgentHello) -> str:
        """Return which other node agent is connected as this node, or an empty string."""
        node = self._nodes.get(hello.node)
        there = None if node is None or not node.connected or node.hello is None else node.hello
        if there is None or there.machine is None or hello.machine is None:
            return ""
        if (there.machine.boot, there.pid) == (hello.machine.boot, hello.pid):
            return ""
        return f"node {hello.node} is there already, as process {there.pid} on {there.machine.host}"

    def refuses_machine(self, hello: w.NodeAgentHello) -> str:
        """Return why a node agent on another machine is not taken in, or an empty string."""
        name = hello.node
        if self._joins is None:
            return "the pool takes no machine that joins"
        if name not in self._nodes and (hello.residents or hello.given):
            return "the node was given up while it was not heard; without its residents it may come again"
        there = {other: node.hello for other, node in self._nodes.items() if node.hello is not None and other != name}
        ill = [device for device in devices_on(name, hello.devices) if device in self._pool.devices.set_aside]
        if ill:
            return f"{ill[0]} is set aside: {self._pool.devices.set_aside[ill[0]]}; `elastic pool put-back {ill[0]}`"
        return self._joins.refusal(hello, there)

    def joined(self, hello: w.NodeAgentHello) -> str:
        """Take in a node agent and what it reports to hold; returns why it is refused, or an empty string."""
        name = hello.node
        if hello.machine is not None:
            if refused := self.refuses_machine(hello):
                return refused
            if name not in self._nodes:
                self._pool.joining[name] = PhaseKind.ROLLOUT
            self._pool.devices.adopt(name, devices_on(name, hello.devices))
        if name in self._pool.joining:
            self._nodes[name] = PoolNode(phase=self._pool.joining.pop(name))
            self._deaths[self._nodes[name].phase] = 0
            self._pool.feed(e.NodeJoined(node=name, phase=self._nodes[name].phase))
        node = self._nodes.get(name)
        if node is None:
            return "this node is not the pool's any more"
        self._timers.clear("node_agent", name)
        node.connected, node.pid, node.given = True, hello.pid, hello.last_permit
        node.hello = None if hello.machine is None else hello
        node.site = None if hello.machine is None else SiteNode(machine=hello.machine)
        self._tell_sites()
        before, node.residents = node.residents, {}
        for state in hello.residents:
            former = before.pop(state.job, None)
            known = former is not None and former.placement == state.placement
            node.residents[state.job] = Resident(
                placement=state.placement,
                up=state.up,
                permit=state.permit,
                worker=state.worker,
                ending=known and former is not None and former.ending,
            )
            self._workers.compare(name, node, state, hello.given if hello.given_to == state.job else state.permit)
        gone = {one.job: one for one in hello.gone}
        for job, former in before.items():
            told, cause, code = gone.get(job), "it ended while its node agent was not heard", None
            if told is not None and told.placement == former.placement:
                cause, code = told.cause, told.code
            self._residents.gone(name, job, former, cause, code)
        for job in self._scripts.presumed_on(name):
            self._adopt_script(name, job, gone.get(job))
        for job, permit in self._slices.taken_from(name):
            resident = node.residents.get(job)
            if permit in (hello.given, resident.permit if resident is not None else 0):
                self._slices.take_device(name, job, permit)
            else:
                self._slices.freed(name, job, permit, 0)
        if hello.given and hello.given not in self._cluster.permits:
            self._slices.take_device(name, hello.given_to, hello.given)
        for job, resident in node.residents.items():
            if resident.ending:
                self._ports.send_to_node_agent(name, w.EndResident(job, "as it was told before"))
        return ""

    def site_served(self, name: NodeId, served: w.SiteServed) -> None:
        """Note what a node says of the relay that it was to have for its site."""
        site = self._nodes[name].site
        if site is not None:
            site.served = served
            if served.near is None:
                log.warning("a node has no relay for its site", node=name, cause=served.cause)
            self._tell_sites()

    def _tell_sites(self) -> None:
        """Have the nodes of each site use one relay."""
        sites = {name: node.site for name, node in self._nodes.items() if node.site is not None}
        for name, order in site_orders(sites):
            if isinstance(order, w.ServeSite):
                sites[name].asked = order
            else:
                sites[name].told = order
            self._ports.send_to_node_agent(name, order)

    def _adopt_script(self, name: NodeId, job: JobId, gone: w.ResidentGone | None) -> None:
        """Take over what a node agent says of a script, in a process of the pool that has come back."""
        record, resident = self._cluster.jobs[job], self._nodes[name].residents.get(job)
        placement = self._pool.jobs[job].process
        if resident is not None and resident.placement == placement:
            self._scripts.adopted(job)
        elif gone is not None and gone.placement == placement:
            self._residents.gone(name, job, Resident(placement=gone.placement), gone.cause, gone.code)
        else:
            self._scripts.never_was(job)
            if record.permit is not None:
                self._slices.take_back(self._cluster.permits[record.permit])

    def left(self, name: NodeId) -> None:
        """Note that the node agent's connection is gone. It may come back."""
        node = self._nodes.get(name)
        if node is not None and node.connected:
            node.connected = False
            self.expect(name, self._times.silence_ns)

    def unheard(self, name: NodeId) -> None:
        """Give up a node agent that has not come, or not come back."""
        self.gone(name, f"was not heard for {self._within_ns[name] / NS_PER_S:g} s")

    def gone(self, name: NodeId, how: str) -> None:
        """Give up a node agent. `how` it is gone."""
        if name in self._pool.joining:
            self._failed_to_join(name, how)
        elif name in self._nodes:
            follows = "its machine may come again" if self.by_itself(self._nodes[name].phase) else REPLACED
            self.lose(name, f"its node agent {how}; {follows}")

    def requested_lost(self, name: NodeId, how: str) -> None:
        """Give up a node that was asked of a cluster, whether it has joined or not."""
        if name in self._nodes:
            self.lose(name, f"{how}; another is asked for")
        else:
            self._ports.died(name, "", f"{how}, before it had joined; another is asked for")

    def start_again(self, name: NodeId, phase: PhaseKind) -> None:
        """Start the node agent of a node that the cluster has, on the devices that are there now."""
        if self._pool.devices.take(name, self._cluster.spec.kind(phase).gpus):
            self._start(name, phase)
        else:
            self.lose(name, "there is no device for it any more", renewed=False)

    def _start(self, name: NodeId, phase: PhaseKind) -> None:
        self.expect(name, self._times.node_agent_start_ns)
        self._ports.start_node_agent(name, phase, self._pool.devices.of(name))

    def expect(self, name: NodeId, within_ns: Nanoseconds) -> None:
        self._within_ns[name] = within_ns
        self._pool.wait("node_agent", name, within_ns)

    def by_itself(self, phase: PhaseKind) -> bool:
        """Whether nodes for this phase come by themselves, on other machines."""
        return self._joins is not None and phase is PhaseKind.ROLLOUT

    def released(self, name: NodeId) -> None:
        """Let a node go that the cluster has not got any more, and nobody uses."""
        if self._nodes.pop(name, None) is not None:
            self._timers.clear("node_agent", name)
            self._ports.end_node_agent(name)
            self._give_back(name)
            self._tell_sites()
            if not self._pool.stopping:
                self.fill()

    def lose(self, name: NodeId, what: str, *, renewed: bool = True) -> None:
        """Give up a node. `what` tells the report why, and what follows; without it there was never one."""
        node = self._nodes.pop(name)
        if what:
            self._ports.died(name, "", what)
        self._timers.clear("node_agent", name)
        self._ports.end_node_agent(name)
        self._pool.feed(e.NodeLost(node=name))
        self._give_back(name)
        self._tell_sites()
        for job, resident in list(node.residents.items()):
            self._workers.lost(job, name)
            entry = self._entries.get(job)
            if entry is not None and entry.script and self._pool.jobs[job].process == resident.placement:
                self._scripts.never_was(job)
                self._ports.cut_job(job)
        self._scripts.lost(name)
        for job, permit in self._slices.taken_from(name):
            self._slices.freed(name, job, permit, 0)
        if renewed and not self._pool.stopping:
            self._renew(node.phase)

    def _failed_to_join(self, name: NodeId, how: str) -> None:
        self._ports.died(name, "", f"its node agent {how} before it had joined; {REPLACED}")
        phase = self._end_joining(name)
        if not self._pool.stopping:
            self._renew(phase)

    def _end_joining(self, name: NodeId) -> PhaseKind:
        phase = self._pool.joining.pop(name)
        self._timers.clear("node_agent", name)
        self._ports.end_node_agent(name)
        self._give_back(name)
        return phase

    def _renew(self, phase: PhaseKind) -> None:
        """Add a node for one that was lost; soon if losses are rare, later if they are frequent."""
        if self.by_itself(phase):
            return
        deaths = self._deaths[phase]
        self._deaths[phase] = deaths + 1
        delay_ns = self._times.retry_ns(deaths) if deaths else 0
        key = f"{phase.value}/{self._next_number(phase)}"
        self._pool.wait("new node agent", key, delay_ns)

    def start_anew(self, key: str) -> None:
        kind, _, number = key.partition("/")
        phase = PhaseKind(kind)
        name = f"{phase}-{number or self._next_number(phase)}"
        if not self._pool.stopping and self._placed(name, phase):
            self._pool.joining[name] = phase
            self._start(name, phase)

    def fill(self) -> None:
        """Start as many nodes as are missing, as far as there are devices and instances for them."""
        spec = self._cluster.spec
        for phase, count in ((PhaseKind.TRAIN, spec.train_nodes), (PhaseKind.ROLLOUT, spec.rollout_nodes)):
            if self.by_itself(phase):
                continue
            there = sum(node.phase is phase for node in self._nodes.values())
            there += sum(kind is phase for kind in self._pool.joining.values())
            there += sum(
                wait.what == "new node agent" and wait.key.startswith(f"{phase}/") for wait in self._timers.waits()
            )
            for _ in range(count - there):
                self.start_anew(phase.value)

    def check_residents(self, name: NodeId) -> None:
        """Set the node's devices aside if its residents die as they start, and it is not their jobs' fault."""
        node, devices = self._nodes[name], self._pool.devices
        if not devices.of(name) or any(resident.up for resident in node.residents.values()):
            return
        elsewhere = {
            job
            for other in self._nodes.values()
            for job, resident in other.residents.items()
            if other is not node and other.phase is node.phase and resident.up
        }
        if reason := unfit(node.start_deaths, elsewhere):
            devices.put_aside(name, reason)
            self._ports.note_set_aside(devices.set_aside)
            self.lose(name, f"its devices are set aside, as {reason}")

    def put_back(self, device: DeviceName) -> bool:
        devices = self._pool.devices
        found = devices.put_back(device)
        if found:
            self._ports.note_set_aside(devices.set_aside)
            if not self._pool.stopping:
                self.fill()
        return found

    def take_instances(self) -> None:
        """Place the rollout nodes of an earlier process on the instances of now; those too many are lost."""
        if self._market is None:
            return
        deque(self._market.advance(self._ports.now_ns()), maxlen=0)
        nodes = [name for name, node in self._nodes.items() if node.phase is PhaseKind.ROLLOUT]
        for name in sorted(nodes, key=_number):
            if not self._instance(name, PhaseKind.ROLLOUT):
                self.lose(name, "there is no instance for it any more", renewed=False)
        self._await_market()

    def market_changed(self) -> None:
        """Lose the nodes whose instances are gone, and start nodes on new ones."""
        assert self._market is not None
        for taken in self._market.advance(self._ports.now_ns()):
            if taken.lease in self._nodes:
                self.lose(taken.lease, "its instance was taken", renewed=False)
            else:
                self._end_joining(taken.lease)
        if not self._pool.stopping:
            for _ in range(self._market.offer().available):
                self.start_anew(PhaseKind.ROLLOUT.value)
        self._await_market()

    def _await_market(self) -> None:
        assert self._market is not None
        at_ns, now_ns = self._market.next_ns, self._ports.now_ns()
        if at_ns is not None:
            self._timers.set("market", "", now_ns, max(0, at_ns - now_ns))

    def _placed(self, name: NodeId, phase: PhaseKind) -> bool:
        """Give a new node its devices, and an instance; returns whether there were both."""
        if not self._pool.devices.take(name, self._cluster.spec.kind(phase).gpus):
            return False
        if self._instance(name, phase):
            return True
        self._pool.devices.give_back(name)
        return False

    def _instance(self, name: NodeId, phase: PhaseKind) -> bool:
        """Whether the node has an instance; one that has none takes the instance that has been free the longest."""
        if self._market is None or phase is not PhaseKind.ROLLOUT:
            return True
        if not self._market.offer().available:
            return False
        self._market.take(name)
        return True

    def _give_back(self, name: NodeId) -> None:
        self._pool.devices.give_back(name)
        if self._market is not None:
            self._market.forget(name)

    def _next_number(self, phase: PhaseKind) -> int:
        self._numbers[phase] += 1
        return self._numbers[phase]

    def count(self, name: NodeId) -> None:
        kind = name.rpartition("-")[0]
        if kind in list(PhaseKind):
            self._numbers[PhaseKind(kind)] = max(self._numbers[PhaseKind(kind)], _number(name))


def _number(name: NodeId) -> int:
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0
