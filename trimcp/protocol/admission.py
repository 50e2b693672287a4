"""Decides whether a request of the peer may begin: pure, from state handed in. Changes nothing.

The order is: duplicate id (`Connection`), envelope, revision, method, params. What is wrong is an `ErrorReply`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from trimcp.errors import ErrorReply
from trimcp.protocol.events import Admission
from trimcp.protocol.legacy import Legacy
from trimcp.protocol.modern import Modern, recognises
from trimcp.protocol.profile import Role
from trimcp.protocol.vocabulary import Verb, foreign, vocabulary
from trimcp.wire.codes import INVALID_PARAMS, METHOD_NOT_FOUND
from trimcp.wire.converter import WireError
from trimcp.wire.revisions import Revision

__all__ = ["admit", "find_verb", "load_params", "may_send"]


def admit(role: Role, legacy: Legacy, modern: Modern, name: str, meta: Any, principal: str | None) -> Admission | None:
    """Return who asks, in which revision; None for what may come before anything was agreed on.

    Args:
        role: which side we are.
        legacy, modern: the state of both eras.
        name: the request's method.
        meta: its `_meta` as it came.
        principal: who the transport says it is.

    Raises:
        ErrorReply: nobody may ask so here.
    """
    if meta is not None and type(meta) is not dict:
        raise ErrorReply(INVALID_PARAMS, "_meta must be an object")
    if role is Role.CLIENT:
        if modern.revision is not None:
            raise ErrorReply(METHOD_NOT_FOUND, "a server may not call its client in this revision")
    elif modern.offered() and (
        modern.required or recognises(meta) or name == "server/discover" or not legacy.offered()
    ):
        return modern.admit(meta, principal)
    if name == "initialize" or (name == "ping" and not legacy.agreed):
        return None
    return legacy.admit(meta, principal)


def find_verb(role: Role, revision: Revision, name: str, foreign_names: Container[str]) -> Verb:
    """Return the request method of this name, if the revision or an extension has it and the peer may send it.

    Raises:
        ErrorReply: it may not (-32601).
    """
    verb = vocabulary(revision).get(name)
    if verb is None and name in foreign_names:
        verb = foreign(name)
    if verb is None or verb.method.is_notification or not may_send(role, verb):
        raise ErrorReply(METHOD_NOT_FOUND, f"unknown method: {name[:100]}")
    return verb


def may_send(role: Role, verb: Verb) -> bool:
    """Return whether our peer may send this method at all."""
    return verb.from_client if role is Role.SERVER else verb.from_server


def load_params(verb: Verb, params: Mapping[str, Any]) -> Any:
    """Return a request's payload.

    Raises:
        ErrorReply: the params do not fit the method (-32602); `data` lists every problem.
    """
    try:
        return verb.load_params(params)
    except WireError as error:
        problems = error.problems
        text = f"invalid params for {verb.name}: {'; '.join(problems)}"[:500]
        raise ErrorReply(INVALID_PARAMS, text, {"problems": problems}) from None
