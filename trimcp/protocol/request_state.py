"""Seals and opens `requestState`: data that a server keeps between two rounds of one request, stored by the client.

The client may be hostile (2026-07-28 basic/patterns/mrtr, "Server Requirements"). So the state is signed with
HMAC-SHA256 and bound to an expiry time, to the principal and to its request. It is *not secret*: the client can read
it, unless a cipher is given. It may be used more than once; a caller who must prevent that has to remember it.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import os
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import attrs
import orjson

from trimcp.errors import LocalError, McpError
from trimcp.support.bounds import check_members
from trimcp.support.slotted import slotted
from trimcp.wire import jsonrpc

_TRANSIENT = frozenset({"_meta", "inputResponses", "requestState"})
# A larger state is refused before any cryptography: this is for small data, not a database. JWTs are usually below
# 8 KiB; the answers to a few questions, including a sampled text, fit.
_MAX_STATE = 256 * 1024


class InvalidState(McpError):
    """A `requestState` that was altered, has expired or belongs to another principal or request."""


class Cipher(Protocol):
    """Anything that encrypts and decrypts bytes, for example `cryptography.fernet.Fernet`."""

    def encrypt(self, data: bytes) -> bytes: ...
    def decrypt(self, token: bytes) -> bytes: ...


@slotted
class Memory:
    """What is kept from round to round of one request."""

    answers: dict[str, Any] = attrs.field(factory=dict)  # raw answers by question key
    asked: dict[str, str] = attrs.field(factory=dict)  # the digest of the question last asked under each key
    kept: dict[str, Any] = attrs.field(factory=dict)  # results of `ctx.once`, by its key
    progress: float | None = None  # the last progress that was reported, or None


def _digest(value: Any) -> str:
    return hashlib.sha256(orjson.dumps(value, option=orjson.OPT_SORT_KEYS)).hexdigest()[:32]


def request_digest(method: str, params: Mapping[str, Any]) -> str:
    """Return a digest that identifies a request in all rounds: method and params without what changes between them."""
    return _digest([method, {name: value for name, value in params.items() if name not in _TRANSIENT}])


def question_key(method: str, params: Mapping[str, Any], occurrence: int) -> str:
    """Return the key of a question that one run of a handler asks for the `occurrence`-th time (from 0)."""
    return f"{_digest([method, params])}-{occurrence}"


@slotted
class Sealer:
    """Seals and opens request states with a list of keys: the first seals, all of them open (key rotation)."""

    # secrets of at least 16 bytes each, newest first; shared by all workers of one server. None creates a random one,
    # for a single process only.
    keys: Sequence[bytes] | None = None
    lifetime: float = 3600.0  # seconds for which a sealed state is valid
    cipher: Cipher | None = None  # also encrypts the contents, if the client must not read them
    _macs: list[bytes] = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        keys = [os.urandom(32)] if self.keys is None else list(check_members("state_keys", self.keys, bytes, "bytes"))
        if not keys or any(len(key) < 16 for key in keys):
            raise LocalError("state keys must be at least 16 bytes each, newest first")
        self._macs = keys

    def seal(self, memory: Memory, *, digest: str, principal: str | None, now: float) -> str:
        """Return the state as a string for the client to send back. `now` is in seconds since the epoch.

        Raises LocalError: it is too large, or a result of `once` is not JSON.
        """
        fields: dict[str, Any] = {
            "exp": int(now + self.lifetime),
            "req": digest,
            "who": principal,
            "answers": memory.answers,
            "asked": memory.asked,
            "kept": memory.kept,
        }
        if memory.progress is not None:
            fields["progress"] = memory.progress
        body = jsonrpc.encode(fields)
        if self.cipher is not None:
            body = self.cipher.encrypt(body)
        mac = hmac.digest(self._macs[0], body, "sha256")
        state = base64.urlsafe_b64encode(mac + body).decode("ascii")
        if len(state) > _MAX_STATE:
            raise LocalError(f"the answers so far make a state of {len(state)} bytes; {_MAX_STATE} can be remembered")
        return state

    def open(self, state: str, *, digest: str, principal: str | None, now: float) -> Memory:
        """Return the memory that was passed to `seal`.

        Raises InvalidState: it was altered, has expired, or belongs to another principal or request. The text says
        which; log it, but never send it to the peer.
        """
        if len(state) > _MAX_STATE:
            raise InvalidState("too large")
        try:
            blob = base64.b64decode(state.encode("ascii"), altchars=b"-_", validate=True)
        except (binascii.Error, UnicodeEncodeError):
            raise InvalidState("not base64") from None
        mac, body = blob[:32], blob[32:]
        # Every key is tried, in constant time each, so that the timing does not reveal which one matched.
        matches = [hmac.compare_digest(mac, hmac.digest(key, body, "sha256")) for key in self._macs]
        if not any(matches):
            raise InvalidState("altered")
        if self.cipher is not None:
            try:
                body = self.cipher.decrypt(body)
            except Exception as error:  # each library has its own; all of them mean that another key was used
                raise InvalidState("not ours to read") from error
        fields = orjson.loads(body)
        if fields["exp"] < now:
            raise InvalidState("expired")
        if fields["who"] != principal:
            raise InvalidState("another principal's")
        if fields["req"] != digest:
            raise InvalidState("another request's")
        return Memory(fields["answers"], fields["asked"], fields["kept"], fields.get("progress"))

    def bind(self, id: str, principal: str) -> str:
        """Return an id that only this principal can use: `unbind` returns it."""
        return f"{id}.{self._tag(self._macs[0], id, principal)}"

    def unbind(self, bound: str, principal: str) -> str | None:
        """Return the id that was passed to `bind`; None for what is not of this principal, or altered."""
        id, _, tag = bound.rpartition(".")
        matches = [hmac.compare_digest(tag.encode(), self._tag(key, id, principal).encode()) for key in self._macs]
        return id if any(matches) else None

    @staticmethod
    def _tag(key: bytes, id: str, principal: str) -> str:
        text = jsonrpc.encode(["id", id, principal])  # no sealed state begins like this
        return base64.urlsafe_b64encode(hmac.digest(key, text, "sha256")[:18]).decode("ascii")
