"""How often one address may dial, and what counts as one."""

import pytest

from elastic.protocol.sockets import DialRates, network_of


@pytest.mark.parametrize(
    ("address", "network"),
    [
        ("192.0.2.7", "192.0.2.7"),
        ("::ffff:192.0.2.7", "192.0.2.7"),
        ("::ffff:127.0.0.1", "127.0.0.1"),
        ("::1", "::1"),
        ("2001:db8:1:2:3::4", "2001:db8:1:2::/64"),
        ("fe80::1%eth0", "fe80::/64"),
        ("no:address", "no:address"),
    ],
)
def test_what_counts_as_one_address(address: str, network: str) -> None:
    assert network_of(address) == network


def test_others_dial_on_while_one_address_is_bounded() -> None:
    rates = DialRates(at_once=3, per_s=1.0)
    assert [rates.admits("192.0.2.7", 0.0) for _ in range(5)] == [True, True, True, False, False]
    assert not rates.admits("::ffff:192.0.2.7", 0.5)
    assert rates.admits("::ffff:192.0.2.8", 0.5)
    assert rates.admits("192.0.2.7", 1.5)


def test_this_machine_dials_as_it_likes() -> None:
    rates = DialRates(at_once=1, per_s=0.0)
    assert all(rates.admits(address, 0.0) for address in ("127.0.0.1", "::1", "::ffff:127.0.0.1") for _ in range(3))
