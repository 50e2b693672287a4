"""The rules of the legacy era: a handshake, capabilities stored per connection, and a server that may call its client.

Source: "Lifecycle" (basic/lifecycle) of the revisions 2024-11-05 to 2025-11-25, whose texts differ but whose rules are
the same. This is one of the three places that may depend on an era.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from trimcp.errors import ErrorReply, InvalidReply, LocalError
from trimcp.principal import Principal
from trimcp.protocol.bound_methods import methods_of
from trimcp.protocol.events import Admission
from trimcp.protocol.profile import Profile
from trimcp.protocol.states import HANDSHAKE, Handshake, HandshakeStep, fire
from trimcp.support.slotted import slotted
from trimcp.wire.capabilities import ClientCapabilities, ServerCapabilities
from trimcp.wire.codes import INVALID_PARAMS, INVALID_REQUEST
from trimcp.wire.common import META_PROGRESS_TOKEN, Implementation, LoggingLevel
from trimcp.wire.converter import WireError
from trimcp.wire.lifecycle import InitializeParams, InitializeResult
from trimcp.wire.revisions import Revision, find

# Used until the client sets a level: the specification leaves the choice to the server.
_DEFAULT_LOG_LEVEL: LoggingLevel = "info"


@slotted
class Legacy:
    """The legacy state of one connection; the same class for both roles."""

    profile: Profile
    handshake: Handshake = Handshake.NEW  # the state of the handshake
    revision: Revision | None = None  # the revision agreed on, from AGREED on
    peer: Implementation | None = None  # the other side's name and version, from AGREED on
    capabilities: ClientCapabilities | ServerCapabilities | None = None  # what the other side declared, from AGREED on
    instructions: str | None = None  # the server's instructions for the model
    kept: int = 0  # approximate bytes of memory of the last three
    log_level: LoggingLevel = _DEFAULT_LOG_LEVEL  # the lowest level of log messages that the client wants
    # whether another `initialize` begins anew: on a pipe, which a bridge may share among its clients
    reopens: bool = False
    # What is known of a request without `_meta`, which does not change from one to the next.
    _plain: Admission | None = None

    def _fire(self, step: HandshakeStep) -> None:
        self.handshake = fire(HANDSHAKE, self.handshake, step)

    @property
    def agreed(self) -> bool:
        """Whether a revision has been agreed on."""
        return self.handshake is Handshake.READY or self.handshake is Handshake.AGREED

    # As a server

    def initialize(self, params: Mapping[str, Any]) -> tuple[Revision, InitializeResult]:
        """Process a client's `initialize` and return the agreed revision and our answer.

        The client's own revision is used if we support it, else our newest (basic/lifecycle, "Version Negotiation").
        Raises ErrorReply: no revision can be agreed on, or the client's data is too large (`Profile.max_peer_info`).
        """
        if self.handshake is not Handshake.NEW and not (self.reopens and self.agreed):
            raise ErrorReply(INVALID_REQUEST, "this connection was initialized already")
        ours = self.profile.legacy
        if not ours:
            raise ErrorReply(INVALID_PARAMS, "this server speaks no revision that starts with initialize")
        wanted = find(str(params.get("protocolVersion")))
        revision = ours[-1] if wanted is None or wanted not in ours else wanted
        said = params.get("clientInfo"), params.get("capabilities")
        kept = self.profile.weigh_client("clientInfo and capabilities", *said)
        try:
            asked: InitializeParams = methods_of(revision)["initialize"].load_params(params)
        except WireError as error:
            raise ErrorReply(INVALID_PARAMS, "invalid initialize", {"problems": error.problems}) from None
        self.handshake = Handshake.NEW
        self._fire(HandshakeStep.INITIALIZE)
        self._fire(HandshakeStep.RESULT)
        self.revision, self.peer, self.capabilities = revision, asked.client_info, asked.capabilities
        self.kept, self.log_level, self._plain = kept, _DEFAULT_LOG_LEVEL, None
        profile = self.profile
        assert isinstance(profile.capabilities, ServerCapabilities)
        result = InitializeResult(
            protocol_version=revision.name,
            capabilities=profile.capabilities,
            server_info=profile.info,
            instructions=profile.instructions,
        )
        return revision, result

    def initialized(self) -> bool:
        """Process the client's `notifications/initialized`; return False if it was not expected and changes nothing."""
        if self.handshake is not Handshake.AGREED:
            return False
        self._fire(HandshakeStep.INITIALIZED)
        return True

    def assume(self, revision: Revision) -> None:
        """Skip the handshake, with a client that declared nothing: for servers that keep no sessions."""
        for step in (HandshakeStep.INITIALIZE, HandshakeStep.RESULT, HandshakeStep.INITIALIZED):
            self._fire(step)
        self.revision, self.capabilities = revision, ClientCapabilities()

    # As a client

    def offer(self, revision: Revision) -> InitializeParams:
        """Return the params of our `initialize`."""
        self._fire(HandshakeStep.INITIALIZE)
        assert isinstance(self.profile.capabilities, ClientCapabilities)
        return InitializeParams(
            protocol_version=revision.name, capabilities=self.profile.capabilities, client_info=self.profile.info
        )

    def refused(self) -> None:
        """Note that the server refused our `initialize`, so that another attempt may follow."""
        self._fire(HandshakeStep.REFUSED)

    def accept(self, raw: Mapping[str, Any]) -> InitializeResult:
        """Process the server's answer to our `initialize`.

        Raises InvalidReply: it is not valid, names a revision that we do not offer, or its data is too large
        (`Profile.max_peer_info`); the client has to disconnect.
        """
        name = raw.get("protocolVersion")
        revision = find(str(name))
        if revision is None or revision not in self.profile.legacy:
            offered = ", ".join(r.name for r in self.profile.legacy)
            raise InvalidReply(f"the server answered initialize with revision {str(name)[:40]!r}; we offer {offered}")
        said = raw.get("serverInfo"), raw.get("capabilities"), raw.get("instructions")
        kept = self.profile.weigh_server(*said)
        try:
            result: InitializeResult = methods_of(revision)["initialize"].load_result(raw)
        except WireError as error:
            raise InvalidReply(f"invalid answer to initialize: {'; '.join(error.problems)}") from None
        self._fire(HandshakeStep.RESULT)
        self._fire(HandshakeStep.INITIALIZED)
        self.revision, self.peer, self.capabilities = revision, result.server_info, result.capabilities
        self.instructions, self.kept = result.instructions or None, kept
        return result

    # Both roles

    def close(self) -> None:
        """Note that the connection is gone."""
        self._fire(HandshakeStep.CLOSE)

    def admit(self, meta: Mapping[str, Any] | None, principal: Principal | None) -> Admission:
        """Return what is known about the sender of a request on this connection.

        Raises ErrorReply: no revision is agreed on yet.
        """
        plain = self._plain
        if meta is None and plain is not None and plain.principal is principal and plain.log_level == self.log_level:
            return plain
        if self.revision is None or self.capabilities is None:
            raise ErrorReply(INVALID_REQUEST, "send initialize first: this connection has not been initialized")
        token = meta.get(META_PROGRESS_TOKEN) if meta else None
        if token is not None and type(token) is not str and type(token) is not int:
            raise ErrorReply(INVALID_PARAMS, "progressToken must be a string or an integer")
        admission = Admission(self.revision, self.peer, self.capabilities, self.log_level, token, meta, principal)
        if meta is None:
            self._plain = admission
        return admission

    def may_call(self, method: str) -> None:
        """Check that we may send the request `method` now.

        Raises LocalError: the handshake is not done (basic/lifecycle, "Initialization").
        """
        if self.handshake is not Handshake.READY and method != "ping":
            raise LocalError(f"{method} cannot be sent before the connection is initialized")
