"""Whose share it is: by name, else by where from."""

from __future__ import annotations

import pytest

from trimcp.budget import NOWHERE_KNOWN, owner_of


@pytest.mark.parametrize(
    ("address", "owner"),
    [
        ("192.0.2.1", "address 192.0.2.1"),
        ("192.0.2.1:40312", "address 192.0.2.1"),
        ("::ffff:192.0.2.1", "address 192.0.2.1"),
        ("[::ffff:192.0.2.1]:40312", "address 192.0.2.1"),
        ("[::ffff:192.0.2.1]", "address 192.0.2.1"),
        ("2001:db8::1", "address 2001:db8::/64"),
        ("[2001:db8::ffff:1]:443", "address 2001:db8::/64"),
        ("2001:db8:0:1::1", "address 2001:db8:0:1::/64"),
        ("[fe80::1%eth0]:443", "address fe80::/64"),
        ("[::1]:443", "address ::/64"),
    ],
)
def test_a_stranger_counts_under_where_it_comes_from(address: str, owner: str) -> None:
    assert owner_of(None, address) == owner


@pytest.mark.parametrize("address", [None, "", "unix", "testclient", "a:b:c", "[", "[x]:1", ":", "9" * 10_000, "1.2.3"])
def test_who_comes_from_nowhere_known_shares_with_all_of_those(address: str | None) -> None:
    assert owner_of(None, address) == NOWHERE_KNOWN


def test_who_is_known_counts_under_its_name_wherever_it_comes_from() -> None:
    assert owner_of("alice", "192.0.2.1") == owner_of("alice", "2001:db8::1") == owner_of("alice", None)
    assert owner_of("alice", None) != owner_of("bob", None)


def test_no_name_is_an_address() -> None:
    assert owner_of("192.0.2.1", None) != owner_of(None, "192.0.2.1")
    assert owner_of("unknown", None) != owner_of(None, None)
    assert owner_of("", "192.0.2.1") != owner_of(None, "192.0.2.1")
