# Written by docs/stubs.py from the list in __init__.py beside it.

from trimcp.agent_tools.callers import AgentCaller as AgentCaller
from trimcp.agent_tools.catalog.callbacks import Callbacks as Callbacks
from trimcp.agent_tools.catalog.catalog import Catalog as Catalog
from trimcp.agent_tools.catalog.catalog import Registered as Registered
from trimcp.agent_tools.catalog.entries import Implemented as Implemented
from trimcp.agent_tools.catalog.entries import Provider as Provider
from trimcp.agent_tools.catalog.rules import RegistrationRules as RegistrationRules
from trimcp.agent_tools.client.connection import AgentConnection as AgentConnection
from trimcp.agent_tools.client.connection import ContextHandle as ContextHandle
from trimcp.agent_tools.client.connection import InputRequired as InputRequired
from trimcp.agent_tools.client.connection import ToolCalling as ToolCalling
from trimcp.agent_tools.client.connection import connect as connect
from trimcp.agent_tools.client.supervised import supervise as supervise
from trimcp.agent_tools.client.wire import AgentTarget as AgentTarget
from trimcp.agent_tools.contexts.actor import ActorContext as ActorContext
from trimcp.agent_tools.contexts.actor import ContextActor as ContextActor
from trimcp.agent_tools.contexts.state import Applied as Applied
from trimcp.agent_tools.contexts.state import ContextLimits as ContextLimits
from trimcp.agent_tools.contexts.table import ContextStatistics as ContextStatistics
from trimcp.agent_tools.contexts.table import ContextTable as ContextTable
from trimcp.agent_tools.messages.errors import AgentToolsError as AgentToolsError
from trimcp.agent_tools.messages.errors import ContextGone as ContextGone
from trimcp.agent_tools.messages.errors import DeadlinePassed as DeadlinePassed
from trimcp.agent_tools.messages.errors import Draining as Draining
from trimcp.agent_tools.messages.errors import ERRORS_BY_CODE as ERRORS_BY_CODE
from trimcp.agent_tools.messages.errors import InvalidArguments as InvalidArguments
from trimcp.agent_tools.messages.errors import MalformedMessage as MalformedMessage
from trimcp.agent_tools.messages.errors import NameTaken as NameTaken
from trimcp.agent_tools.messages.errors import NotAllowed as NotAllowed
from trimcp.agent_tools.messages.errors import NothingHere as NothingHere
from trimcp.agent_tools.messages.errors import ProviderGone as ProviderGone
from trimcp.agent_tools.messages.errors import RequestCancelled as RequestCancelled
from trimcp.agent_tools.messages.errors import RequestUnderWay as RequestUnderWay
from trimcp.agent_tools.messages.errors import TooLargeMessage as TooLargeMessage
from trimcp.agent_tools.messages.errors import TooMuch as TooMuch
from trimcp.agent_tools.messages.errors import ToolCrashed as ToolCrashed
from trimcp.agent_tools.messages.errors import ToolFailed as ToolFailed
from trimcp.agent_tools.messages.errors import Unauthenticated as Unauthenticated
from trimcp.agent_tools.messages.errors import UnfitManifest as UnfitManifest
from trimcp.agent_tools.messages.errors import UnknownContext as UnknownContext
from trimcp.agent_tools.messages.errors import UnknownTool as UnknownTool
from trimcp.agent_tools.messages.errors import VersionConflict as VersionConflict
from trimcp.agent_tools.messages.manifests import Manifest as Manifest
from trimcp.agent_tools.messages.manifests import ManifestBounds as ManifestBounds
from trimcp.agent_tools.messages.messages import AgentMessage as AgentMessage
from trimcp.agent_tools.messages.messages import ContextDestroyed as ContextDestroyed
from trimcp.agent_tools.messages.messages import ContextState as ContextState
from trimcp.agent_tools.messages.messages import ContextUpdate as ContextUpdate
from trimcp.agent_tools.messages.messages import ToolProgress as ToolProgress
from trimcp.agent_tools.messages.signatures import BadSignature as BadSignature
from trimcp.agent_tools.messages.signatures import verify_callback as verify_callback
from trimcp.agent_tools.providing import provide as provide
from trimcp.agent_tools.service import AgentCall as AgentCall
from trimcp.agent_tools.service import AgentRun as AgentRun
from trimcp.agent_tools.serving import AgentAccess as AgentAccess
from trimcp.agent_tools.serving import AgentAllow as AgentAllow
from trimcp.agent_tools.serving import AgentTools as AgentTools
from trimcp.store.contexts import ContextStore as ContextStore
from trimcp.store.contexts import KeptContext as KeptContext
from trimcp.store.contexts import MemoryContexts as MemoryContexts
from trimcp.store.contexts_sqlite import SqliteContexts as SqliteContexts
from trimcp.store.redis.contexts import RedisContexts as RedisContexts
from trimcp.wire.tool_versions import version_key as version_key

__all__ = [
    "ActorContext",
    "AgentAccess",
    "AgentAllow",
    "AgentCall",
    "AgentCaller",
    "AgentConnection",
    "AgentMessage",
    "AgentRun",
    "AgentTarget",
    "AgentTools",
    "AgentToolsError",
    "Applied",
    "BadSignature",
    "Callbacks",
    "Catalog",
    "ContextActor",
    "ContextDestroyed",
    "ContextGone",
    "ContextHandle",
    "ContextLimits",
    "ContextState",
    "ContextStatistics",
    "ContextStore",
    "ContextTable",
    "ContextUpdate",
    "DeadlinePassed",
    "Draining",
    "ERRORS_BY_CODE",
    "Implemented",
    "InputRequired",
    "InvalidArguments",
    "KeptContext",
    "MalformedMessage",
    "Manifest",
    "ManifestBounds",
    "MemoryContexts",
    "NameTaken",
    "NotAllowed",
    "NothingHere",
    "Provider",
    "ProviderGone",
    "RedisContexts",
    "Registered",
    "RegistrationRules",
    "RequestCancelled",
    "RequestUnderWay",
    "SqliteContexts",
    "TooLargeMessage",
    "TooMuch",
    "ToolCalling",
    "ToolCrashed",
    "ToolFailed",
    "ToolProgress",
    "Unauthenticated",
    "UnfitManifest",
    "UnknownContext",
    "UnknownTool",
    "VersionConflict",
    "connect",
    "provide",
    "supervise",
    "verify_callback",
    "version_key",
]
