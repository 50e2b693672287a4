"""The protocol engine: one side of one connection, without I/O, tasks or time.

    receive(message)            -> the one Event that follows from it
    encode_*(...)               -> bytes; may fail, changes nothing
    sent / answered / dropped   -> the state changes that belong to bytes put into the outbox

Encoding and the state change are separate, so that the sender of a message encodes it (and fails alone), waits for
room, and then changes the state and enqueues without a checkpoint between. No message from a peer raises: it becomes
`Rejected` or `Ignored`. A request is checked in this order: duplicate id, envelope, revision, method, params.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from itertools import islice
from typing import Any, Final

import attrs

from trimcp.errors import (
    AuthorizationError,
    ConnectionLost,
    ErrorReply,
    InvalidReply,
    LocalError,
    NotStarted,
    Overloaded,
    RemoteError,
    Stopped,
)
from trimcp.principal import Principal
from trimcp.protocol.bound_methods import BoundMethod, foreign, methods_of, sent_by
from trimcp.protocol.events import (
    Admission,
    AnsweredByEngine,
    BatchReceived,
    Cancelled,
    Event,
    Forgotten,
    Ignored,
    Notified,
    Progressed,
    Rejected,
    Replied,
    RequestReceived,
)
from trimcp.protocol.legacy import Legacy
from trimcp.protocol.modern import Modern, recognises
from trimcp.protocol.profile import Profile, Role
from trimcp.protocol.states import INBOUND, Handshake, Inbound, InboundStep, fire
from trimcp.support.slotted import slotted
from trimcp.wire import codes, jsonrpc
from trimcp.wire.common import META_PROGRESS_TOKEN, META_SUBSCRIPTION_ID, RESULT_COMPLETE, LoggingLevel
from trimcp.wire.converter import NotInRevision, WireError, converter_for, without_marked
from trimcp.wire.jsonrpc import JSON, RequestId
from trimcp.wire.methods import METHODS, OPENING
from trimcp.wire.revisions import Revision

_REMEMBERED: Final = 1_000


@slotted(frozen=True)
class Encoded:
    """A result that is already encoded: the JSON text of the result object in UTF-8, complete for its revision.

    `value` is its payload, for middleware; None if nobody wants it.
    """

    data: bytes
    value: Any = None


@slotted
class OutboundRequest:
    """A request of ours, in progress at the peer."""

    id: RequestId
    method: BoundMethod
    wants_progress: bool


@slotted
class Connection:
    """One side of one connection.

    It has more than 300 lines because both directions share ids, revision and the two eras.
    """

    role: Role  # which side this is
    profile: Profile  # what we send about ourselves
    served: Container[str] = ()  # the names of the methods that have a handler here; others are unknown to the peer
    foreign: Container[str] = ()  # the names of methods that are defined by extensions and by no revision
    heard: Container[str] = ()  # the names of notifications that are handled here, including those of extensions
    strict: bool = False  # whether a result is invalid as a whole if a member of its list cannot be read
    legacy: Legacy = attrs.field(init=False)
    modern: Modern = attrs.field(init=False)
    inbound: dict[RequestId, RequestReceived] = attrs.field(init=False, factory=dict)
    outbound: dict[RequestId, OutboundRequest] = attrs.field(init=False, factory=dict)
    _last_id: int = attrs.field(init=False, default=0)
    _given_up: set[RequestId] = attrs.field(init=False, factory=set)  # a reply to one of these is only late
    # What the peer may send, in the revision of its last request: nearly always that of all. And what we may.
    _revision: Revision | None = attrs.field(init=False, default=None)
    _requests: Mapping[str, BoundMethod] = attrs.field(init=False, factory=dict)
    _own_revision: Revision | None = attrs.field(init=False, default=None)
    _own_methods: Mapping[str, BoundMethod] = attrs.field(init=False, factory=dict)

    def __attrs_post_init__(self) -> None:
        self.legacy = Legacy(self.profile)
        self.modern = Modern(self.profile)

    @property
    def revision(self) -> Revision | None:
        """The revision of messages that *we* start, or None before it is decided."""
        return self.modern.revision or self.legacy.revision

    # Receive

    def receive(self, message: jsonrpc.Message, principal: Principal | None = None) -> Event:
        """Return the event that follows from one received message. Never raises because of its contents."""
        if isinstance(message, jsonrpc.Request):
            return self._receive_request(message, principal)
        if isinstance(message, jsonrpc.Response):
            return self._receive_reply(message.id, message.result, None)
        if isinstance(message, jsonrpc.Notification):
            return self._receive_notification(message, principal)
        if isinstance(message, jsonrpc.ErrorResponse):
            return self._receive_error(message)
        if isinstance(message, jsonrpc.Batch):
            return self._receive_batch(message, principal)
        if isinstance(message, jsonrpc.Lost):
            return self._receive_loss(message)
        return self._receive_malformed(message)

    def _receive_request(self, request: jsonrpc.Request, principal: Principal | None) -> Event:
        id, name = request.id, request.method
        params: Mapping[str, Any] = {} if request.params is None else request.params
        try:
            if id in self.inbound:
                from trimcp.security import security_event

                security_event("duplicate_id", method=name, id=id, principal=principal)
                raise ErrorReply(codes.INVALID_REQUEST, "a request with this id is already under way")
            admission = self._admit(name, params.get("_meta"), principal)
            if admission is None:
                return self._answer_early(id, name, params)
            if admission.revision is not self._revision:
                peer = Role.CLIENT if self.role is Role.SERVER else Role.SERVER
                self._revision, self._requests = admission.revision, sent_by(peer, admission.revision)
            method = self._requests.get(name)
            if method is None or method.row.is_notification:
                method = self._foreign_method(name)
            if method.by_engine and (answer := self._answer(method, params, admission)) is not None:
                return AnsweredByEngine(id, name, jsonrpc.encode_result(id, answer))
            if name not in self.served:
                raise ErrorReply(codes.METHOD_NOT_FOUND, f"method not offered here: {name[:100]}")
            loaded = method.load_params(params)
        except ErrorReply as error:
            return self._reject(request, error)
        except WireError as error:
            return self._reject(request, _invalid_params(name, error))
        received = self.inbound[id] = RequestReceived(id, method, loaded, params, admission)
        return received

    def _admit(self, name: str, meta: Any, principal: Principal | None) -> Admission | None:
        """Return who asks, in which revision; None for requests allowed before a revision is agreed on.

        Raises ErrorReply: the request is not allowed.
        """
        if meta is None:
            if self.legacy.handshake is Handshake.READY and name not in OPENING:
                return self.legacy.admit(None, principal)
        elif type(meta) is not dict:
            raise ErrorReply(codes.INVALID_PARAMS, "_meta must be an object")
        if self.role is Role.CLIENT:
            if self.modern.revision is not None:
                raise ErrorReply(codes.METHOD_NOT_FOUND, "a server may not call its client in this revision")
        elif self.profile.modern and (
            self.modern.required or recognises(meta) or name == "server/discover" or not self.profile.legacy
        ):
            if name == "initialize" and not recognises(meta):
                raise self.modern.no_handshake()
            return self.modern.admit(meta, principal)
        if name == "initialize" or (name == "ping" and not self.legacy.agreed):
            return None
        return self.legacy.admit(meta, principal)

    def _foreign_method(self, name: str) -> BoundMethod:
        """Return a request method of an extension, which no revision defines."""
        assert self._revision is not None
        if name in self.foreign and name not in methods_of(self._revision):
            return foreign(name)
        raise ErrorReply(codes.METHOD_NOT_FOUND, f"unknown method: {name[:100]}")

    def _answer_early(self, id: RequestId, name: str, params: Mapping[str, Any]) -> AnsweredByEngine:
        """Answer a request that is allowed before a revision is agreed on."""
        if name == "ping":
            return AnsweredByEngine(id, name, jsonrpc.encode_result(id, {}))
        if self.role is Role.CLIENT:
            raise ErrorReply(codes.METHOD_NOT_FOUND, "unknown method: initialize")
        revision, result = self.legacy.initialize(params)
        raw = methods_of(revision)["initialize"].dump_result(result)
        return AnsweredByEngine(id, name, jsonrpc.encode_result(id, raw))

    def _answer(self, method: BoundMethod, params: Mapping[str, Any], admission: Admission) -> dict[str, JSON] | None:
        """Return the result of a request about the connection itself, for which there is no handler; else None."""
        name = method.name
        if name == "ping":
            return {}
        if name == "server/discover":
            return self.modern.dump_result(method, self.modern.discovered(), admission.revision)
        if name == "logging/setLevel" and name in self.served:
            self.legacy.log_level = method.load_params(params).level
            return {}
        return None

    def _reject(self, request: jsonrpc.Request, error: ErrorReply) -> Rejected:
        # 2026-07-28 stdio: a client MUST NOT send responses, not even errors.
        if self.role is Role.CLIENT and self.modern.revision is not None:
            return Rejected(f"the server sent a request ({request.method[:100]})")
        reply = jsonrpc.encode_error(request.id, error.code, error.message, error.data)
        return Rejected(f"{request.method[:100]}: {error}", reply, request.id, error.code)

    def _receive_reply(
        self, id: RequestId, result: dict[str, Any] | None, error: Exception | None
    ) -> Replied | Ignored:
        if self.outbound.pop(id, None) is None:
            return self._receive_stray(id, result, error)
        return Replied(id, result, error)

    def _receive_stray(
        self, id: RequestId, result: dict[str, Any] | None, error: Exception | None
    ) -> Replied | Ignored:
        """Take a reply whose id is that of a request as text; tell of one that answers nothing, unless it is late."""
        named = jsonrpc.own_id(id)
        if named != id and named in self.outbound:
            return self._receive_reply(named, result, error)
        if named in self._given_up:
            self._given_up.discard(named)
        else:
            self._tell_stray(f"a reply with the id {str(id)[:40]!r}, which no request under way has")
        return Ignored("a reply to nothing that is under way")

    def _tell_stray(self, why: str) -> None:
        """Tell of a reply that may be meant for a request which else would wait for ever."""
        if self.role is Role.CLIENT and self.outbound:
            from trimcp.security import security_event

            waiting = ", ".join(request.method.name for request in islice(self.outbound.values(), 3))
            security_event("server_garbage", why=f"{why}; unanswered: {waiting}")

    def _receive_error(self, message: jsonrpc.ErrorResponse) -> Event:
        kind = _error_class(message)
        if message.id is None:
            why = f"an error that answers no request: {message.message[:200]} (code {message.code})"
            self._tell_stray(why)
            return Ignored(why)
        error = kind(message.code, message.message, message.data)
        request = self.outbound.get(message.id) or self.outbound.get(jsonrpc.own_id(message.id))
        if request is not None:
            error.method = request.method.name
        return self._receive_reply(message.id, None, error)

    def _receive_loss(self, message: jsonrpc.Lost) -> Event:
        if message.id is None:
            return Forgotten(message.message)
        if message.authorization is not None:
            return self._receive_reply(message.id, None, AuthorizationError(message.message, message.authorization))
        lost = ConnectionLost(message.message, nothing_sent=message.nothing_sent)
        return self._receive_reply(message.id, None, lost)

    def _receive_malformed(self, message: jsonrpc.Malformed) -> Event:
        may_answer = message.is_request and self.modern.revision is None if self.role is Role.CLIENT else True
        if not (may_answer and message.answerable):
            # A client answers only what is a request by its id and its method, and no other garbage: the output that a
            # server prints must not be answered into its input.
            if message.id is not None and message.id in self.outbound and not message.is_request:
                method = self.outbound[message.id].method.row
                readable = None if self.strict else without_marked(message, method)
                error = InvalidReply(message.message) if readable is None else None
                return self._receive_reply(message.id, readable, error)
            self._tell_garbage(message)
            return Ignored(f"not a message: {message.message}")
        self._tell_garbage(message)
        data = {"reason": message.reason}
        reply = jsonrpc.encode_error(message.id, message.code, message.message, data, null_id=self._null_id)
        return Rejected(message.message, reply, message.id, message.code)

    def _tell_garbage(self, message: jsonrpc.Malformed) -> None:
        from trimcp.security import security_event

        if self.role is Role.CLIENT:
            security_event("server_garbage", why=message.message)
        elif message.reason == "size":
            security_event("oversize", why=message.message, id=message.id)
        else:
            security_event("garbage", why=message.message, id=message.id)

    @property
    def _null_id(self) -> bool:
        """Whether an error for an unreadable id has `"id": null`; newer revisions omit the id."""
        revision = self.modern.revision or self.legacy.revision
        return revision is None or not revision.error_without_id

    def _receive_notification(self, message: jsonrpc.Notification, principal: Principal | None) -> Event:
        params: Mapping[str, Any] = message.params or {}
        name = message.method
        revision = self.modern.revision or self.legacy.revision
        if revision is None:
            # No revision is agreed on: a modern peer may still cancel its request.
            revision = self.profile.revisions[-1]
        method = methods_of(revision).get(name)
        if method is None and name in self.heard and name not in METHODS:
            method = foreign(name, notification=True)
        told = method is not None and (method.from_client if self.role is Role.SERVER else method.from_server)
        if method is None or not method.row.is_notification or not told:
            return Ignored(f"unknown notification: {name[:100]}")
        if name == "notifications/initialized":
            return self._receive_initialized(principal)
        try:
            loaded = method.load_params(params)
        except WireError as error:
            return Ignored(f"invalid {name}: {'; '.join(error.problems)}"[:500])
        if name == "notifications/cancelled":
            return self._receive_cancelled(loaded.request_id, loaded.reason or None)
        if name == "notifications/progress":
            request = self.outbound.get(loaded.progress_token)
            if request is None or not request.wants_progress:
                return Ignored("progress for nothing that is under way")
            return Progressed(request.id, loaded)
        meta = params.get("_meta")
        peer, abilities = self.legacy.peer, self.legacy.capabilities
        admission = Admission(revision, peer, abilities or self.profile.capabilities, None, None, meta, principal)
        return Notified(method, loaded, admission)

    def _receive_initialized(self, principal: Principal | None) -> Event:
        if self.role is Role.SERVER and self.legacy.initialized():
            revision, capabilities = self.legacy.revision, self.legacy.capabilities
            assert revision is not None
            assert capabilities is not None
            method = methods_of(revision)["notifications/initialized"]
            return Notified(method, None, Admission(revision, self.legacy.peer, capabilities, principal=principal))
        return Ignored("notifications/initialized out of turn")

    def _receive_cancelled(self, id: RequestId | None, reason: str | None) -> Event:
        request = self.inbound.get(id) if id is not None else None
        if request is not None and request.state is Inbound.UNDER_WAY:
            request.state = fire(INBOUND, request.state, InboundStep.CANCEL)
            return Cancelled(request.id, reason)
        ours = self.outbound.get(id) if id is not None else None
        if request is None and ours is not None and ours.method.name == "subscriptions/listen":
            # The only cancellation that a modern server may send: it ends a subscription with a reason.
            return self._receive_reply(ours.id, None, ConnectionLost(reason or "the server ended the subscription"))
        return Ignored("a cancellation of nothing that is under way")

    def _receive_batch(self, batch: jsonrpc.Batch, principal: Principal | None) -> Event:
        revision = self.legacy.revision
        if revision is None or not revision.batching:
            if self.role is Role.CLIENT:
                return self._refuse_answers(batch)
            named = "before initialize" if revision is None else f"in {revision.name}"
            reply = jsonrpc.encode_error(
                None, codes.INVALID_REQUEST, f"arrays of messages are not allowed {named}", null_id=self._null_id
            )
            return Rejected("an array of messages", reply, None, codes.INVALID_REQUEST)
        return BatchReceived(tuple(self._receive_member(member, principal) for member in batch.members))

    def _receive_member(self, member: jsonrpc.Message, principal: Principal | None) -> Event:
        if isinstance(member, jsonrpc.Request) and member.method == "initialize":
            return self._reject(member, ErrorReply(codes.INVALID_REQUEST, "initialize may not be in an array"))
        return self.receive(member, principal)

    def _refuse_answers(self, batch: jsonrpc.Batch) -> Event:
        """Fail the requests answered in an array, in a revision without arrays: no other answer will follow."""
        revision = self.modern.revision or self.legacy.revision
        where = "nothing has before initialize" if revision is None else f"{revision.name} does not have"
        why = f"the server answered in an array, which {where}"
        events: list[Event] = []
        for member in batch.members:
            if isinstance(member, jsonrpc.Request | jsonrpc.Notification) or getattr(member, "is_request", False):
                continue  # only answers matter here
            if member.id in self.outbound:
                events.append(self._receive_reply(member.id, None, InvalidReply(why)))
        return BatchReceived(tuple(events)) if events else Ignored(why)

    # Answer requests

    def encode_result(self, request: RequestReceived, result: Any) -> bytes:
        """Return the reply to `request` as bytes. Raises LocalError: the result cannot be encoded as JSON.

        Raises NotInRevision: the request's revision cannot express it; see `refusal`.
        """
        if type(result) is Encoded:
            # Joining is faster than formatting, which copies a long bytes object several times as it grows.
            return b"".join((b'{"jsonrpc":"2.0","id":', jsonrpc.encode(request.id), b',"result":', result.data, b"}"))
        return jsonrpc.encode({"jsonrpc": "2.0", "id": request.id, "result": self.dump_result(request, result)})

    def dump_result(self, request: RequestReceived, result: Any) -> dict[str, JSON]:
        """Return a result as the JSON object that its revision requires."""
        revision = request.admission.revision
        try:
            if revision.modern:
                return self.modern.dump_result(request.method, result, revision)
            raw: dict[str, JSON] = request.method.dump_result(result)
            return raw
        except NotInRevision:
            raise
        except WireError as error:
            raise LocalError(f"{request.method.name} returned what {revision.name} cannot say: {error}") from error

    @staticmethod
    def refusal(request: RequestReceived, error: NotInRevision) -> Any:
        """Return a result that reports that the request's revision cannot express the original one.

        Raises ErrorReply: the results of this method cannot report that.
        """
        text = f"the result cannot be sent: {error}"
        if request.method.row.failed is None:
            raise ErrorReply(codes.INTERNAL_ERROR, text, {"reason": "revision"})
        return request.method.row.failed(text)

    @staticmethod
    def encode_error(id: RequestId, error: ErrorReply) -> bytes:
        """Return an error reply as bytes. One whose data cannot be encoded as JSON is an internal error."""
        try:
            return jsonrpc.encode_error(id, error.code, jsonrpc.sendable(error.message), jsonrpc.sendable(error.data))
        except (LocalError, RecursionError):
            return jsonrpc.encode_error(id, codes.INTERNAL_ERROR, "the error could not be encoded", None)

    def answered(self, id: RequestId) -> bool:
        """Note that the answer to the peer's request `id` is sent now; return False if it was cancelled before."""
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
        """Return an id that no request of ours has used on this connection."""
        self._last_id += 1
        return self._last_id

    def skip_ids(self, number: int) -> None:
        """Use no id up to this number: an earlier engine of the same session may have."""
        self._last_id = number

    def method(self, name: str) -> BoundMethod:
        """Return the method for a message of ours.

        Raises LocalError: no revision is agreed on yet, or the revision has no such message in this direction.
        """
        revision = self.modern.revision or self.legacy.revision
        if revision is None:
            raise LocalError(f"{name} cannot be sent before the connection is initialized")
        if revision is not self._own_revision:
            self._own_revision, self._own_methods = revision, sent_by(self.role, revision)
        method = self._own_methods.get(name)
        if method is None and name in self.foreign and name not in methods_of(revision):
            method = foreign(name)
        if method is None:
            raise LocalError(f"revision {revision.name} has no {name} in this direction")
        return method

    def encode_request(
        self,
        id: RequestId,
        method: BoundMethod,
        params: Any,
        *,
        wants_progress: bool = False,
        meta: Mapping[str, JSON] | None = None,
    ) -> bytes:
        """Return a request of ours as bytes; `params` is the method's payload or None, `meta` goes into `_meta`.

        Raises LocalError: the params cannot be encoded as JSON, or not in this revision (`NotInRevision`).
        """
        try:
            raw: dict[str, JSON] = {} if params is None else method.dump_params(params)
        except NotInRevision as error:
            raise NotInRevision([f"{method.name} cannot be sent: {error}"]) from None
        except WireError as error:
            raise LocalError(f"{method.name} cannot be sent: {error}") from error
        token = id if wants_progress else None
        if self.modern.revision is not None:
            self.modern.stamp(raw, meta, token)
        elif token is not None or meta:
            raw["_meta"] = {**raw.get("_meta", {}), **(meta or {})}
            if token is not None:
                raw["_meta"][META_PROGRESS_TOKEN] = token
        return jsonrpc.encode_request(id, method.name, raw or None)

    def may_call(self, method: BoundMethod) -> None:
        """Check that a request of ours may be sent now. Raises LocalError: it may not; nothing was sent."""
        if self.modern.revision is None:
            if self.legacy.handshake is Handshake.CLOSED:
                raise LocalError("the connection is closed")
            self.legacy.may_call(method.name)

    def sent(self, id: RequestId, method: BoundMethod, *, wants_progress: bool = False) -> OutboundRequest:
        """Note that our request `id` is being put into the outbox."""
        request = self.outbound[id] = OutboundRequest(id, method, wants_progress)
        return request

    def log_level(self, admission: Admission) -> LoggingLevel | None:
        """Return the lowest level of log messages that the peer wants now, or None for none at all."""
        return admission.log_level if admission.revision.logs_on_request else self.legacy.log_level

    def give_up(self, id: RequestId) -> bool:
        """Forget our request `id`; return False if it was answered already. A late reply will be ignored."""
        if self.outbound.pop(id, None) is None:
            return False
        if len(self._given_up) < _REMEMBERED:
            self._given_up.add(id)
        return True

    def lose_all(self) -> None:
        """Forget all our requests, because the connection is gone."""
        self.outbound.clear()
        self.legacy.close()

    def encode_notification(self, method: BoundMethod, params: Any, *, subscription: RequestId | None = None) -> bytes:
        """Return a notification of ours as bytes; one for a subscription has its id in `_meta`."""
        try:
            raw: dict[str, JSON] = {} if params is None else method.dump_params(params)
        except WireError as error:
            raise LocalError(f"{method.name} cannot be sent: {error}") from error
        if subscription is not None:
            raw["_meta"] = {**raw.get("_meta", {}), META_SUBSCRIPTION_ID: subscription}
        try:
            return jsonrpc.encode_notification(method.name, raw or None)
        except jsonrpc.Unencodable:
            return jsonrpc.encode_notification(method.name, jsonrpc.sendable(raw))

    def load_result(self, method: BoundMethod, raw: dict[str, Any]) -> Any:
        """Return the payload of the peer's answer to a request of ours, without list members that cannot be read.

        Raises InvalidReply: it is not a valid answer to this request.
        """
        try:
            try:
                if self.modern.revision is not None:
                    return self.modern.load_result(method, raw)
                return method.load_result(raw)
            except WireError:
                revision = self.revision
                if self.strict or revision is None or raw.get("resultType", RESULT_COMPLETE) != RESULT_COMPLETE:
                    raise
            return converter_for(revision).load_readable(raw, method.row)
        except WireError as error:
            if "structuredContent" in raw and "content" not in raw:
                return self.load_result(method, {**raw, "content": []})  # some servers leave it out
            raise InvalidReply(f"invalid answer to {method.name}: {'; '.join(error.problems)}"[:500]) from None


def _invalid_params(name: str, error: WireError) -> ErrorReply:
    """Return the error for params that do not fit their method (-32602); its `data` lists every problem."""
    text = f"invalid params for {name}: {'; '.join(error.problems)}"[:500]
    return ErrorReply(codes.INVALID_PARAMS, text, {"problems": error.problems})


def _error_class(error: jsonrpc.ErrorResponse) -> type[RemoteError]:
    """Return the class of a peer's error. Others may use our code of a drain for something else; the reason tells."""
    if error.code == codes.OVERLOADED:
        return Overloaded
    data = error.data if isinstance(error.data, dict) else {}
    if error.code == codes.CANCELLED_BY_DRAIN and data.get("reason") == codes.ERRORS[error.code].reason:
        return NotStarted if data.get("started") is False else Stopped
    return RemoteError
