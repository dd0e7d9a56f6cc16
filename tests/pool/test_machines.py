"""Machines that join a pool: which suit as a node, what tickets are good for, and which devices a node takes."""

from pathlib import Path

import msgspec
import pytest

from elastic.compose.joined_node import NodeSession, node_devices, this_machine
from elastic.compose.pool_config import PoolConfig, pool_devices
from elastic.config import ConfigError, validate
from elastic.core.cluster import NodeKind
from elastic.pool import messages as w
from elastic.pool.gateway import PoolTokens
from elastic.pool.journal import PoolJournal
from elastic.pool.machines import JoinRules, NodeBeside, NodeTicket, free_names, read_node_ticket
from elastic.pool.node_tickets import NodeTickets
from elastic.protocol.endpoint import Endpoint
from elastic.protocol.tickets import TicketRefused
from tests.pool.test_devices import NVIDIA, stand_in

KIND = NodeKind(gpus=2, memory_bytes=100, nano_usd_per_hour=1, nodes=2, name="rollout")
RULES = JoinRules(kind=KIND)
MACHINE = w.NodeMachine("box", "boot-1", "A card", 4, 250)
TICKET = NodeTicket(pool="lab", node="rollout-1", join="a:1", fingerprint="", token="t", gpus=2, devices="auto")
NODES = {"nodes": 2, "usd_per_gpu_hour": 1.0, "memory_gb": 8}


def hello(*devices: str, **changes: object) -> w.NodeAgentHello:
    machine = msgspec.structs.replace(MACHINE, **changes)
    return w.NodeAgentHello(w.POOL_PROTOCOL_VERSION, "rollout-1", "token", 1, devices=devices, machine=machine)


@pytest.mark.parametrize(
    ("said", "others", "refused"),
    [
        (hello("cuda:0", "cuda:1"), (), ""),
        (hello("cuda:0"), (), "pool.rollout.gpus: it has 1 devices (cuda:0); allowed: 2"),
        (hello("cuda:0", "cuda:0"), (), "pool.rollout.gpus: it has 2 devices (cuda:0, cuda:0); allowed: 2"),
        (hello("cuda:0", "cpu:0"), (), "devices: found cuda:0, cpu:0; allowed: some of one kind"),
        (hello("cuda:0", "cuda:1", count=1), (), "its machine has 1 devices; allowed: the 2 that it says it has"),
        (hello("cuda:0", "cuda:1", memory_bytes=99), (), "has 99 bytes of memory for 1 nodes; allowed: at least 100"),
        (hello("cuda:0", "cuda:1", site="rack-1/b"), (), ""),
        (hello("cuda:0", "cuda:1", site="a\x1b[2J"), (), "its site: found 'a\\x1b[2J'; allowed: up to 64 letters"),
        (hello("cuda:2", "cuda:3"), (hello("cuda:0", "cuda:1"),), ""),
        (hello("cuda:1", "cuda:2"), (hello("cuda:0", "cuda:1"),), "cuda:1 of its machine is node rollout-0's"),
        (hello("cuda:0", "cuda:1", boot="boot-2"), (hello("cuda:0", "cuda:1"),), ""),
        (hello("rocm:0", "rocm:1", boot="boot-2"), (hello("cuda:0", "cuda:1"),), "allowed: cuda"),
        (
            hello("cuda:4", "cuda:5"),
            (hello("cuda:0", "cuda:1"), hello("cuda:2", "cuda:3")),
            "for 3 nodes; allowed: at least 300",
        ),
    ],
)
def test_a_machine_that_does_not_suit_is_refused_with_what_it_has_and_what_is_allowed(
    said: w.NodeAgentHello, others: tuple[w.NodeAgentHello, ...], refused: str
) -> None:
    found = RULES.refusal(said, {f"rollout-{number}": other for number, other in enumerate(others)})
    assert refused in found
    assert bool(found) == bool(refused)


def test_a_machine_without_the_interface_that_its_kind_names_is_told_what_it_has() -> None:
    rules = msgspec.structs.replace(RULES, interface="eth9")
    assert rules.refusal(hello("cuda:0", "cuda:1", interfaces=("lo", "eth9")), {}) == ""
    assert rules.refusal(hello("cuda:0", "cuda:1", interfaces=("lo", "eth0")), {}) == (
        "pool.rollout.interface: node rollout-1, on box, has no network interface 'eth9' with an IPv4 address; "
        "it has: lo, eth0"
    )
    assert "lo" in this_machine(("cpu:0",)).interfaces
    pool = {"name": "a", "rollout": NODES, "train": {**NODES, "kind": "joined", "interface": "eth9"}}
    assert validate(PoolConfig, {"pool": pool}, "pool.toml").joins["train"].interface == "eth9"


def test_a_pool_of_one_kind_of_device_takes_no_other() -> None:
    rules = JoinRules(kind=NodeKind(gpus=1, memory_bytes=0, nano_usd_per_hour=1), devices="cuda")
    assert "pool.devices: it has 1 devices (cpu:0); allowed: cuda" in rules.refusal(hello("cpu:0"), {})
    assert "does not say" in rules.refusal(w.NodeAgentHello(1, "a", "t", 1, devices=("cuda:0",)), {})


def test_a_name_is_one_node_s_and_there_are_no_more_than_the_pool_has() -> None:
    assert free_names("rollout", 3, {"rollout-1", "rollout-3"}) == ["rollout-2"]
    assert free_names("rollout", 3, {"rollout-2"}, 2) == ["rollout-1", "rollout-3"]
    with pytest.raises(ValueError, match=r"pool.rollout.nodes: found 1, .*rollout-1; allowed: .* drain"):
        free_names("rollout", 1, {"rollout-1"})
    with pytest.raises(ValueError, match=r"found 3, and 3 more are asked for: taken are rollout-2; allowed: "):
        free_names("rollout", 3, {"rollout-2"}, 3)


def test_tickets_are_one_for_each_node_and_void_ones_give_their_names_back(tmp_path: Path) -> None:
    journal, tokens = PoolJournal(tmp_path), PoolTokens(b"secret")
    tickets = NodeTickets(journal, tokens, "lab", Endpoint("host:1", fingerprint="f"), {"rollout": RULES})
    one = tickets.mint("mine", 60, ())
    two = tickets.mint("", 1e-9, ())
    assert (one.node, two.node) == ("rollout-1", "rollout-2")
    assert tickets.mint("", 60, ()).node == "rollout-2", "the one before has expired"
    with pytest.raises(ValueError, match="allowed: `elastic pool drain NODE`"):
        tickets.mint("", 60, ())
    tickets.void("rollout-1")
    with pytest.raises(ValueError, match=r"'rollout-1' is no node of another machine; those are: rollout-2"):
        tickets.void("rollout-1")
    again = tickets.mint("", 60, ())
    assert (again.node, again.token == one.token) == ("rollout-1", False)
    assert read_node_ticket(msgspec.json.encode(again)) == again
    journal.close()


def test_a_machine_s_ticket_has_a_token_for_each_of_its_nodes(tmp_path: Path) -> None:
    journal, tokens = PoolJournal(tmp_path), PoolTokens(b"secret")
    rules = msgspec.structs.replace(RULES, kind=msgspec.structs.replace(RULES.kind, nodes=3))
    tickets = NodeTickets(journal, tokens, "lab", Endpoint("host:1"), {"rollout": rules})
    ticket = tickets.mint("two GPUs", 60, (), count=2)
    assert [(one.node, one.token) for one in ticket.nodes] == [
        (name, tokens.ticket(name, 1)) for name in ("rollout-1", "rollout-2")
    ]
    assert read_node_ticket(msgspec.json.encode(ticket)) == ticket
    with pytest.raises(ValueError, match="2 more are asked for"):
        tickets.mint("", 60, (), count=2)
    assert tickets.mint("", 60, ()).node == "rollout-3", "what was refused has taken no name"
    journal.close()


def test_the_pool_itself_mints_the_tickets_of_nodes_that_it_asks_a_cluster_for(tmp_path: Path) -> None:
    journal, tokens = PoolJournal(tmp_path), PoolTokens(b"secret")
    tickets = NodeTickets(journal, tokens, "lab", Endpoint("host:1"), {"rollout": RULES}, asked=("rollout",))
    with pytest.raises(ValueError, match=r"pool.rollout.kind: found 'ray', .* allowed for tickets: 'joined'"):
        tickets.mint("", 60, ())
    (first, number), (second, later) = tickets.renew("rollout-1", "a cluster"), tickets.renew("rollout-1", "a cluster")
    assert (number, later, first.token == second.token) == (1, 2, False)
    assert tickets.numbers() == {"rollout-1": 2}
    assert not tickets.want_again("rollout-1")
    tickets.void("rollout-1")
    assert [*tickets.drained()] == ["rollout-1"]
    assert tickets.want_again("rollout-1")
    assert not tickets.drained()
    journal.close()


def test_what_is_no_ticket_is_refused_and_pools_of_this_machine_have_none(tmp_path: Path) -> None:
    wrong = {"pool": "../lab", "node": "../rollout-1", "gpus": 0}
    changed = [msgspec.json.encode(msgspec.to_builtins(TICKET) | {key: value}) for key, value in wrong.items()]
    for content in (b"", b"\xff", b"{}", b'{"pool": 1}', *changed):
        with pytest.raises(TicketRefused, match="not a ticket as `elastic pool ticket` writes it"):
            read_node_ticket(content)
    journal = PoolJournal(tmp_path)
    with pytest.raises(ValueError, match=r"pool.rollout.kind: found 'local', .* allowed for tickets: 'joined'"):
        NodeTickets(journal, PoolTokens(b""), "lab", Endpoint("host:1"), {}).mint("", 1, ())
    journal.close()


def test_a_node_takes_the_devices_that_are_named_or_the_first_of_its_machine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert node_devices(TICKET, ()) == ["cpu:0", "cpu:1"]
    assert node_devices(TICKET, ("cpu:2", "cpu:3")) == ("cpu:2", "cpu:3")
    machine = msgspec.structs.replace(TICKET, gpus=1, beside=(NodeBeside("rollout-2", "u"),))
    assert node_devices(machine, ()) == ["cpu:0", "cpu:1"]
    with pytest.raises(ConfigError, match="--devices: found cpu:2; allowed: 2 of"):
        node_devices(machine, ("cpu:2",))
    cuda = msgspec.structs.replace(TICKET, devices="cuda")
    with pytest.raises(ConfigError, match=r"has 2 devices \(cuda\); found 0 here: none"):
        node_devices(cuda, ())
    with pytest.raises(ConfigError, match=r"2 nodes of pool lab have 2 devices \(cuda\); found 0 here: none"):
        node_devices(msgspec.structs.replace(machine, devices="cuda"), ())
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    stand_in(tmp_path, "nvidia-smi", NVIDIA)
    assert node_devices(TICKET, ()) == ["cuda:0", "cuda:1"]
    assert node_devices(cuda, ("cuda:2", "cuda:3")) == ("cuda:2", "cuda:3")
    eight = msgspec.structs.replace(TICKET, gpus=8)
    with pytest.raises(ConfigError, match="found 4 here: cuda:0, cuda:1, cuda:2, cuda:3"):
        node_devices(eight, ())
    for named, found in (
        (("cuda:0",), "--devices: found cuda:0; allowed: 2 of cuda:0"),
        (("cuda:0", "cuda:9"), "found cuda:0, cuda:9; allowed: 2 of"),
        (("tpu:0", "tpu:1"), "--devices: "),
    ):
        with pytest.raises(ConfigError, match=found):
            node_devices(cuda, named)
    assert this_machine(("cuda:0",)).count == 4


def test_a_session_is_of_one_ticket_and_its_file_its_user_s_alone(tmp_path: Path) -> None:
    session = NodeSession(tmp_path / "session", "one")
    assert session.token() == ""
    session.keep("token")
    assert session.token() == "token"
    assert (tmp_path / "session").stat().st_mode & 0o777 == 0o600
    assert NodeSession(tmp_path / "session", "other").token() == ""


def test_a_pool_whose_nodes_join_takes_devices_of_this_machine_for_training_alone() -> None:
    def pool(**more: object) -> PoolConfig:
        rollout = {**NODES, "kind": "joined", **more}
        section = {"host": "0.0.0.0", "advertise": "lab.example", "rollout": rollout, "train": NODES}
        return validate(PoolConfig, {"pool": section}, "pool.toml")

    assert pool_devices(pool(), lambda: ("cuda:0", "cuda:1")) == ["cuda:0", "cuda:1"]
    with pytest.raises(ConfigError, match=r"kind 'joined' and spot: found both"):
        pool(spot={"trace": "rlboost-a"})
    section = {"host": "0.0.0.0", "rollout": {**NODES, "kind": "joined"}, "train": NODES}
    with pytest.raises(ConfigError, match=r"advertise is missing: nobody can dial pool.host = 0.0.0.0"):
        validate(PoolConfig, {"pool": section}, "pool.toml")
