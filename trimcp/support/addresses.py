"""Hosts and ports as text, and which hosts are this machine."""

from __future__ import annotations

from functools import lru_cache
from ipaddress import IPv6Address, ip_address
from typing import Final

PORTS: Final = {"http": 80, "https": 443}
"""The ports that a URL need not name, by its scheme."""


def bracketed(host: str) -> str:
    """Return a host as URLs and headers have it: an IPv6 address in brackets."""
    return f"[{host}]" if ":" in host else host


def authority(host: str, port: int | None, default: int | None) -> str:
    """Return what a URL and the header Host have of a host and its port, which the default of the scheme is not."""
    return bracketed(host) if port in (None, default) else host_port(host, port)


def host_port(host: str, port: object) -> str:
    """Return "127.0.0.1:8000" or "[::1]:8000"."""
    return f"{bracketed(host)}:{port}"


@lru_cache(256)  # clients send the same host with each request
def is_loopback_address(text: str) -> bool | None:
    """Return whether an IP address is a loopback address, an IPv4 one also mapped into IPv6; None for other text."""
    try:
        address = IPv6Address(text[1:-1]) if text.startswith("[") else ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return (mapped or address).is_loopback


@lru_cache(256)
def is_loopback(host: str) -> bool:
    """Return whether a host's name or address stands for this machine."""
    found = is_loopback_address(host)
    return host == "localhost" or host.endswith(".localhost") if found is None else found
