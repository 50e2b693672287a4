"""The Model Context Protocol for Trio: servers and clients whose connections are nursery-scoped actors.

Everything public is here, in `trimcp.testing`, and in `trimcp.wire` for payloads used less often.
"""

from __future__ import annotations

import importlib
import typing

if typing.TYPE_CHECKING:
    from trimcp.channel import Incoming, Kind, MessageChannel, Origin, Outgoing
    from trimcp.client.client import Client
    from trimcp.client.combinators import Mapped, Outcome, call_all, first_of, hedge, map_bounded
    from trimcp.client.connect import Target
    from trimcp.client.facade import ClientSession
    from trimcp.client.fingerprints import fingerprint
    from trimcp.client.forms import fill_defaults
    from trimcp.client.group import Group
    from trimcp.client.hosts import read_servers
    from trimcp.client.relistening import UpstreamSubscription
    from trimcp.client.supervision import Breaker, Health, Restarts, UpstreamState, UpstreamStatistics
    from trimcp.client.upstream import Upstream
    from trimcp.errors import (
        CannotAsk,
        ConnectionLost,
        ErrorReply,
        InvalidReply,
        LocalError,
        McpError,
        NoGoodAnswer,
        Overloaded,
        RemoteError,
        ResourceNotFound,
        ToolError,
        UpstreamDown,
    )
    from trimcp.hidden import HiddenText, hidden_text, show_hidden, strip_hidden
    from trimcp.net import asgi_app, http, http_face, run_http, serve_http, serve_websocket, websocket
    from trimcp.run import InProcess, in_process, load_servers, run_stdio, serve_stdio, stdio
    from trimcp.security import SECURITY_EVENTS, security_event
    from trimcp.server.arguments import Arg
    from trimcp.server.audit import Audit
    from trimcp.server.declared import Elicit
    from trimcp.server.filters import HiddenTextFilter, PatternFilter, SecretsFilter, SizeFilter
    from trimcp.server.forms import Form
    from trimcp.server.forms import form_for as form
    from trimcp.server.logbridge import LogBridge
    from trimcp.server.media import Audio, Image
    from trimcp.server.notices import Notice
    from trimcp.server.processes import ProcessStatistics
    from trimcp.server.running import Running
    from trimcp.server.server import Server
    from trimcp.server.statistics import ServerStatistics
    from trimcp.server.threads import ThreadContext
    from trimcp.server.turns import TurnStatistics
    from trimcp.session.calls import Call
    from trimcp.session.context import Context
    from trimcp.session.job import CancelReason
    from trimcp.session.limits import Limits, Quota
    from trimcp.session.listening import PromptsChanged, ResourcesChanged, ResourceUpdated, Subscription, ToolsChanged
    from trimcp.session.statistics import Lane, Lanes, Statistics
    from trimcp.transports.child import StdioServer
    from trimcp.transports.http.access import AccessLog, JsonFormatter
    from trimcp.transports.http.client import HttpServer
    from trimcp.transports.http.client import Timeouts as HttpTimeouts
    from trimcp.transports.http.events import EventStore, MemoryEvents
    from trimcp.transports.http.events_sqlite import SqliteEvents
    from trimcp.transports.http.hypercorn import serve_hypercorn
    from trimcp.transports.http.identity import Principal, Refused, bearer_tokens
    from trimcp.transports.http.limits import HttpLimits
    from trimcp.transports.http.origins import Origins
    from trimcp.transports.http.settings import Settings as HttpSettings
    from trimcp.transports.memory import memory_channels
    from trimcp.transports.websocket_client import WebSocketServer
    from trimcp.watching import watchdog
    from trimcp.wire.common import Annotations, Icon, Implementation
    from trimcp.wire.completion import Completion
    from trimcp.wire.content import (
        AudioContent,
        BlobResourceContents,
        EmbeddedResource,
        ImageContent,
        ResourceLink,
        TextContent,
        TextResourceContents,
    )
    from trimcp.wire.elicitation import ElicitFormParams, ElicitParams, ElicitResult, ElicitURLParams
    from trimcp.wire.input_required import InputRequiredResult
    from trimcp.wire.lifecycle import ProgressParams
    from trimcp.wire.logs import LoggingMessageParams
    from trimcp.wire.prompts import GetPromptResult, Prompt, PromptMessage
    from trimcp.wire.resources import ReadResourceResult, Resource, ResourceTemplate
    from trimcp.wire.revisions import LATEST, LATEST_LEGACY, REVISIONS, Revision
    from trimcp.wire.roots import Root
    from trimcp.wire.sampling import CreateMessageParams, CreateMessageResult, SamplingMessage
    from trimcp.wire.tools import CallToolResult, Tool, ToolAnnotations

    Text = TextContent
    """Short for `TextContent`: `result.content == [trimcp.Text("sunny")]`."""
else:
    # A program is a server or a client, rarely both, and its start should cost what it uses. So a name is looked up at
    # its first use. Type checkers read the imports above; a test holds the two lists together.
    _MODULES = {
        "channel": "Incoming Kind MessageChannel Origin Outgoing",
        "client.client": "Client",
        "client.combinators": "Mapped Outcome call_all first_of hedge map_bounded",
        "client.connect": "Target",
        "client.facade": "ClientSession",
        "client.fingerprints": "fingerprint",
        "client.forms": "fill_defaults",
        "client.group": "Group",
        "client.hosts": "read_servers",
        "client.relistening": "UpstreamSubscription",
        "client.supervision": "Breaker Health Restarts UpstreamState UpstreamStatistics",
        "client.upstream": "Upstream",
        "errors": "CannotAsk ConnectionLost ErrorReply InvalidReply LocalError "
        "McpError NoGoodAnswer Overloaded RemoteError ResourceNotFound ToolError UpstreamDown",
        "net": "asgi_app http http_face run_http serve_http serve_websocket websocket",
        "hidden": "HiddenText hidden_text show_hidden strip_hidden",
        "run": "InProcess in_process load_servers run_stdio serve_stdio stdio",
        "security": "SECURITY_EVENTS security_event",
        "server.arguments": "Arg",
        "server.audit": "Audit",
        "server.declared": "Elicit",
        "server.filters": "HiddenTextFilter PatternFilter SecretsFilter SizeFilter",
        "server.forms": "Form form=form_for",
        "server.logbridge": "LogBridge",
        "server.media": "Audio Image",
        "server.notices": "Notice",
        "server.processes": "ProcessStatistics",
        "server.running": "Running",
        "server.server": "Server",
        "server.statistics": "ServerStatistics",
        "server.threads": "ThreadContext",
        "server.turns": "TurnStatistics",
        "session.calls": "Call",
        "session.context": "Context",
        "session.job": "CancelReason",
        "session.limits": "Limits Quota",
        "session.listening": "PromptsChanged ResourcesChanged ResourceUpdated Subscription ToolsChanged",
        "session.statistics": "Lane Lanes Statistics",
        "transports.child": "StdioServer",
        "transports.http.access": "AccessLog JsonFormatter",
        "transports.http.client": "HttpServer HttpTimeouts=Timeouts",
        "transports.http.events": "EventStore MemoryEvents",
        "transports.http.events_sqlite": "SqliteEvents",
        "transports.http.hypercorn": "serve_hypercorn",
        "transports.http.identity": "Principal Refused bearer_tokens",
        "transports.http.limits": "HttpLimits",
        "transports.http.origins": "Origins",
        "transports.http.settings": "HttpSettings=Settings",
        "transports.memory": "memory_channels",
        "transports.websocket_client": "WebSocketServer",
        "watching": "watchdog",
        "wire.common": "Annotations Icon Implementation",
        "wire.completion": "Completion",
        "wire.content": "AudioContent BlobResourceContents EmbeddedResource ImageContent "
        "ResourceLink TextContent TextResourceContents Text=TextContent",
        "wire.elicitation": "ElicitFormParams ElicitParams ElicitResult ElicitURLParams",
        "wire.input_required": "InputRequiredResult",
        "wire.lifecycle": "ProgressParams",
        "wire.logs": "LoggingMessageParams",
        "wire.prompts": "GetPromptResult Prompt PromptMessage",
        "wire.resources": "ReadResourceResult Resource ResourceTemplate",
        "wire.revisions": "LATEST LATEST_LEGACY REVISIONS Revision",
        "wire.roots": "Root",
        "wire.sampling": "CreateMessageParams CreateMessageResult SamplingMessage",
        "wire.tools": "CallToolResult Tool ToolAnnotations",
    }
    _HOMES = {entry.partition("=")[0]: (module, entry) for module, names in _MODULES.items() for entry in names.split()}

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        module, entry = _HOMES[name]
        value = globals()[name] = getattr(importlib.import_module(f"trimcp.{module}"), entry.rpartition("=")[2])
        return value

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__all__ = [
    "LATEST",
    "LATEST_LEGACY",
    "REVISIONS",
    "SECURITY_EVENTS",
    "AccessLog",
    "Annotations",
    "Arg",
    "Audio",
    "AudioContent",
    "Audit",
    "BlobResourceContents",
    "Breaker",
    "Call",
    "CallToolResult",
    "CancelReason",
    "CannotAsk",
    "Client",
    "ClientSession",
    "Completion",
    "ConnectionLost",
    "Context",
    "CreateMessageParams",
    "CreateMessageResult",
    "Elicit",
    "ElicitFormParams",
    "ElicitParams",
    "ElicitResult",
    "ElicitURLParams",
    "EmbeddedResource",
    "ErrorReply",
    "EventStore",
    "Form",
    "GetPromptResult",
    "Group",
    "Health",
    "HiddenText",
    "HiddenTextFilter",
    "HttpLimits",
    "HttpServer",
    "HttpSettings",
    "HttpTimeouts",
    "Icon",
    "Image",
    "ImageContent",
    "Implementation",
    "InProcess",
    "Incoming",
    "InputRequiredResult",
    "InvalidReply",
    "JsonFormatter",
    "Kind",
    "Lane",
    "Lanes",
    "Limits",
    "LocalError",
    "LogBridge",
    "LoggingMessageParams",
    "Mapped",
    "McpError",
    "MemoryEvents",
    "MessageChannel",
    "NoGoodAnswer",
    "Notice",
    "Origin",
    "Origins",
    "Outcome",
    "Outgoing",
    "Overloaded",
    "PatternFilter",
    "Principal",
    "ProcessStatistics",
    "ProgressParams",
    "Prompt",
    "PromptMessage",
    "PromptsChanged",
    "Quota",
    "ReadResourceResult",
    "Refused",
    "RemoteError",
    "Resource",
    "ResourceLink",
    "ResourceNotFound",
    "ResourceTemplate",
    "ResourceUpdated",
    "ResourcesChanged",
    "Restarts",
    "Revision",
    "Root",
    "Running",
    "SamplingMessage",
    "SecretsFilter",
    "Server",
    "ServerStatistics",
    "SizeFilter",
    "SqliteEvents",
    "Statistics",
    "StdioServer",
    "Subscription",
    "Target",
    "Text",
    "TextContent",
    "TextResourceContents",
    "ThreadContext",
    "Tool",
    "ToolAnnotations",
    "ToolError",
    "ToolsChanged",
    "TurnStatistics",
    "Upstream",
    "UpstreamDown",
    "UpstreamState",
    "UpstreamStatistics",
    "UpstreamSubscription",
    "WebSocketServer",
    "asgi_app",
    "bearer_tokens",
    "call_all",
    "fill_defaults",
    "fingerprint",
    "first_of",
    "form",
    "hedge",
    "hidden_text",
    "http",
    "http_face",
    "in_process",
    "load_servers",
    "map_bounded",
    "memory_channels",
    "read_servers",
    "run_http",
    "run_stdio",
    "security_event",
    "serve_http",
    "serve_hypercorn",
    "serve_stdio",
    "serve_websocket",
    "show_hidden",
    "stdio",
    "strip_hidden",
    "watchdog",
    "websocket",
]
