"""Addresses: whatever is printed reads back the same, and what listens can be dialled as it is told."""

import contextlib
import socket
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic.compose.relay import weights_relay
from elastic.config import Config, ConfigError, validate
from elastic.protocol.endpoint import Address, is_loopback, is_wildcard
from elastic.protocol.sockets import address_of, listening_socket
from elastic.protocol.tls import run_certificate
from elastic.runtime.gateway import Gateway
from elastic.weights.rights import RelayRights

NAMES = st.from_regex(r"[A-Za-z0-9]([A-Za-z0-9.-]{0,20}[A-Za-z0-9])?", fullmatch=True)
HOSTS = NAMES | st.ip_addresses().map(str)
PORTS = st.integers(0, 65_535)
ADDRESSES = st.builds(Address, HOSTS, PORTS)


def has_ipv6() -> bool:
    try:
        listening_socket("::1", 0).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")


@given(ADDRESSES)
def test_an_address_reads_back_as_it_was_printed(address: Address) -> None:
    assert Address.parse(str(address)) == address
    assert Address.parse(str(address), 7) == address, "a port that is given counts"


@given(HOSTS, st.integers(1, 65_535))
def test_a_host_alone_takes_the_port_of_the_listener(host: str, port: int) -> None:
    advertised = str(Address(host, 0)).removesuffix(":0")
    assert Address("0.0.0.0", port).seen_as(advertised) == Address(host, port)


@given(st.text(alphabet="[]:.%-a1/ ", max_size=12))
def test_whatever_is_read_prints_and_reads_back(text: str) -> None:
    for port in (None, 1):
        with contextlib.suppress(ValueError):
            found = Address.parse(text, port)
            assert Address.parse(str(found)) == found


@pytest.mark.parametrize(
    "text", ["fd00::2", "fd00::2:7433", "[fd00::2", "[gpu-7]:1", "[10.0.0.1]:1", "a:b", "a:70000", ":1"]
)
def test_what_is_no_address_says_what_is_allowed(text: str) -> None:
    with pytest.raises(ValueError, match="in brackets"):
        Address.parse(text)


@given(ADDRESSES)
def test_nobody_is_told_to_dial_every_interface(listening: Address) -> None:
    here = listening.here()
    assert not is_wildcard(here.host)
    assert here == listening or is_loopback(here.host)


@pytest.mark.parametrize("host", ["::", "0.0.0.0", "0:0:0:0:0:0:0:0"])
def test_who_listens_everywhere_is_reached_by_both_families(host: str) -> None:
    if ":" in host and not has_ipv6():
        pytest.skip("this machine has no IPv6")
    with listening_socket(host, 0) as listener:
        at = address_of(listener)
        for dialled in (at.here(), Address("127.0.0.1", at.port), *([Address("::1", at.port)] if ":" in host else [])):
            socket.create_connection(dialled, timeout=5).close()


@needs_ipv6
async def test_a_run_that_listens_everywhere_by_ipv6_is_reached_by_its_own_workers(tmp_path: Path) -> None:
    gateway = Gateway()
    try:
        at = Address.parse(await gateway.start("::", 0, run_certificate(tmp_path, ["localhost"])))
        assert at.host == "::"
        socket.create_connection(at.here(), timeout=5).close()
    finally:
        await gateway.aclose()


@needs_ipv6
@pytest.mark.parametrize("advertised", ["[fd00::2]", "[fd00::2]:443"])
async def test_an_advertised_ipv6_address_reaches_workers_and_relay(tmp_path: Path, advertised: str) -> None:
    config = Config.model_validate({"model": {"checkpoint": "."}, "run": {"host": "[::]", "advertise": advertised}})
    certificate = run_certificate(tmp_path, [config.run.advertised_host])
    async with weights_relay(config, tmp_path, "", RelayRights("owner"), certificate) as relay:
        url, _, port = relay.far.rpartition(":")
        assert url == "https://[fd00::2]"
        assert int(port) > 0
    assert str(Address.parse("[::]:7433").seen_as(config.run.advertise)) == str(Address.parse(advertised, 7433))


@pytest.mark.parametrize("key", ["host", "advertise"])
def test_a_configuration_says_what_is_no_address(key: str) -> None:
    with pytest.raises(ConfigError, match=rf"run\.{key}: .*allowed: .*\(found 'https://gpu-7'\)"):
        validate(Config, {"model": {"checkpoint": "."}, "run": {key: "https://gpu-7"}}, "run.toml")
