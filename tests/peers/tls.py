"""Certificates for tests, all of one authority."""

from __future__ import annotations

import ssl
from functools import cache
from pathlib import Path

import trustme

__all__ = ["authority", "certificate_file", "client_context", "server_context"]


@cache
def authority() -> trustme.CA:
    """The authority, which takes a while to make."""
    return trustme.CA()


def server_context(*names: str) -> ssl.SSLContext:
    """A server's context, with a certificate for these names."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    authority().issue_cert(*names).configure_cert(context)
    return context


def client_context() -> ssl.SSLContext:
    """A client's context, which trusts the authority."""
    context = ssl.create_default_context()
    authority().configure_trust(context)
    return context


def certificate_file(folder: Path, *names: str) -> Path:
    """A file with a certificate for these names, and its key."""
    path = folder / "server.pem"
    authority().issue_cert(*names).private_key_and_cert_chain_pem.write_to_path(str(path))
    return path
