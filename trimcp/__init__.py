"""The Model Context Protocol for Trio: servers and clients whose connections are nursery-scoped actors.

Most programs need only the names in this package. The rest is in the packages `trimcp.agent_tools`, `trimcp.auth`,
`trimcp.fleet`, `trimcp.guard`, `trimcp.testing`, `trimcp.watch` and `trimcp.wire` (payloads), and in the modules
`trimcp.asyncio`, `trimcp.blocking`, `trimcp.channel`, `trimcp.hidden` and `trimcp.security`. All of them are available
after `import trimcp` and are loaded at first use.
"""

from trimcp.support.lazy import lazy_names as _lazy_names

# The only list of names. The stub for type checkers is generated from it: `python docs/stubs.py`.
_NAMES = {
    "trimcp.agent_tools": "agent_tools=.",
    "trimcp.auth": "auth=.",
    "trimcp.channel": "MessageChannel channel=.",
    "trimcp.client.client": "Client Target",
    "trimcp.client.handlers": "fill_defaults",
    "trimcp.client.hosts": "read_servers",
    "trimcp.client.session": "ClientSession",
    "trimcp.client.skills": "ActiveSkill ServerSkills",
    "trimcp.client.tasks": "ClientTask",
    "trimcp.client.tools": "Listing fingerprint",
    "trimcp.errors": "AskRefused CannotAsk ConnectionLost ErrorReply InvalidReply LocalError McpError NoGoodAnswer "
    "NotStarted Overloaded RemoteError ResourceNotFound Stopped ToolError UpstreamDown",
    "trimcp.extensions.skills": "Skill",
    "trimcp.extensions.tasks": "TaskState",
    "trimcp.portal.asyncio": "asyncio=.",
    "trimcp.portal.blocking": "blocking=.",
    "trimcp.fleet": "fleet=.",
    "trimcp.fleet.group": "Group",
    "trimcp.fleet.upstream": "Upstream supervise",
    "trimcp.guard": "guard=.",
    "trimcp.hidden": "hidden=.",
    "trimcp.net": "asgi_app grpc http http_application run_grpc run_http run_websocket serve_grpc serve_http "
    "serve_websocket websocket",
    "trimcp.run": "in_process load_servers run_stdio serve_stdio stdio",
    "trimcp.schema.hints": "Arg",
    "trimcp.schema.forms": "Answer Form form=form_for",
    "trimcp.security": "security=.",
    "trimcp.server.calling": "Elicit",
    "trimcp.server.logbridge": "LogBridge",
    "trimcp.server.media": "Audio Image",
    "trimcp.server.needs": "Depends",
    "trimcp.server.offering": "Notice",
    "trimcp.server.running": "Running",
    "trimcp.server.server": "Server",
    "trimcp.server.threads": "ThreadContext",
    "trimcp.session.calls": "Call",
    "trimcp.session.context": "Context",
    "trimcp.session.job": "CancelReason",
    "trimcp.session.limits": "Limits Quota",
    "trimcp.session.listening": "PromptsChanged ResourceUpdated ResourcesChanged Subscription ToolsChanged",
    "trimcp.testing": "testing=.",
    "trimcp.transports.grpc.client": "GrpcServer",
    "trimcp.transports.http.peers.access": "AccessLog JsonFormatter",
    "trimcp.transports.http.asgi.hypercorn": "serve_hypercorn",
    "trimcp.transports.http.client.policy": "HttpTimeouts=Timeouts",
    "trimcp.transports.http.client.target": "HttpServer",
    "trimcp.store.events_sqlite": "SqliteEvents",
    "trimcp.store.events": "EventStore MemoryEvents",
    "trimcp.store.tasks": "TaskStore",
    "trimcp.store.tasks_sqlite": "SqliteTasks",
    "trimcp.principal": "Principal",
    "trimcp.transports.http.peers.identity": "Refused bearer_tokens",
    "trimcp.transports.http.peers.origins": "Origins",
    "trimcp.transports.http.settings": "HttpLimits HttpSettings",
    "trimcp.transports.memory": "memory_channels",
    "trimcp.transports.stdio.server": "claim_stdio",
    "trimcp.transports.stdio.child": "StdioServer",
    "trimcp.transports.websocket.client": "WebSocketServer",
    "trimcp.watch": "watch=.",
    "trimcp.watch.watchdog": "watchdog",
    "trimcp.workers.commands": "Command",
    "trimcp.wire": "wire=.",
    "trimcp.wire.content": "ResourceLink Text=TextContent TextContent",
    "trimcp.wire.converter": "from_json to_json",
    "trimcp.wire.input_requests": "CreateMessageParams CreateMessageResult ElicitParams ElicitResult",
    "trimcp.wire.prompts": "PromptMessage",
    "trimcp.wire.revisions": "LATEST LATEST_LEGACY REVISIONS Revision",
    "trimcp.wire.tools": "CallToolResult Tool ToolAnnotations",
}

__getattr__, __dir__, __all__ = _lazy_names(__name__, _NAMES)
