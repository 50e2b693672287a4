"""Whose memory a peer's is: the principal's, else the address's."""

from __future__ import annotations

import socket
from functools import lru_cache
from typing import Final

NOWHERE_KNOWN: Final = "address unknown"
"""The owner of every peer without a principal and an address: Unix sockets, pipes, hosts that pass no address."""

# A host with 64 bits of its own address space can take a new address for each connection (RFC 4291, 2.5.1; RFC 8981).
_IPV6_PREFIX: Final = 8  # bytes
_MAPPED: Final = bytes(10) + b"\xff\xff"  # prefix of an IPv4 address mapped into IPv6 (RFC 4291, 2.5.5.2)
_LONGEST: Final = 64  # characters of an address, including the zone


def owner_of(principal: str | None, address: str | None) -> str:
    """Return the owner to count memory with: the principal, else the address.

    The result is text for tables and logs: "principal alice", "address 192.0.2.1" or "address 2001:db8::/64" (one
    machine may have all these addresses). An IPv4 address mapped into IPv6 is the same as the IPv4 address. All peers
    without a readable address share `NOWHERE_KNOWN`. A principal and an address never have the same result. Never
    raises.

    Args:
        principal: who sends the requests, from the transport's identity hook, or None.
        address: the peer's address, with or without a port: "192.0.2.1", "192.0.2.1:40312", "2001:db8::1",
            "[2001:db8::1]:443".
    """
    if principal is not None:
        return f"principal {principal}"
    if not address:
        return NOWHERE_KNOWN
    if address[0] == "[":
        host = address[1:].partition("]")[0]
    elif address.count(":") == 1:
        host = address.partition(":")[0]
    else:
        host = address
    return _of_host(host) if len(host) <= _LONGEST else NOWHERE_KNOWN


@lru_cache(4_096)  # clients reconnect
def _of_host(host: str) -> str:
    host = host.partition("%")[0]  # without the zone
    try:
        if ":" not in host:
            return f"address {socket.inet_ntop(socket.AF_INET, socket.inet_pton(socket.AF_INET, host))}"
        address = socket.inet_pton(socket.AF_INET6, host)
    except (OSError, ValueError):
        return NOWHERE_KNOWN
    if address.startswith(_MAPPED):
        return f"address {socket.inet_ntop(socket.AF_INET, address[len(_MAPPED) :])}"
    network = address[:_IPV6_PREFIX] + bytes(len(address) - _IPV6_PREFIX)
    return f"address {socket.inet_ntop(socket.AF_INET6, network)}/{_IPV6_PREFIX * 8}"
