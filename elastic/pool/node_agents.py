"""Node agents of nodes as the pool's process knows them: started, expected back, given up for lost, replaced."""

from collections import Counter, deque
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Protocol

import structlog

from elastic.core.cluster import events as e
from elastic.core.cluster.types import JobId, KindName, Nanoseconds, NodeId, PhaseKind
from elastic.core.types import Offer
from elastic.pool import messages as w
from elastic.pool.devices import unfit
from elastic.pool.holdings import NS_PER_S, PoolHoldings, PoolNode, PoolRoom, Resident
from elastic.pool.machines import JoinRules, devices_on, kind_of_node
from elastic.pool.residents import NodeResidents
from elastic.pool.scripts import PoolScripts
from elastic.pool.sites import SiteNode, site_orders
from elastic.pool.slice_workers import SliceWorkers
from elastic.pool.slices import PoolSlices
from elastic.system.devices import DeviceName

log = structlog.get_logger(__name__)

REPLACED = "another node takes its place"


class LostInstance(Protocol):
    """An instance that is gone, or will be at `deadline_ns`, by the name of the node that is on it."""

    @property
    def lease(self) -> NodeId: ...
    @property
    def deadline_ns(self) -> Nanoseconds: ...


class NodeMarket(Protocol):
    """Instances for rollout nodes, which come and go by themselves."""

    @property
    def next_ns(self) -> Nanoseconds | None:
        """When the next one comes or goes; None for never."""
        ...

    def advance(self, now_ns: Nanoseconds) -> Iterator[LostInstance]:
        """Go on until now; yields the instances that are taken from nodes."""
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

    Each node of a kind with a market is on an instance of it: the node is lost with its instance, and there are no more
    nodes than instances. Nodes of a kind with rules by which machines join are those that do.
    """

    def __init__(
        self,
        pool: PoolHoldings,
        workers: SliceWorkers,
        slices: PoolSlices,
        residents: NodeResidents,
        scripts: PoolScripts,
        markets: Mapping[KindName, NodeMarket] = MappingProxyType({}),
        joins: Mapping[KindName, JoinRules] = MappingProxyType({}),
    ) -> None:
        super().__init__(pool)
        self._joins, self._markets = joins, markets
        self._workers, self._slices = workers, slices
        self._residents, self._scripts = residents, scripts
        self._numbers: Counter[KindName] = Counter()
        self._deaths: Counter[KindName] = Counter()
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
        rules = self._joins.get(kind_of_node(name))
        if rules is None:
            return "the pool takes no machine that joins"
        if name not in self._nodes and (hello.residents or hello.given):
            return "the node was given up while it was not heard; without its residents it may come again"
        there = {other: node.hello for other, node in self._nodes.items() if node.hello is not None and other != name}
        ill = [device for device in devices_on(name, hello.devices) if device in self._pool.devices.set_aside]
        if ill:
            return f"{ill[0]} is set aside: {self._pool.devices.set_aside[ill[0]]}; `elastic pool put-back {ill[0]}`"
        return rules.refusal(hello, there)

    def joined(self, hello: w.NodeAgentHello) -> str:
        """Take in a node agent and what it reports to hold; returns why it is refused, or an empty string."""
        name, kind = hello.node, kind_of_node(hello.node)
        if hello.machine is not None:
            if refused := self.refuses_machine(hello):
                return refused
            if name not in self._nodes:
                self._pool.joining[name] = kind
            self._pool.devices.adopt(name, devices_on(name, hello.devices))
        if self._pool.joining.pop(name, None) is not None:
            self._nodes[name] = PoolNode(phase=self._cluster.spec.phases[kind])
            self._deaths[kind] = 0
            self._pool.feed(e.NodeJoined(node=name, kind=kind))
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
                ranks_at=state.ranks_at,
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
        of_rollouts = {name: node for name, node in self._nodes.items() if node.phase is PhaseKind.ROLLOUT}
        sites = {name: node.site for name, node in of_rollouts.items() if node.site is not None}
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
            follows = "its machine may come again" if self.by_itself(kind_of_node(name)) else REPLACED
            self.lose(name, f"its node agent {how}; {follows}")

    def requested_lost(self, name: NodeId, how: str) -> None:
        """Give up a node that was asked of a cluster, whether it has joined or not."""
        if name in self._nodes:
            self.lose(name, f"{how}; another is asked for")
        else:
            self._ports.died(name, "", f"{how}, before it had joined; another is asked for")

    def start_again(self, name: NodeId) -> None:
        """Start the node agent of a node that the cluster has, on the devices that are there now."""
        if self._pool.devices.take(name, self._cluster.spec.kinds[kind_of_node(name)].gpus):
            self._start(name)
        else:
            self.lose(name, "there is no device for it any more", renewed=False)

    def _start(self, name: NodeId) -> None:
        self.expect(name, self._times.node_agent_start_ns)
        phase = self._cluster.spec.phases[kind_of_node(name)]
        self._ports.start_node_agent(name, phase, self._pool.devices.of(name))

    def expect(self, name: NodeId, within_ns: Nanoseconds) -> None:
        self._within_ns[name] = within_ns
        self._pool.wait("node_agent", name, within_ns)

    def by_itself(self, kind: KindName) -> bool:
        """Whether nodes of this kind come by themselves, on other machines."""
        return kind in self._joins

    def noticed(self, name: NodeId, reason: str) -> None:
        """Drain a node whose machine is about to be taken. Once that is gone, the node is lost for its silence."""
        node = self._cluster.state.nodes.get(name)
        if node is not None and not node.draining:
            self._ports.died(name, "", f"{reason}; its jobs go on elsewhere from their step's end")
            self._pool.feed(e.NodeDrained(node=name))

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
            self._renew(kind_of_node(name))

    def _failed_to_join(self, name: NodeId, how: str) -> None:
        self._ports.died(name, "", f"its node agent {how} before it had joined; {REPLACED}")
        self._end_joining(name)
        if not self._pool.stopping:
            self._renew(kind_of_node(name))

    def _end_joining(self, name: NodeId) -> None:
        del self._pool.joining[name]
        self._timers.clear("node_agent", name)
        self._ports.end_node_agent(name)
        self._give_back(name)

    def _renew(self, kind: KindName) -> None:
        """Add a node for one that was lost; soon if losses are rare, later if they are frequent."""
        if self.by_itself(kind):
            return
        deaths = self._deaths[kind]
        self._deaths[kind] = deaths + 1
        delay_ns = self._times.retry_ns(deaths) if deaths else 0
        self._pool.wait("new node agent", f"{kind}/{self._next_number(kind)}", delay_ns)

    def start_anew(self, key: str) -> None:
        kind, _, number = key.partition("/")
        name = f"{kind}-{number or self._next_number(kind)}"
        if not self._pool.stopping and self._placed(name):
            self._pool.joining[name] = kind
            self._start(name)

    def fill(self) -> None:
        """Start as many nodes as are missing, as far as there are devices and instances for them."""
        spec = self._cluster.spec
        there = Counter(map(kind_of_node, self._nodes)) + Counter(self._pool.joining.values())
        there.update(wait.key.partition("/")[0] for wait in self._timers.waits() if wait.what == "new node agent")
        for kind in (*spec.train, *spec.rollout):
            if not self.by_itself(kind.name):
                for _ in range(kind.nodes - there[kind.name]):
                    self.start_anew(kind.name)

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
        """Place the nodes of an earlier process on the instances of now; those too many are lost."""
        for kind, market in self._markets.items():
            deque(market.advance(self._ports.now_ns()), maxlen=0)
            for name in sorted((name for name in self._nodes if kind_of_node(name) == kind), key=_number):
                if not self._instance(name):
                    self.lose(name, "there is no instance for it any more", renewed=False)
            self._await_market(kind)

    def market_changed(self, kind: KindName) -> None:
        """Lose the nodes whose instances are gone, drain those whose instances will be, and start nodes on new ones."""
        market, now_ns = self._markets[kind], self._ports.now_ns()
        for taken in market.advance(now_ns):
            if taken.lease not in self._nodes:
                self._end_joining(taken.lease)
            elif taken.deadline_ns <= now_ns:
                self.instance_taken(taken.lease)
            else:
                self._timers.set("instance", taken.lease, now_ns, taken.deadline_ns - now_ns)
                self._pool.feed(e.NodeDrained(node=taken.lease))
        if not self._pool.stopping:
            for _ in range(market.offer().available):
                self.start_anew(kind)
        self._await_market(kind)

    def instance_taken(self, name: NodeId) -> None:
        if name in self._nodes:
            self.lose(name, "its instance was taken", renewed=False)

    def _await_market(self, kind: KindName) -> None:
        at_ns, now_ns = self._markets[kind].next_ns, self._ports.now_ns()
        if at_ns is not None:
            self._timers.set("market", kind, now_ns, max(0, at_ns - now_ns))

    def _placed(self, name: NodeId) -> bool:
        """Give a new node its devices, and an instance; returns whether there were both."""
        if not self._pool.devices.take(name, self._cluster.spec.kinds[kind_of_node(name)].gpus):
            return False
        if self._instance(name):
            return True
        self._pool.devices.give_back(name)
        return False

    def _instance(self, name: NodeId) -> bool:
        """Whether the node has an instance; one that has none takes the instance that has been free the longest."""
        market = self._markets.get(kind_of_node(name))
        if market is None:
            return True
        if not market.offer().available:
            return False
        market.take(name)
        return True

    def _give_back(self, name: NodeId) -> None:
        self._timers.clear("instance", name)
        self._pool.devices.give_back(name)
        if (market := self._markets.get(kind_of_node(name))) is not None:
            market.forget(name)

    def _next_number(self, kind: KindName) -> int:
        self._numbers[kind] += 1
        return self._numbers[kind]

    def count(self, name: NodeId) -> None:
        kind = kind_of_node(name)
        self._numbers[kind] = max(self._numbers[kind], _number(name))


def _number(name: NodeId) -> int:
    digits = name.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0
