# Written by docs/stubs.py from the list in __init__.py beside it.

from trimcp import agent_tools as agent_tools
from trimcp import auth as auth
from trimcp import channel as channel
from trimcp import fleet as fleet
from trimcp import guard as guard
from trimcp import hidden as hidden
from trimcp import security as security
from trimcp import testing as testing
from trimcp import watch as watch
from trimcp import wire as wire
from trimcp.channel import MessageChannel as MessageChannel
from trimcp.client.client import Client as Client
from trimcp.client.client import Target as Target
from trimcp.client.handlers import fill_defaults as fill_defaults
from trimcp.client.hosts import read_servers as read_servers
from trimcp.client.session import ClientSession as ClientSession
from trimcp.client.skills import ActiveSkill as ActiveSkill
from trimcp.client.skills import ServerSkills as ServerSkills
from trimcp.client.tasks import ClientTask as ClientTask
from trimcp.client.tools import Listing as Listing
from trimcp.client.tools import fingerprint as fingerprint
from trimcp.compose.proxy import proxy as proxy
from trimcp.errors import AskRefused as AskRefused
from trimcp.errors import CannotAsk as CannotAsk
from trimcp.errors import ConnectionLost as ConnectionLost
from trimcp.errors import ErrorReply as ErrorReply
from trimcp.errors import InvalidReply as InvalidReply
from trimcp.errors import LocalError as LocalError
from trimcp.errors import McpError as McpError
from trimcp.errors import NoGoodAnswer as NoGoodAnswer
from trimcp.errors import NotStarted as NotStarted
from trimcp.errors import Overloaded as Overloaded
from trimcp.errors import RemoteError as RemoteError
from trimcp.errors import ResourceNotFound as ResourceNotFound
from trimcp.errors import Stopped as Stopped
from trimcp.errors import ToolError as ToolError
from trimcp.errors import UpstreamDown as UpstreamDown
from trimcp.extensions.skills import Skill as Skill
from trimcp.extensions.tasks import TaskState as TaskState
from trimcp.fleet.group import Group as Group
from trimcp.fleet.upstream import Upstream as Upstream
from trimcp.fleet.upstream import supervise as supervise
from trimcp.net import asgi_app as asgi_app
from trimcp.net import grpc as grpc
from trimcp.net import http as http
from trimcp.net import http_application as http_application
from trimcp.net import run_grpc as run_grpc
from trimcp.net import run_http as run_http
from trimcp.net import run_websocket as run_websocket
from trimcp.net import serve_grpc as serve_grpc
from trimcp.net import serve_http as serve_http
from trimcp.net import serve_websocket as serve_websocket
from trimcp.net import websocket as websocket
from trimcp.portal import asyncio as asyncio
from trimcp.portal import blocking as blocking
from trimcp.principal import Principal as Principal
from trimcp.rest.operations import ApiOperation as ApiOperation
from trimcp.rest.serving import openapi as openapi
from trimcp.run import in_process as in_process
from trimcp.run import load_servers as load_servers
from trimcp.run import run_stdio as run_stdio
from trimcp.run import serve_stdio as serve_stdio
from trimcp.run import stdio as stdio
from trimcp.schema.forms import Answer as Answer
from trimcp.schema.forms import Form as Form
from trimcp.schema.forms import form_for as form
from trimcp.schema.hints import Arg as Arg
from trimcp.server.caching import ResultCache as ResultCache
from trimcp.server.handlers.media import Audio as Audio
from trimcp.server.handlers.media import Image as Image
from trimcp.server.handlers.needs import Depends as Depends
from trimcp.server.handlers.needs import Elicit as Elicit
from trimcp.server.handlers.threads import ThreadContext as ThreadContext
from trimcp.server.logbridge import LogBridge as LogBridge
from trimcp.server.offering import Notice as Notice
from trimcp.server.running import Running as Running
from trimcp.server.server import Server as Server
from trimcp.session.context import Context as Context
from trimcp.session.incoming.job import CancelReason as CancelReason
from trimcp.session.limits import Limits as Limits
from trimcp.session.limits import Quota as Quota
from trimcp.session.outgoing.calls import Call as Call
from trimcp.session.outgoing.listening import PromptsChanged as PromptsChanged
from trimcp.session.outgoing.listening import ResourceUpdated as ResourceUpdated
from trimcp.session.outgoing.listening import ResourcesChanged as ResourcesChanged
from trimcp.session.outgoing.listening import Subscription as Subscription
from trimcp.session.outgoing.listening import ToolsChanged as ToolsChanged
from trimcp.store.events import EventStore as EventStore
from trimcp.store.events import MemoryEvents as MemoryEvents
from trimcp.store.events_sqlite import SqliteEvents as SqliteEvents
from trimcp.store.redis.connection import RedisLimits as RedisLimits
from trimcp.store.redis.shared import RedisStore as RedisStore
from trimcp.store.redis.tasks import RedisTasks as RedisTasks
from trimcp.store.shared import SharedStore as SharedStore
from trimcp.store.shared_sqlite import SqliteStore as SqliteStore
from trimcp.store.tasks import TaskStore as TaskStore
from trimcp.store.tasks_sqlite import SqliteTasks as SqliteTasks
from trimcp.transports.grpc.client import GrpcServer as GrpcServer
from trimcp.transports.http.asgi.hypercorn import serve_hypercorn as serve_hypercorn
from trimcp.transports.http.client.policy import Timeouts as HttpTimeouts
from trimcp.transports.http.client.target import HttpServer as HttpServer
from trimcp.transports.http.peers.access import AccessLog as AccessLog
from trimcp.transports.http.peers.access import JsonFormatter as JsonFormatter
from trimcp.transports.http.peers.identity import Refused as Refused
from trimcp.transports.http.peers.identity import bearer_tokens as bearer_tokens
from trimcp.transports.http.peers.origins import Origins as Origins
from trimcp.transports.http.settings import HttpLimits as HttpLimits
from trimcp.transports.http.settings import HttpSettings as HttpSettings
from trimcp.transports.memory import memory_channels as memory_channels
from trimcp.transports.stdio.child import StdioServer as StdioServer
from trimcp.transports.stdio.server import claim_stdio as claim_stdio
from trimcp.transports.websocket.client import WebSocketServer as WebSocketServer
from trimcp.watch.watchdog import watchdog as watchdog
from trimcp.wire.content import ResourceLink as ResourceLink
from trimcp.wire.content import TextContent as Text
from trimcp.wire.content import TextContent as TextContent
from trimcp.wire.converter import from_json as from_json
from trimcp.wire.converter import to_json as to_json
from trimcp.wire.input_requests import CreateMessageParams as CreateMessageParams
from trimcp.wire.input_requests import CreateMessageResult as CreateMessageResult
from trimcp.wire.input_requests import ElicitParams as ElicitParams
from trimcp.wire.input_requests import ElicitResult as ElicitResult
from trimcp.wire.prompts import PromptMessage as PromptMessage
from trimcp.wire.revisions import LATEST as LATEST
from trimcp.wire.revisions import LATEST_LEGACY as LATEST_LEGACY
from trimcp.wire.revisions import REVISIONS as REVISIONS
from trimcp.wire.revisions import Revision as Revision
from trimcp.wire.tools import CallToolResult as CallToolResult
from trimcp.wire.tools import Tool as Tool
from trimcp.wire.tools import ToolAnnotations as ToolAnnotations
from trimcp.workers.commands import Command as Command

__all__ = [
    "AccessLog",
    "ActiveSkill",
    "Answer",
    "ApiOperation",
    "Arg",
    "AskRefused",
    "Audio",
    "Call",
    "CallToolResult",
    "CancelReason",
    "CannotAsk",
    "Client",
    "ClientSession",
    "ClientTask",
    "Command",
    "ConnectionLost",
    "Context",
    "CreateMessageParams",
    "CreateMessageResult",
    "Depends",
    "Elicit",
    "ElicitParams",
    "ElicitResult",
    "ErrorReply",
    "EventStore",
    "Form",
    "Group",
    "GrpcServer",
    "HttpLimits",
    "HttpServer",
    "HttpSettings",
    "HttpTimeouts",
    "Image",
    "InvalidReply",
    "JsonFormatter",
    "LATEST",
    "LATEST_LEGACY",
    "Limits",
    "Listing",
    "LocalError",
    "LogBridge",
    "McpError",
    "MemoryEvents",
    "MessageChannel",
    "NoGoodAnswer",
    "NotStarted",
    "Notice",
    "Origins",
    "Overloaded",
    "Principal",
    "PromptMessage",
    "PromptsChanged",
    "Quota",
    "REVISIONS",
    "RedisLimits",
    "RedisStore",
    "RedisTasks",
    "Refused",
    "RemoteError",
    "ResourceLink",
    "ResourceNotFound",
    "ResourceUpdated",
    "ResourcesChanged",
    "ResultCache",
    "Revision",
    "Running",
    "Server",
    "ServerSkills",
    "SharedStore",
    "Skill",
    "SqliteEvents",
    "SqliteStore",
    "SqliteTasks",
    "StdioServer",
    "Stopped",
    "Subscription",
    "Target",
    "TaskState",
    "TaskStore",
    "Text",
    "TextContent",
    "ThreadContext",
    "Tool",
    "ToolAnnotations",
    "ToolError",
    "ToolsChanged",
    "Upstream",
    "UpstreamDown",
    "WebSocketServer",
    "asgi_app",
    "bearer_tokens",
    "claim_stdio",
    "fill_defaults",
    "fingerprint",
    "form",
    "from_json",
    "grpc",
    "http",
    "http_application",
    "in_process",
    "load_servers",
    "memory_channels",
    "openapi",
    "proxy",
    "read_servers",
    "run_grpc",
    "run_http",
    "run_stdio",
    "run_websocket",
    "serve_grpc",
    "serve_http",
    "serve_hypercorn",
    "serve_stdio",
    "serve_websocket",
    "stdio",
    "supervise",
    "to_json",
    "watchdog",
    "websocket",
]
