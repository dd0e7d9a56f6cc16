"""The relay that the nodes of a site share: who has it, who uses it, and what becomes of it as nodes come and go."""

import asyncio
import contextlib
import os
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import msgspec
import pytest

from elastic.compose.site_relay import SiteMembership
from elastic.pool import messages as w
from elastic.pool.sites import SiteNode, site_orders
from elastic.weights.relay import open_relay

NEAR, FAR = w.SiteRelay("/near"), w.SiteRelay("https://far:1", "token", "anchor")


def node(boot: str = "a", site: str = "", relay: str = "", host: str = "box") -> SiteNode:
    return SiteNode(machine=w.NodeMachine(host, boot, "CPU", 1, 1, site, relay))


def told(nodes: Mapping[str, SiteNode]) -> dict[str, w.ServeSite | w.UseSite]:
    """What is to be told, which is then done; nothing follows before anything else happens."""
    found = dict(site_orders(nodes))
    for name, order in found.items():
        if isinstance(order, w.ServeSite):
            nodes[name].asked = order
        else:
            nodes[name].told = order
    assert dict(site_orders(nodes)) == {}
    return found


def test_nodes_of_one_machine_share_a_directory_of_it() -> None:
    nodes = {"one": node()}
    assert told(nodes) == {}, "one node alone shares with nobody"
    nodes["two"] = node()
    assert told(nodes) == {"one": w.ServeSite(beyond=False)}
    nodes["one"].served = w.SiteServed(NEAR)
    assert told(nodes) == {"one": w.UseSite(NEAR), "two": w.UseSite(NEAR)}


def test_machines_of_a_site_share_the_relay_of_one_of_them_and_other_sites_have_their_own() -> None:
    nodes = {"one": node("a"), "two": node("a"), "three": node("b"), "else": node("c", site="else"), "own": node("d")}
    nodes["own"].machine = msgspec.structs.replace(nodes["own"].machine, relay="/of/its/people")
    assert told(nodes) == {"one": w.ServeSite(beyond=True)}
    nodes["one"].served = w.SiteServed(NEAR, FAR)
    assert told(nodes) == {"one": w.UseSite(NEAR), "two": w.UseSite(NEAR), "three": w.UseSite(FAR)}
    nodes["elsewhere"] = node("c", site="else", host="another container")
    assert told(nodes) == {"else": w.ServeSite(beyond=True)}


def test_a_machine_more_takes_a_relay_beyond_the_first_and_a_lost_one_takes_its_relay_along() -> None:
    nodes = {"a1": node("a"), "b1": node("b"), "b2": node("b")}
    nodes["b2"].served = w.SiteServed(NEAR)
    assert told(nodes) == {"b2": w.ServeSite(beyond=True)}, "who has one already"
    nodes["b2"].served = w.SiteServed(NEAR, FAR)
    assert told(nodes) == {"a1": w.UseSite(FAR), "b1": w.UseSite(NEAR), "b2": w.UseSite(NEAR)}
    del nodes["b2"]
    assert told(nodes) == {"a1": w.ServeSite(beyond=True)}
    nodes["a1"].served = w.SiteServed(cause="no port")
    assert told(nodes) == {"b1": w.ServeSite(beyond=True)}, "who cannot is not asked again"
    nodes["b1"].served = w.SiteServed(cause="no port")
    assert told(nodes) == {"a1": w.UseSite(None), "b1": w.UseSite(None)}
    nodes["a1"] = node("a")  # It has dialled again.
    assert told(nodes) == {"a1": w.ServeSite(beyond=True)}


@contextlib.asynccontextmanager
async def membership(path: Path) -> AsyncIterator[SiteMembership]:
    (path / "leases").mkdir(parents=True)
    site = SiteMembership(path / "site", path / "leases", "lab", path.name)
    async with asyncio.timeout(60):
        try:
            yield site
        finally:
            await site.aclose()


def places(path: Path) -> list[str]:
    return [str(found) for found in path.glob("*/site/*")]


def used(site: SiteMembership) -> w.SiteRelay | None:
    (file,) = (Path(value) for value in site.variables.values())
    if not file.exists():
        return None
    assert file.stat().st_mode & 0o077 == 0
    return msgspec.json.decode(file.read_bytes(), type=w.SiteRelay)


@pytest.mark.slow
async def test_a_node_has_a_relay_for_others_and_uses_what_it_reaches(tmp_path: Path) -> None:
    """Real relays over TLS, as processes of two nodes."""
    async with membership(tmp_path / "one") as one, membership(tmp_path / "other") as other:
        served = await one.serve(w.ServeSite(beyond=True), "127.0.0.1")
        assert served.near is not None, served.cause
        assert served.far is not None
        assert await one.serve(w.ServeSite(beyond=False), "127.0.0.1") == served, "it is there already"
        token = served.far.token
        assert token

        await one.use(served.near)
        await other.use(served.far)
        assert used(other) == served.far
        for relay in (served.far, served.near):
            with contextlib.closing(open_relay(relay.place, relay.token or None, relay.anchor)) as its:
                its.put("site/a", b"copy")
                assert its.get("site/a") == b"copy"

        for unreachable in (w.SiteRelay("https://127.0.0.1:9", token), w.SiteRelay(str(tmp_path / "nowhere"))):
            await other.use(unreachable)
            assert used(other) is None
        await other.use(served.far)
        await one.use(w.SiteRelay(str(tmp_path)))  # Another one: its own ends.
        with pytest.raises(OSError, match="Connect call failed"):
            await asyncio.open_connection("127.0.0.1", int(served.far.place.rpartition(":")[2]))
        assert served.near.place not in await asyncio.to_thread(places, tmp_path)
        assert not os.listdir(tmp_path / "one" / "leases")


@pytest.mark.nightly
async def test_a_relay_that_cannot_be_started_is_told_with_its_cause(tmp_path: Path) -> None:
    async with membership(tmp_path / "one") as one:
        served = await one.serve(w.ServeSite(beyond=True), "192.0.2.1")
        assert served.near is None
        assert "could not be started" in served.cause
