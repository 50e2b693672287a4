"""The receiving half of the engine: what follows from one message of the peer, as exactly one event.

Nothing here raises because of what a peer sent: it becomes `Rejected` or `Ignored`, and any exception is a bug of
ours. Requests pass the ladder of admission in this order: duplicate id, envelope, revision, method, params.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

import attrs

from trimcp.errors import ConnectionLost, ErrorReply, InvalidReply, Overloaded, RemoteError
from trimcp.protocol.events import (
    Admission,
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
    Settled,
)
from trimcp.protocol.legacy import Legacy
from trimcp.protocol.modern import Modern, recognises
from trimcp.protocol.profile import Profile, Role
from trimcp.protocol.requests import InboundRequest, OutboundRequest
from trimcp.protocol.states import INBOUND, OUTBOUND, Inbound, InboundStep, OutboundStep, fire
from trimcp.protocol.vocabulary import Verb, foreign, vocabulary
from trimcp.wire import jsonrpc
from trimcp.wire.codes import INVALID_PARAMS, INVALID_REQUEST, METHOD_NOT_FOUND, OVERLOADED
from trimcp.wire.converter import WireError
from trimcp.wire.fields import ABSENT
from trimcp.wire.jsonrpc import RequestId

__all__ = ["Receiver"]


@attrs.define(eq=False, repr=False)
class Receiver:
    """Judges what one peer sends. The eras and the tables of requests are the connection's own, and shared with it."""

    role: Role
    profile: Profile
    served: Container[str]
    foreign: Container[str]
    legacy: Legacy
    modern: Modern
    inbound: dict[RequestId, InboundRequest]
    outbound: dict[RequestId, OutboundRequest]

    def receive(self, message: jsonrpc.Message, principal: str | None) -> Event:
        """Return what follows from one incoming message. Never raises because of what it contains."""
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

    def _receive_request(self, request: jsonrpc.Request, principal: str | None) -> Event:
        try:
            if request.id in self.inbound:
                from trimcp.security import security_event

                security_event("duplicate_id", method=request.method, id=request.id, principal=principal)
                raise ErrorReply(INVALID_REQUEST, "a request with this id is already under way")
            return self._admit(request, principal)
        except ErrorReply as error:
            return self._reject(request, error)

    def _admit(self, request: jsonrpc.Request, principal: str | None) -> Event:
        params = request.params
        if params is None:
            params = {}
        name = request.method
        meta = params.get("_meta")
        if meta is not None and type(meta) is not dict:
            raise ErrorReply(INVALID_PARAMS, "_meta must be an object")
        if self.role is Role.CLIENT and self.modern.revision is not None:
            raise ErrorReply(METHOD_NOT_FOUND, "a server may not call its client in this revision")
        if self._is_modern(name, meta):
            admission = self.modern.admit(meta, principal)
        elif name == "initialize" or (name == "ping" and not self.legacy.agreed):
            return self._settle_early(request, params)
        else:
            admission = self.legacy.admit(meta, principal)
        verb = vocabulary(admission.revision).get(name)
        if verb is None and name in self.foreign:
            verb = foreign(name)
        if verb is None or verb.method.is_notification or not self._is_ours(verb):
            raise ErrorReply(METHOD_NOT_FOUND, f"unknown method: {name[:100]}")
        settled = self._settle(request.id, verb, params, admission)
        if settled is not None:
            return settled
        if name not in self.served:
            raise ErrorReply(METHOD_NOT_FOUND, f"method not offered here: {name[:100]}")
        loaded = self._load(verb, params)
        self.inbound[request.id] = InboundRequest(request.id, verb, admission)
        return RequestReceived(request.id, verb, loaded, params, admission)

    def _is_modern(self, name: str, meta: Mapping[str, Any] | None) -> bool:
        """Return whether a request is to be judged by the modern era's rules."""
        if self.role is Role.CLIENT or not self.modern.offered():
            return False
        modern = self.modern
        return modern.required or recognises(meta) or name == "server/discover" or not self.legacy.offered()

    def _is_ours(self, verb: Verb) -> bool:
        """Return whether the peer may send us this method at all."""
        return verb.from_client if self.role is Role.SERVER else verb.from_server

    @staticmethod
    def _load(verb: Verb, params: Mapping[str, Any]) -> Any:
        try:
            return verb.load_params(params)
        except WireError as error:
            problems = error.problems
            raise ErrorReply(
                INVALID_PARAMS,
                f"invalid params for {verb.name}: {'; '.join(problems)}"[:500],
                {"problems": problems},
            ) from None

    def _settle_early(self, request: jsonrpc.Request, params: Mapping[str, Any]) -> Settled:
        """Answer what may come before anything was agreed on."""
        if self.role is Role.CLIENT or request.method == "ping":
            if request.method != "ping":
                raise ErrorReply(METHOD_NOT_FOUND, "unknown method: initialize")
            return Settled(request.id, "ping", jsonrpc.encode_result(request.id, {}))
        revision, result = self.legacy.initialize(params)
        raw = vocabulary(revision)["initialize"].dump_result(result)
        return Settled(request.id, "initialize", jsonrpc.encode_result(request.id, raw))

    def _settle(self, id: RequestId, verb: Verb, params: Mapping[str, Any], admission: Admission) -> Settled | None:
        """Answer what concerns the connection itself and no handler."""
        name = verb.name
        if name == "ping":
            return Settled(id, name, jsonrpc.encode_result(id, {}))
        if name == "server/discover":
            raw = self.modern.dump_result(verb, self.modern.discovered(), admission.revision)
            return Settled(id, name, jsonrpc.encode_result(id, raw))
        if name == "logging/setLevel" and name in self.served:
            self.legacy.log_level = self._load(verb, params).level
            return Settled(id, name, jsonrpc.encode_result(id, {}))
        return None

    def _reject(self, request: jsonrpc.Request, error: ErrorReply) -> Rejected:
        # 2026-07-28 stdio: a client MUST NOT write responses, not even to refuse.
        if self.role is Role.CLIENT and self.modern.revision is not None:
            return Rejected(f"the server sent a request ({request.method[:100]})")
        reply = jsonrpc.encode_error(request.id, error.code, error.message, error.data)
        return Rejected(f"{request.method[:100]}: {error}", reply, request.id, error.code)

    def _receive_reply(
        self, id: RequestId, result: dict[str, Any] | None, error: Exception | None
    ) -> Replied | Ignored:
        request = self.outbound.get(id)
        if request is None:
            return Ignored("a reply to nothing that is under way")
        request.state = fire(OUTBOUND, request.state, OutboundStep.REPLY)
        del self.outbound[id]
        return Replied(id, result, error)

    def _receive_error(self, message: jsonrpc.ErrorResponse) -> Event:
        kind = Overloaded if message.code == OVERLOADED else RemoteError
        if message.id is None:
            return Ignored(f"an error that answers no request: {message.message[:200]} (code {message.code})")
        return self._receive_reply(message.id, None, kind(message.code, message.message, message.data))

    def _receive_loss(self, message: jsonrpc.Lost) -> Event:
        if message.id is None:
            return Forgotten(message.message)
        return self._receive_reply(message.id, None, ConnectionLost(message.message))

    def _receive_malformed(self, message: jsonrpc.Malformed) -> Event:
        may_answer = message.is_request and self.modern.revision is None if self.role is Role.CLIENT else True
        if not (may_answer and message.answerable):
            # A client answers what is a request by its id and its method. Other garbage it never does: a server that
            # prints into its output would be answered into its input.
            if message.id is not None and message.id in self.outbound and not message.is_request:
                return self._receive_reply(message.id, None, InvalidReply(message.message))
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
        """Whether an error that answers no readable id says `"id": null`; newer revisions leave the id out."""
        revision = self.modern.revision or self.legacy.revision
        return revision is None or not revision.error_without_id

    def _receive_notification(self, message: jsonrpc.Notification, principal: str | None) -> Event:
        params: Mapping[str, Any] = message.params or {}
        name = message.method
        revision = self.modern.revision or self.legacy.revision
        if revision is None:
            # Nothing was agreed on: a modern peer may still cancel what it asked.
            revision = self.profile.revisions[-1]
        verb = vocabulary(revision).get(name)
        if verb is None or not verb.method.is_notification or not self._is_ours(verb):
            return Ignored(f"unknown notification: {name[:100]}")
        if name == "notifications/initialized":
            return self._receive_initialized()
        try:
            loaded = verb.load_params(params)
        except WireError as error:
            return Ignored(f"invalid {name}: {'; '.join(error.problems)}"[:500])
        if name == "notifications/cancelled":
            # 0 and "" are ids like any other.
            id = None if loaded.request_id is ABSENT else loaded.request_id
            return self._receive_cancelled(id, loaded.reason or None)
        if name == "notifications/progress":
            request = self.outbound.get(loaded.progress_token)
            if request is None or not request.wants_progress:
                return Ignored("progress for nothing that is under way")
            return Progressed(request.id, loaded)
        meta = params.get("_meta")
        peer, abilities = self.legacy.peer, self.legacy.capabilities
        admission = Admission(revision, peer, abilities or self.profile.capabilities, None, None, meta, principal)
        return Notified(verb, loaded, admission)

    def _receive_initialized(self) -> Event:
        if self.role is Role.SERVER and self.legacy.initialized():
            revision, capabilities = self.legacy.revision, self.legacy.capabilities
            assert revision is not None
            assert capabilities is not None
            verb = vocabulary(revision)["notifications/initialized"]
            return Notified(verb, None, Admission(revision, self.legacy.peer, capabilities))
        return Ignored("notifications/initialized out of turn")

    def _receive_cancelled(self, id: RequestId | None, reason: str | None) -> Event:
        request = self.inbound.get(id) if id is not None else None
        if request is not None and request.state is Inbound.UNDER_WAY:
            request.state = fire(INBOUND, request.state, InboundStep.CANCEL)
            return Cancelled(request.id, reason)
        ours = self.outbound.get(id) if id is not None else None
        if request is None and ours is not None and ours.verb.name == "subscriptions/listen":
            # The one cancellation a modern server may send: it tears a subscription down for a cause.
            return self._receive_reply(ours.id, None, ConnectionLost(reason or "the server ended the subscription"))
        return Ignored("a cancellation of nothing that is under way")

    def _receive_batch(self, batch: jsonrpc.Batch, principal: str | None) -> Event:
        revision = self.legacy.revision
        if revision is None or not revision.batching:
            if self.role is Role.CLIENT:
                return Ignored("an array of messages, which this revision does not have")
            named = "before initialize" if revision is None else f"in {revision.name}"
            reply = jsonrpc.encode_error(
                None, INVALID_REQUEST, f"arrays of messages are not allowed {named}", null_id=self._null_id
            )
            return Rejected("an array of messages", reply, None, INVALID_REQUEST)
        return BatchReceived(tuple(self.receive(member, principal) for member in batch.members))
