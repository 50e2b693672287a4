"""The rules of the modern era: no handshake; every request carries its sender's name, revision and capabilities.

Source: 2026-07-28 basic/index ("_meta", "Statelessness") and basic/versioning. This is one of the three places that
may depend on an era.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar, get_args

import orjson

from trimcp.errors import AnsweredByTask, ErrorReply, InvalidReply
from trimcp.principal import Principal
from trimcp.protocol.bound_methods import BoundMethod
from trimcp.protocol.events import Admission
from trimcp.protocol.profile import Profile
from trimcp.support.slotted import slotted
from trimcp.wire.capabilities import TASKS, ClientCapabilities, ServerCapabilities
from trimcp.wire.codes import INVALID_PARAMS, UNSUPPORTED_VERSION
from trimcp.wire.common import (
    META_CLIENT_CAPABILITIES,
    META_CLIENT_INFO,
    META_LOG_LEVEL,
    META_PROGRESS_TOKEN,
    META_PROTOCOL_VERSION,
    META_SERVER_INFO,
    RESULT_COMPLETE,
    RESULT_TASK,
    Implementation,
    LoggingLevel,
)
from trimcp.wire.converter import WireError, converter_for
from trimcp.wire.input_requests import InputRequiredResult
from trimcp.wire.jsonrpc import JSON, RequestId
from trimcp.wire.lifecycle import DiscoverResult
from trimcp.wire.revisions import Revision

_T = TypeVar("_T")
_LOG_LEVELS: Final = get_args(LoggingLevel)
_ENVELOPE: Final = 3  # members that are the same in each request of a client: revision, capabilities and name


def recognises(meta: Mapping[str, Any] | None) -> bool:
    """Return whether a request with this `_meta` belongs to the modern era."""
    return meta is not None and (META_PROTOCOL_VERSION in meta or META_CLIENT_CAPABILITIES in meta)


def _named(profile: Profile, revision: Revision) -> orjson.Fragment:
    """Return our name as JSON, encoded once for all connections of a profile."""
    known = profile.named.get(revision.name)
    if known is None or known[0] is not profile.info:
        known = (profile.info, orjson.Fragment(orjson.dumps(converter_for(revision).dump(profile.info))))
        profile.named[revision.name] = known
    return known[1]


@slotted
class Modern:
    """The modern side of one connection. It keeps no state of requests."""

    profile: Profile
    revision: Revision | None = None  # our revision as a client, once it is known
    required: bool = False  # whether a server accepts only the modern era on this connection
    _stamp: tuple[Any, dict[str, JSON]] | None = None

    # As a server

    def admit(self, meta: Mapping[str, Any] | None, principal: Principal | None) -> Admission:
        """Check a request's envelope and return who sent it.

        Raises ErrorReply: a required field is missing, invalid or too large (-32602), or the revision is not supported
        (-32022).
        """
        known: Admission | None = self.profile.admitted
        if known is not None and known.meta == meta and known.principal is principal:
            return known
        if meta is None or META_PROTOCOL_VERSION not in meta or META_CLIENT_CAPABILITIES not in meta:
            missing = [k for k in (META_PROTOCOL_VERSION, META_CLIENT_CAPABILITIES) if not meta or k not in meta]
            raise ErrorReply(INVALID_PARAMS, f"_meta lacks {' and '.join(missing)}", {"missing": missing})
        name = meta[META_PROTOCOL_VERSION]
        if type(name) is not str:
            raise ErrorReply(INVALID_PARAMS, f"_meta {META_PROTOCOL_VERSION} must be a string")
        revision = next((served for served in self.profile.modern if served.name == name), None)
        raw = meta[META_CLIENT_CAPABILITIES]
        capabilities = self._load(META_CLIENT_CAPABILITIES, raw, ClientCapabilities, revision)
        if revision is None:
            data = {"supported": self._names(), "requested": name[:64]}
            raise ErrorReply(UNSUPPORTED_VERSION, "unsupported protocol version", data)
        token = meta.get(META_PROGRESS_TOKEN)
        if token is not None and type(token) is not str and type(token) is not int:
            raise ErrorReply(INVALID_PARAMS, "_meta progressToken must be a string or an integer")
        level = meta.get(META_LOG_LEVEL)
        if level is not None and level not in _LOG_LEVELS:
            raise ErrorReply(INVALID_PARAMS, f"_meta {META_LOG_LEVEL} must be one of {', '.join(_LOG_LEVELS)}")
        raw = meta.get(META_CLIENT_INFO)
        info = None if raw is None else self._load(META_CLIENT_INFO, raw, Implementation, revision)
        admission = Admission(revision, info, capabilities, level, token, meta, principal)
        if len(meta) == _ENVELOPE - (raw is None):
            self.profile.admitted = admission
        return admission

    def no_handshake(self) -> ErrorReply:
        """Return the error for `initialize`. It names our revisions, since legacy clients cannot ask for them."""
        names = self._names()
        text = f"this server has no initialize; it speaks {', '.join(names)}, where requests carry _meta"
        return ErrorReply(INVALID_PARAMS, text, {"supported": names})

    def _names(self) -> list[str]:
        return [revision.name for revision in reversed(self.profile.modern)]

    def _load(self, key: str, raw: Any, type_: type[_T], revision: Revision | None) -> _T:
        """Return the payload of one member of the envelope; if it was sent unchanged, the one loaded last."""
        last = self.profile.heard.get(key)
        if last is not None and last[0] == raw:
            loaded: _T = last[1]
            return loaded
        self.profile.weigh_client(f"_meta {key}", raw)
        try:
            loaded = converter_for(revision or self.profile.modern[-1]).load(raw, type_)
        except WireError as error:
            raise ErrorReply(INVALID_PARAMS, f"_meta {key} is invalid", {"problems": error.problems}) from None
        self.profile.heard[key] = (raw, loaded)
        return loaded

    def discovered(self) -> DiscoverResult:
        """Return our answer to `server/discover`. It names only revisions that may be used in a request's `_meta`."""
        profile = self.profile
        assert isinstance(profile.capabilities, ServerCapabilities)
        return DiscoverResult(
            supported_versions=self._names(),
            capabilities=profile.capabilities,
            ttl_ms=profile.discover_ttl_ms,
            cache_scope="public",
            instructions=profile.instructions,
        )

    def dump_result(self, method: BoundMethod, result: Any, revision: Revision) -> dict[str, JSON]:
        """Return the result as a JSON object with our name in its `_meta` ("Per-response protocol fields")."""
        if type(result) is InputRequiredResult:
            raw: dict[str, JSON] = converter_for(revision).dump(result)
        else:
            raw = method.dump_result(result)
            raw.setdefault("resultType", RESULT_COMPLETE)  # an extension's result may omit it
        info = _named(self.profile, revision)
        meta = raw.get("_meta")
        raw["_meta"] = {META_SERVER_INFO: info} if not meta else {**meta, META_SERVER_INFO: info}
        return raw

    # As a client

    def stamp(self, raw: dict[str, JSON], extra: Mapping[str, JSON] | None, token: RequestId | None) -> None:
        """Add the envelope to the params of a request of ours."""
        profile = self.profile
        revision = self.revision
        assert revision is not None
        stamp = self._stamp
        if stamp is None or stamp[0] is not profile.capabilities:
            capabilities = orjson.dumps(converter_for(revision).dump(profile.capabilities))
            fields: dict[str, JSON] = {
                META_PROTOCOL_VERSION: revision.name,
                META_CLIENT_INFO: _named(profile, revision),
                META_CLIENT_CAPABILITIES: orjson.Fragment(capabilities),
            }
            stamp = self._stamp = (profile.capabilities, fields)
        meta = dict(stamp[1])
        if own := raw.get("_meta"):
            meta.update(own)
        if extra:
            meta.update(extra)
        if token is not None:
            meta[META_PROGRESS_TOKEN] = token
        raw["_meta"] = meta

    def load_result(self, method: BoundMethod, raw: dict[str, Any]) -> Any:
        """Return the payload of a server's answer, by its `resultType`; a missing one means complete.

        Raises InvalidReply if that type is unknown or not allowed for the method, WireError if the result does not fit.
        """
        kind = raw.setdefault("resultType", "complete")
        if kind == "complete":
            if method.row.cacheable:
                # "If ttlMs is absent, clients SHOULD assume a default of 0" (server/utilities/caching).
                raw.setdefault("ttlMs", 0)
                raw.setdefault("cacheScope", "private")
            return method.load_result(raw)
        if kind == "input_required" and method.row.may_ask_from is not None and self.revision is not None:
            return converter_for(self.revision).load(raw, InputRequiredResult)
        if (
            kind == RESULT_TASK
            and method.name == "tools/call"
            and TASKS in (self.profile.capabilities.extensions or {})
        ):
            raise AnsweredByTask(raw)
        raise InvalidReply(f"{method.name} was answered with result type {str(kind)[:40]!r}, which we do not know")
