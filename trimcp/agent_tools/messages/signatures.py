"""Signatures of calls at callback URLs, as Standard Webhooks has them: https://www.standardwebhooks.com

The headers `webhook-id`, `webhook-timestamp` and `webhook-signature` carry an HMAC-SHA256 of the id, the time and the
body, so whoever gets a call knows that it comes from a holder of the secret, is unaltered and recent. Libraries for it
exist in many languages; `verify_callback` is one for Python.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Mapping, Sequence
from typing import Final, TypeAlias

ID: Final = "webhook-id"
TIMESTAMP: Final = "webhook-timestamp"
SIGNATURE: Final = "webhook-signature"

Secret: TypeAlias = bytes | str
"""At least 24 bytes, or the text "whsec_" with them in base64."""

_LEAST: Final = 24  # bytes; what Standard Webhooks recommends at least
_PREFIX: Final = "whsec_"
_MOST_SIGNATURES: Final = 16


class BadSignature(ValueError):
    """A call is not signed with a secret that is known here, or it is not recent."""


def secret_bytes(secret: Secret) -> bytes:
    """Return the bytes of a secret. Raises ValueError if they are too few, or are not written as they should be."""
    if isinstance(secret, str):
        if not secret.startswith(_PREFIX):
            raise ValueError(f'a secret is bytes, or the text "{_PREFIX}" followed by base64')
        try:
            secret = base64.b64decode(secret.removeprefix(_PREFIX), validate=True)
        except (binascii.Error, ValueError):
            raise ValueError(f'what follows "{_PREFIX}" in the secret is no base64') from None
    if len(secret) < _LEAST:
        raise ValueError(f"a secret has at least {_LEAST} bytes; secrets.token_bytes(32) makes one")
    return secret


def signed_headers(secret: bytes, id: str, body: bytes) -> dict[str, str]:
    """Return the headers that sign a body now."""
    timestamp = str(int(time.time()))
    return {ID: id, TIMESTAMP: timestamp, SIGNATURE: _signature(secret, id, timestamp, body)}


def verify_callback(
    headers: Mapping[str, str], body: bytes, secret: Secret | Sequence[Secret], *, tolerance: float = 300.0
) -> str:
    """Check that a call comes from the service that it should come from, and return its id.

    Whoever overheard a call can repeat it within the tolerance. If that matters, remember the ids meanwhile.

    Args:
        headers: of the request.
        body: of the request, exactly as it came.
        secret: shared with the service; several while one replaces the other.
        tolerance: seconds that the two clocks, and the way, may differ.

    Raises:
        BadSignature: do not carry the call out.
    """
    said = {name.lower(): value for name, value in headers.items()}
    id, timestamp, signatures = (said.get(name, "") for name in (ID, TIMESTAMP, SIGNATURE))
    if not (id and timestamp and signatures):
        raise BadSignature("the call is not signed")
    if not (timestamp.isascii() and timestamp.isdigit() and len(timestamp) <= 12):
        raise BadSignature("the time of the call is no number")
    if abs(time.time() - int(timestamp)) > tolerance:
        raise BadSignature("the call is not recent, or one of the clocks is wrong")
    known = [secret] if isinstance(secret, bytes | str) else secret
    expected = [_signature(secret_bytes(each), id, timestamp, body).encode() for each in known]
    for text in signatures.split()[:_MOST_SIGNATURES]:
        given = text.encode(errors="replace")
        if any(hmac.compare_digest(given, each) for each in expected):
            return id
    raise BadSignature("the signature is wrong")


def _signature(secret: bytes, id: str, timestamp: str, body: bytes) -> str:
    content = f"{id}.{timestamp}.".encode(errors="replace") + body
    return "v1," + base64.b64encode(hmac.digest(secret, content, hashlib.sha256)).decode("ascii")
