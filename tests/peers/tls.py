"""Certificates for tests, all of one authority."""

from __future__ import annotations

import base64
import hashlib
import ssl
from functools import cache
from pathlib import Path

import trustme

__all__ = [
    "authority",
    "certificate_file",
    "client_certificate_context",
    "client_context",
    "mutual_context",
    "server_context",
]


@cache
def authority() -> trustme.CA:
    """The authority, which takes a while to make."""
    return trustme.CA()


@cache
def _certificate(*names: str) -> trustme.LeafCert:
    return authority().issue_cert(*names)


def server_context(*names: str) -> ssl.SSLContext:
    """A server's context, with a certificate for these names."""
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    _certificate(*names).configure_cert(context)
    return context


def client_context() -> ssl.SSLContext:
    """A client's context, which trusts the authority."""
    context = ssl.create_default_context()
    authority().configure_trust(context)
    return context


def certificate_file(folder: Path, *names: str) -> Path:
    """A file with a certificate for these names, and its key."""
    path = folder / "server.pem"
    _certificate(*names).private_key_and_cert_chain_pem.write_to_path(str(path))
    return path


def client_certificate_context() -> tuple[ssl.SSLContext, str]:
    """A client's context with a certificate of its own, and that certificate's digest as tokens name it (RFC 8705)."""
    context = client_context()
    issued = _certificate("client.example")
    issued.configure_cert(context)
    der = ssl.PEM_cert_to_DER_cert(issued.cert_chain_pems[0].bytes().decode())
    return context, base64.urlsafe_b64encode(hashlib.sha256(der).digest()).rstrip(b"=").decode()


def mutual_context(*names: str) -> ssl.SSLContext:
    """A server's context that asks clients for certificates of the authority."""
    context = server_context(*names)
    authority().configure_trust(context)
    context.verify_mode = ssl.CERT_OPTIONAL
    return context
