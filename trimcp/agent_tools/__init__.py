"""Agent tools: a second protocol over the same server, with contexts, manifests and providers."""

from trimcp.lazy import lazy_names as _lazy_names

# The one list of names; the stub for type checkers is written from it: `python docs/stubs.py`.
_NAMES = {
    "trimcp.agent_tools.service": "AgentCall AgentRun",
    "trimcp.agent_tools.serving": "AgentAccess AgentAllow AgentTools",
    "trimcp.agent_tools.context_table": "ContextStatistics ContextTable",
    "trimcp.agent_tools.context_limits": "ContextLimits",
    "trimcp.agent_tools.contexts": "ContextActor",
    "trimcp.agent_tools.handler_context": "ActorContext",
    "trimcp.agent_tools.saving": "Applied",
    "trimcp.agent_tools.stores": "ContextStore KeptContext MemoryContexts",
    "trimcp.agent_tools.stores_sqlite": "SqliteContexts",
    "trimcp.agent_tools.providing": "provide",
    "trimcp.agent_tools.client": "AgentConnection ContextHandle InputRequired ToolCalling connect",
    "trimcp.agent_tools.client_supervised": "supervise",
    "trimcp.agent_tools.client_wire": "AgentTarget",
    "trimcp.agent_tools.callbacks": "Callbacks",
    "trimcp.agent_tools.signatures": "BadSignature verify_callback",
    "trimcp.agent_tools.callers": "AgentCaller",
    "trimcp.agent_tools.catalog": "Catalog Registered",
    "trimcp.agent_tools.entries": "Implemented",
    "trimcp.agent_tools.messages": "AgentMessage ContextDestroyed ContextState ContextUpdate ToolProgress",
    "trimcp.agent_tools.manifests": "Manifest ManifestBounds version_key",
    "trimcp.agent_tools.rules": "RegistrationRules",
    "trimcp.agent_tools.versions": "Provider",
    "trimcp.agent_tools.errors": "AgentToolsError ContextGone DeadlinePassed Draining ERRORS_BY_CODE InvalidArguments "
    "MalformedMessage NameTaken NotAllowed NothingHere ProviderGone RequestCancelled RequestUnderWay ToolCrashed "
    "ToolFailed TooLargeMessage TooMuch Unauthenticated UnfitManifest UnknownContext UnknownTool VersionConflict",
}

__getattr__, __dir__, __all__ = _lazy_names(__name__, _NAMES)
