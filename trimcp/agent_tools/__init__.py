"""Agent tools: a second protocol over the same server, with contexts, manifests and providers."""

from trimcp.support.lazy import lazy_names as _lazy_names

# The one list of names; the stub for type checkers is written from it: `python docs/stubs.py`.
_NAMES = {
    "trimcp.agent_tools.service": "AgentCall AgentRun",
    "trimcp.agent_tools.serving": "AgentAccess AgentAllow AgentTools",
    "trimcp.agent_tools.contexts.table": "ContextStatistics ContextTable",
    "trimcp.agent_tools.contexts.actor": "ActorContext ContextActor",
    "trimcp.agent_tools.contexts.state": "Applied ContextLimits",
    "trimcp.store.contexts": "ContextStore KeptContext MemoryContexts",
    "trimcp.store.contexts_sqlite": "SqliteContexts",
    "trimcp.store.redis.contexts": "RedisContexts",
    "trimcp.agent_tools.providing": "provide",
    "trimcp.agent_tools.client.connection": "AgentConnection ContextHandle InputRequired ToolCalling connect",
    "trimcp.agent_tools.client.supervised": "supervise",
    "trimcp.agent_tools.client.wire": "AgentTarget",
    "trimcp.agent_tools.catalog.callbacks": "Callbacks",
    "trimcp.agent_tools.messages.signatures": "BadSignature verify_callback",
    "trimcp.agent_tools.callers": "AgentCaller",
    "trimcp.agent_tools.catalog.catalog": "Catalog Registered",
    "trimcp.agent_tools.catalog.entries": "Implemented Provider",
    "trimcp.agent_tools.messages.messages": "AgentMessage ContextDestroyed ContextState ContextUpdate ToolProgress",
    "trimcp.agent_tools.messages.manifests": "Manifest ManifestBounds",
    "trimcp.wire.tool_versions": "version_key",
    "trimcp.agent_tools.catalog.rules": "RegistrationRules",
    "trimcp.agent_tools.messages.errors": "AgentToolsError ContextGone DeadlinePassed Draining ERRORS_BY_CODE "
    "InvalidArguments MalformedMessage NameTaken NotAllowed NothingHere ProviderGone RequestCancelled RequestUnderWay "
    "ToolCrashed ToolFailed TooLargeMessage TooMuch Unauthenticated UnfitManifest UnknownContext UnknownTool "
    "VersionConflict",
}

__getattr__, __dir__, __all__ = _lazy_names(__name__, _NAMES)
