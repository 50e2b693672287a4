"""The engine: one peer's side of one connection, without I/O, tasks or time.

    receive(message)            -> the one Event that follows from it
    encode_*(...)               -> bytes; may fail, changes nothing
    sent / answered / dropped   -> the state changes that go with bytes given to the outbox

Encoding is apart from the state change, so that whoever owns a message pays for it (and fails alone), waits for room,
and then changes state and enqueues without a checkpoint between. What follows from what a peer sends is judged in
`receiving`.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import attrs

from trimcp.errors import ErrorReply, InvalidReply, LocalError
from trimcp.protocol.events import Admission, Event
from trimcp.protocol.legacy import Legacy
from trimcp.protocol.modern import Modern
from trimcp.protocol.profile import Profile, Role
from trimcp.protocol.receiving import Receiver
from trimcp.protocol.requests import Encoded, InboundRequest, OutboundRequest
from trimcp.protocol.states import INBOUND, OUTBOUND, Handshake, Inbound, InboundStep, OutboundStep, fire
from trimcp.protocol.vocabulary import Verb, foreign, vocabulary
from trimcp.wire import jsonrpc
from trimcp.wire.codes import INTERNAL_ERROR
from trimcp.wire.common import META_SUBSCRIPTION_ID, LoggingLevel
from trimcp.wire.converter import WireError
from trimcp.wire.jsonrpc import JSON, RequestId
from trimcp.wire.revisions import Revision

__all__ = ["Connection"]


@attrs.define(eq=False, repr=False)
class Connection:
    """One side of one connection.

    Args:
        role: which side we are.
        profile: how we introduce ourselves.
        served: the names of the methods that have a handler here; others are unknown to the peer.
        foreign: the names of methods that extensions bring and no revision has.
    """

    role: Role
    profile: Profile
    served: Container[str] = ()
    foreign: Container[str] = ()
    legacy: Legacy = attrs.field(init=False)
    modern: Modern = attrs.field(init=False)
    inbound: dict[RequestId, InboundRequest] = attrs.field(init=False, factory=dict)
    outbound: dict[RequestId, OutboundRequest] = attrs.field(init=False, factory=dict)
    _last_id: int = attrs.field(init=False, default=0)
    _receiver: Receiver = attrs.field(init=False)

    def __attrs_post_init__(self) -> None:
        self.legacy = Legacy(self.profile)
        self.modern = Modern(self.profile)
        self._receiver = Receiver(
            self.role,
            self.profile,
            self.served,
            self.foreign,
            self.legacy,
            self.modern,
            self.inbound,
            self.outbound,
        )

    @property
    def revision(self) -> Revision | None:
        """The revision this connection speaks when *we* start a message, or None before that is decided."""
        return self.modern.revision or self.legacy.revision

    def receive(self, message: jsonrpc.Message, principal: str | None = None) -> Event:
        """Return what follows from one incoming message. Never raises because of what it contains."""
        return self._receiver.receive(message, principal)

    # Answer requests

    def encode_result(self, request: InboundRequest, result: Any) -> bytes:
        """Return the reply to `request` as bytes.

        Raises:
            LocalError: the result cannot be said in JSON, or not in the request's revision.
        """
        if type(result) is Encoded:
            # Joined, not formatted: that copies a long list several times, as it makes room for it bit by bit.
            return b"".join((b'{"jsonrpc":"2.0","id":', jsonrpc.encode(request.id), b',"result":', result.data, b"}"))
        return jsonrpc.encode_result(request.id, self.dump_result(request, result))

    def dump_result(self, request: InboundRequest, result: Any) -> dict[str, JSON]:
        """Return a result as the JSON object its revision demands."""
        revision = request.admission.revision
        try:
            if revision.modern:
                return self.modern.dump_result(request.verb, result, revision)
            raw: dict[str, JSON] = request.verb.dump_result(result)
            return raw
        except WireError as error:
            raise LocalError(f"{request.verb.name} returned what {revision.name} cannot say: {error}") from error

    @staticmethod
    def encode_error(id: RequestId, error: ErrorReply) -> bytes:
        """Return an error reply as bytes; an error whose data JSON cannot carry loses its data."""
        try:
            return jsonrpc.encode_error(id, error.code, error.message, error.data)
        except LocalError:
            return jsonrpc.encode_error(id, INTERNAL_ERROR, "the error could not be encoded", None)

    def answered(self, id: RequestId) -> bool:
        """Note that the answer to the peer's request `id` goes out now; False if it was cancelled meanwhile."""
        request = self.inbound.pop(id, None)
        if request is None:
            return False
        if request.state is Inbound.CANCELLED:
            request.state = fire(INBOUND, request.state, InboundStep.DROP)
            return False
        request.state = fire(INBOUND, request.state, InboundStep.ANSWER)
        return True

    # Send requests and notifications

    def new_id(self) -> int:
        """Return an id no request of ours has used on this connection."""
        self._last_id += 1
        return self._last_id

    def verb(self, name: str) -> Verb:
        """Return the words for a message of ours.

        Raises:
            LocalError: nothing was agreed on yet, or the agreed revision has no such message in this direction.
        """
        revision = self.revision
        if revision is None:
            raise LocalError(f"{name} cannot be sent before the connection is initialized")
        verb = vocabulary(revision).get(name)
        if verb is None and name in self.foreign:
            verb = foreign(name)
        if verb is None or not (verb.from_client if self.role is Role.CLIENT else verb.from_server):
            raise LocalError(f"revision {revision.name} has no {name} in this direction")
        return verb

    def encode_request(
        self,
        id: RequestId,
        verb: Verb,
        params: Any,
        *,
        wants_progress: bool = False,
        meta: Mapping[str, JSON] | None = None,
    ) -> bytes:
        """Return a request of ours as bytes; `params` is the verb's payload or None, `meta` goes into `_meta`.

        Raises:
            LocalError: the params cannot be said in JSON, or not in this revision.
        """
        try:
            raw: dict[str, JSON] = {} if params is None else verb.dump_params(params)
        except WireError as error:
            raise LocalError(f"{verb.name} cannot be sent: {error}") from error
        token = id if wants_progress else None
        if self.modern.revision is not None:
            self.modern.stamp(raw, meta, token)
        elif token is not None or meta:
            raw["_meta"] = {**raw.get("_meta", {}), **(meta or {})}
            if token is not None:
                raw["_meta"]["progressToken"] = token
        return jsonrpc.encode_request(id, verb.name, raw or None)

    def may_call(self, verb: Verb) -> None:
        """Check that a request of ours may go out now.

        Raises:
            LocalError: it may not; nothing was sent.
        """
        if self.modern.revision is None:
            if self.legacy.handshake is Handshake.CLOSED:
                raise LocalError("the connection is closed")
            self.legacy.may_call(verb.name)

    def sent(self, id: RequestId, verb: Verb, *, wants_progress: bool = False) -> OutboundRequest:
        """Note that our request `id` has its place in the outbox."""
        request = self.outbound[id] = OutboundRequest(id, verb, wants_progress)
        return request

    def log_level(self, admission: Admission) -> LoggingLevel | None:
        """Return the lowest level of log message the asker wants now, or None for none at all."""
        return admission.log_level if admission.revision.logs_on_request else self.legacy.log_level

    def give_up(self, id: RequestId) -> bool:
        """Forget our request `id`; False if it was answered already. A late reply will find nothing."""
        request = self.outbound.pop(id, None)
        if request is None:
            return False
        request.state = fire(OUTBOUND, request.state, OutboundStep.GIVE_UP)
        return True

    def lose_all(self) -> list[OutboundRequest]:
        """Forget all requests of ours because the connection is gone, and return them."""
        lost = list(self.outbound.values())
        self.outbound.clear()
        for request in lost:
            request.state = fire(OUTBOUND, request.state, OutboundStep.LOSE)
        self.legacy.close()
        return lost

    def encode_notification(
        self,
        verb: Verb,
        params: Any,
        *,
        subscription: RequestId | None = None,
    ) -> bytes:
        """Return a notification of ours as bytes; one for a subscription carries its id in `_meta`."""
        try:
            raw: dict[str, JSON] = {} if params is None else verb.dump_params(params)
        except WireError as error:
            raise LocalError(f"{verb.name} cannot be sent: {error}") from error
        if subscription is not None:
            raw["_meta"] = {**raw.get("_meta", {}), META_SUBSCRIPTION_ID: subscription}
        return jsonrpc.encode_notification(verb.name, raw or None)

    def load_result(self, verb: Verb, raw: dict[str, Any]) -> Any:
        """Return the payload of the peer's answer to a request of ours.

        Raises:
            InvalidReply: it is no valid answer to this request.
        """
        try:
            if self.modern.revision is not None:
                return self.modern.load_result(verb, raw)
            return verb.load_result(raw)
        except WireError as error:
            raise InvalidReply(f"invalid answer to {verb.name}: {'; '.join(error.problems)}"[:500]) from None
