# Written by docs/stubs.py from the methods of `trimcp.ClientSession`.

from collections.abc import AsyncIterator, Iterable, Mapping
from contextlib import AbstractAsyncContextManager
from trimcp.client.client import Target
from trimcp.client.handlers import ClientProgram
from trimcp.client.tools import Listing
from trimcp.session.outgoing.listening import Change
from trimcp.session.statistics import Statistics
from trimcp.wire.capabilities import ServerCapabilities
from trimcp.wire.common import Implementation, LoggingLevel
from trimcp.wire.jsonrpc import JSON
from trimcp.wire.lifecycle import ProgressParams, SubscriptionFilter
from trimcp.wire.prompts import Completion, GetPromptResult, Prompt, Reference
from trimcp.wire.resources import ReadResourceResult, Resource, ResourceTemplate
from trimcp.wire.revisions import Revision
from trimcp.wire.tools import CallToolResult, Tool
from typing import Any, Generic, TypeVar

ResultT = TypeVar("ResultT")

class AsyncioCall(Generic[ResultT]):
    @property
    def progress(self) -> AsyncIterator[ProgressParams]: ...
    async def result(self) -> ResultT: ...

class AsyncioSubscription:
    @property
    def acknowledged(self) -> SubscriptionFilter: ...
    async def receive(self) -> Change: ...
    def __aiter__(self) -> AsyncIterator[Change]: ...

class AsyncioSession:
    @property
    def server_info(self) -> Implementation | None: ...
    @property
    def server_capabilities(self) -> ServerCapabilities: ...
    @property
    def instructions(self) -> str | None: ...
    @property
    def revision(self) -> Revision:
        """The revision of this connection."""
    def statistics(self) -> Statistics:
        """Return a snapshot of its queues and of the requests in progress."""
    async def wait_lost(self) -> None:
        """Wait until the server is gone or the session ends. Cancelling this changes nothing."""
    async def list_tools(self, *, fresh: bool=False) -> Listing[Tool]:
        """Return all tools, following cursors; none if the server declared no tools."""
    async def call_tool(self, name: str, arguments: Mapping[str, JSON] | None=None, *, meta: Mapping[str, JSON] | None=None) -> CallToolResult:
        """Call a tool and return its result. One with `is_error` raises nothing: it reports a failure to the model."""
    def calling(self, name: str, arguments: Mapping[str, JSON] | None=None, *, meta: Mapping[str, JSON] | None=None) -> AbstractAsyncContextManager[AsyncioCall[CallToolResult]]:
        """Call a tool and yield the call, to follow its `progress` and await its `result()`."""
    async def list_resources(self, *, fresh: bool=False) -> Listing[Resource]:
        """Return all resources, following cursors; none if the server declared no resources. See `list_tools`."""
    async def list_resource_templates(self, *, fresh: bool=False) -> Listing[ResourceTemplate]:
        """Return all resource templates, as `list_tools` does; none if the server declared no resources."""
    async def read_resource(self, uri: str, *, meta: Mapping[str, JSON] | None=None, fresh: bool=False) -> ReadResourceResult:
        """Return the contents of a resource."""
    async def list_prompts(self, *, fresh: bool=False) -> Listing[Prompt]:
        """Return all prompts, following cursors; none if the server declared no prompts. See `list_tools`."""
    async def get_prompt(self, name: str, arguments: Mapping[str, str] | None=None, *, meta: Mapping[str, JSON] | None=None) -> GetPromptResult:
        """Return the messages of a prompt, filled in with `arguments`."""
    async def complete(self, ref: Reference, name: str, value: str, context: Mapping[str, str] | None=None) -> Completion:
        """Return suggestions for the value of an argument that is being typed."""
    async def complete_prompt(self, prompt: str, name: str, value: str, context: Mapping[str, str] | None=None) -> Completion:
        """`complete` for an argument of the prompt of that name."""
    async def complete_resource(self, uri_template: str, name: str, value: str, context: Mapping[str, str] | None=None) -> Completion:
        """`complete` for a variable of that resource template."""
    def listen(self, *, tools: bool=False, prompts: bool=False, resources_list: bool=False, resources: Iterable[str]=()) -> AbstractAsyncContextManager[AsyncioSubscription]:
        """Subscribe to changes: `async with session.listen(tools=True) as changes: async for change in changes: ...`."""
    async def set_log_level(self, level: LoggingLevel) -> None:
        """Ask for log messages of this level and above from now on; the client's logging handler gets them."""
    async def ping(self) -> None:
        """Wait until the server has answered a ping (since 2026-07-28 `server/discover`): it is alive."""
    async def request(self, name: str, params: Mapping[str, JSON] | None=None) -> dict[str, JSON]:
        """Send a request that is defined by an extension, and return its result as JSON."""
    async def notify(self, name: str, params: Mapping[str, JSON] | None=None) -> None:
        """Send a notification that is defined by an extension. Waits for room, and for no answer: there is none."""
    def roots_changed(self) -> None:
        """Notify the server that the client's roots changed, if the revision has that notification. Never blocks."""
    async def list_page(self, method: str, cursor: str | None=None, *, fresh: bool=False) -> Any:
        """Return one page of a list, as the result class of its method, for programs that follow cursors themselves."""

def connect(
    target: Target, *, client: ClientProgram | None = None, revision: Revision | str | None = None
) -> AbstractAsyncContextManager[AsyncioSession]: ...
