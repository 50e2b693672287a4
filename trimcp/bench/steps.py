"""Calls that are more than a request and its answer: with questions, changes that are told, tasks, tools of agents.

An ordinary client makes them, which costs the generator several times what a call of `mux` or `http` does; so it does
for servers that only it can reach: those that want tokens which end, and those behind gRPC. What takes time besides the
whole call is a row of its own among the requests.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractContextManager, AsyncExitStack, asynccontextmanager
from typing import TYPE_CHECKING, Any, Final, cast

import attrs
import orjson
import trio

from trimcp.bench.discovery import Target, agent_target
from trimcp.bench.plan import CLIENT, NUMBER
from trimcp.bench.sessions import LoadPlaces, SessionRunner
from trimcp.bench.supply import Load, LoadCall, Seat
from trimcp.bench.tally import LATE
from trimcp.client.client import Client
from trimcp.client.handlers import fill_defaults
from trimcp.client.session import ClientSession
from trimcp.errors import ConnectionLost, McpError, NotStarted, RemoteError
from trimcp.protocol.bound_methods import methods_of
from trimcp.support.nurseries import open_service_nursery
from trimcp.transports.stdio.child import ChildChannel
from trimcp.wire.converter import converter_for
from trimcp.wire.input_requests import ElicitFormParams, ElicitResult

if TYPE_CHECKING:
    from trimcp.agent_tools.client.connection import AgentConnection
    from trimcp.session.outgoing.listening import Subscription
    from trimcp.transports.http.client.exchanges import Authorizes, ClientAuth

_MOST_ASKED: Final = 10**9  # questions per minute: the load is to answer all
_TOLD: Final = 1.0  # seconds after the answer in which a change has to be told

Result = dict[str, Any]


class _Wrong(Exception):
    """The outcome of a call is not what its step should have: the kind of the error, and an example."""


class _Unmade(Exception):
    """The measurement ended before the call had its turn."""


@attrs.define(eq=False)
class _ChangeTurns:
    """Who is told of changes, and whose turn it is to make one."""

    listening: set[_StepSession] = attrs.field(factory=set)
    turns: dict[str, trio.Lock] = attrs.field(factory=dict)  # by resource


def step_runner(load: Load, target: Target) -> SessionRunner:
    """Return what runs the sessions of one measurement that an ordinary client makes."""
    auth = getattr(target, "auth", None)
    if auth is not None:
        target = attrs.evolve(cast(Any, target), auth=_CountedAuth(auth, load))
    changes = _ChangeTurns()

    async def run(load: Load, seat: Seat, usable: Callable[[], object]) -> bool:
        async with AsyncExitStack() as stack:
            session = _StepSession(load, changes, LoadPlaces(load, seat))
            await session.open(stack, target)
            return await session.run(usable)

    return run


@attrs.define(eq=False)
class _StepSession:
    """One connection, and the calls that are made over it."""

    _load: Load
    _changes: _ChangeTurns
    _places: LoadPlaces
    _session: ClientSession = attrs.field(init=False)
    _agent: AgentConnection = attrs.field(init=False)
    _call: LoadCall | None = attrs.field(init=False, default=None)  # of the questions, which come one at a time
    # the change that it is to be told: resource, beginning, and the call that makes it
    _expected: tuple[str, float, LoadCall] | None = attrs.field(init=False, default=None)
    _told: trio.Event = attrs.field(init=False, factory=trio.Event)

    async def open(self, stack: AsyncExitStack, target: Target) -> None:
        """Connect, and subscribe to what is to be changed. Raises McpError and trio.TooSlowError."""
        load = self._load
        if "agent" in load.plan.steps:
            from trimcp.agent_tools.client.connection import connect

            self._agent = await stack.enter_async_context(connect(agent_target(target, load.plan)))
            return
        channel = await stack.enter_async_context(target.connect())
        if isinstance(channel, ChildChannel):
            load.pids.add(channel.process.pid)
        connecting = self._client().connect(channel, revision=load.revision)
        self._session = await stack.enter_async_context(connecting)
        if self._session.session.transport.mirrors_headers:
            with trio.fail_after(load.plan.opening):
                await self._session.list_tools()
        wanted = dict.fromkeys(entry.resource for entry in load.plan.mix if entry.resource is not None)
        if wanted:
            with trio.fail_after(load.plan.opening):
                changes = await stack.enter_async_context(self._session.listen(resources=wanted))
            nursery = await stack.enter_async_context(open_service_nursery())
            nursery.start_soon(self._listen, changes)
            self._changes.listening.add(self)
            stack.callback(self._leave)

    async def run(self, usable: Callable[[], object]) -> bool:
        load = self._load
        load.open += 1
        usable()
        try:
            async with open_service_nursery() as watching:
                watching.start_soon(self._watch)
                async with trio.open_nursery() as nursery:
                    for _ in range(load.plan.places):
                        nursery.start_soon(self._places.run, self._make)
                watching.cancel_scope.cancel()
        finally:
            load.open -= 1
        return load.supply.over

    async def _watch(self) -> None:
        await (self._agent.wait_lost() if "agent" in self._load.plan.steps else self._session.wait_lost())
        self._places.close()
        self._told.set()

    # Calls

    async def _make(self, call: LoadCall) -> bool:
        load = self._load
        tally, label = load.tally, call.request.label
        self._call = call
        try:
            with trio.move_on_after(call.give_up) as scope:
                message = await self._message(call)
            now = trio.current_time()
            if scope.cancelled_caught:
                tally.given_up(timeout=call.timeout)
                return True
            wrong = call.request.check(message, call.number)
            if wrong is not None:
                raise _Wrong(*wrong)
            tally.right(now - call.due, now, label)
            self._credit(now - call.due)
            return True
        except _Wrong as error:
            self._credit(None)
            kind, example = error.args
            tally.wrong(kind, example, trio.current_time())
            return True
        except _Unmade:
            if load.plan.paced and (now := trio.current_time()) - call.due > LATE:
                tally.wrong("not begun", "the measurement ended before its turn came", now)
            return True
        except (ConnectionLost, NotStarted) as error:
            self._credit(None)
            tally.wrong("connection lost", str(error), trio.current_time())
            return False
        except McpError as error:
            self._credit(None)
            tally.wrong(f"error {getattr(error, 'code', type(error).__name__)}", str(error), trio.current_time())
            return True
        except trio.Cancelled:
            if load.overdue:
                tally.wrong("no answer", f"none came within {load.plan.patience:g} seconds", trio.current_time())
            raise
        finally:
            self._call = None
            load.supply.count_ended()

    def _credit(self, seconds: float | None) -> None:
        if (server := self._places.seat.server) is not None:
            self._load.tally.answered_by(server, seconds, trio.current_time())

    async def _message(self, call: LoadCall) -> Result:
        """Carry a call out, and return its answer as JSON-RPC has it."""
        params = orjson.loads(orjson.dumps(call.request.entry.params).replace(NUMBER.encode(), b"%d" % call.number))
        try:
            result = await _STEPS[call.request.entry.step](self, call, params)
        except RemoteError as error:
            return {"jsonrpc": "2.0", "error": {"code": error.code, "message": error.message}}
        return {"jsonrpc": "2.0", "result": result}

    async def _plain(self, call: LoadCall, params: Result) -> Result:
        session, name = self._session, call.request.entry.method
        if name == "tools/call":
            return self._dumped(await session.call_tool(params["name"], params.get("arguments")))
        method = methods_of(session.revision).get(name)
        if method is None:
            return await session.request_raw(name, params)
        pending = await session.session.start_call(name, method.load_params(params))
        return cast(Result, method.dump_result(await pending.payload()))

    def _dumped(self, result: Any) -> Result:
        return cast(Result, converter_for(self._session.revision).dump(result))

    def _observe(self, call: LoadCall, what: str, since: float) -> None:
        self._load.tally.observe(f"{call.request.label}: {what}", trio.current_time() - since)

    # Questions

    def _client(self) -> Client:
        """Return the client of this session, with handlers for what its calls are asked."""
        plan = self._load.plan
        client = Client(
            CLIENT["name"],
            CLIENT["version"],
            tasks="task" in plan.steps,
            asks_per_minute=_MOST_ASKED,
            connect_timeout=plan.opening,
            validate_output=False,
        )
        if "question" in plan.steps:
            client.elicitation(self._filled_in)
            client.sampling(self._sampled)
        return client

    async def _question(self, call: LoadCall, params: Result) -> Result:
        result = await self._plain(call, params)
        if call.heard is None:
            raise _Wrong("no question", "the call was answered without one")
        return result

    def _asked(self) -> None:
        call = self._call
        if call is None:
            self._load.tally.wrong("question of no call", "", trio.current_time())
            return
        self._observe(call, "question", call.due if call.heard is None else call.heard)
        call.heard = trio.current_time()

    def _filled_in(self, params: Any) -> ElicitResult:
        self._asked()
        if not isinstance(params, ElicitFormParams):
            return ElicitResult(action="accept")
        form = params.requested_schema
        given = {name: value for name, value in self._load.plan.answer.items() if name in form.properties}
        values = fill_defaults(form, given)
        missing = [name for name in form.required or () if name not in values]
        if missing:
            text = f"the form needs {', '.join(missing)}: give it with --answer"
            self._load.tally.wrong("no answer to a question", text, trio.current_time())
            return ElicitResult(action="decline")
        return ElicitResult(action="accept", content=values)

    def _sampled(self, params: Any) -> str:
        self._asked()
        return self._load.plan.sampled

    # Changes

    async def _listen(self, changes: Subscription) -> None:
        why = "the server ended it"
        try:
            async for change in changes:
                self._hear(getattr(change, "uri", ""))
        except McpError as error:
            if self._session.session.lost is not None:
                return
            why = str(error)
        self._load.tally.wrong("subscription ended", why, trio.current_time())

    def _leave(self) -> None:
        self._changes.listening.discard(self)
        self._told.set()

    async def _change(self, call: LoadCall, params: Result) -> Result:
        """Make a change, and wait until all sessions have been told; one at a time, so that no notice is another's."""
        uri, plan = str(call.request.entry.resource), self._load.plan
        async with self._changes.turns.setdefault(uri, trio.Lock()):
            if self._load.supply.over:
                raise _Unmade
            began = trio.current_time()
            if not plan.paced:
                call.due = began
            told = [*self._changes.listening]
            for each in told:
                each._expect(uri, call)
            result = await self._plain(call, params)
            self._observe(call, "answer", began)
            if result.get("isError"):
                return result
            with trio.move_on_after(_TOLD):
                for each in told:
                    await each._told.wait()
            lost = sum(not each._told.is_set() for each in told if each in self._changes.listening)
            text = f"{lost} of {len(told)} sessions were not told that {uri} changed"
            for _ in range(lost - 1):
                self._load.tally.wrong("no notice", text, trio.current_time())
            if lost:
                raise _Wrong("no notice", text)
            return result

    def _expect(self, uri: str, call: LoadCall) -> None:
        self._expected, self._told = (uri, trio.current_time(), call), trio.Event()

    def _hear(self, uri: str) -> None:
        if self._expected is not None and uri.startswith(self._expected[0]):
            _, began, call = self._expected
            self._observe(call, "notice", began)
            self._expected = None
            self._told.set()

    # Tasks and agents

    async def _task(self, call: LoadCall, params: Result) -> Result:
        task = await self._session.start_task(params["name"], params.get("arguments"))
        if task.id is None:
            raise _Wrong("no task", "the call was answered at once")
        self._observe(call, "task", call.due)
        return self._dumped(await task.result())

    async def _of_agent(self, call: LoadCall, params: Result) -> Result:
        value = await self._agent.call(params["name"], params.get("arguments"))
        text = value if isinstance(value, str) else json.dumps(value)
        return {"content": [{"type": "text", "text": text}]}


_STEPS: Final[Mapping[str, Callable[[_StepSession, LoadCall, Result], Awaitable[Result]]]] = {
    "call": _StepSession._plain,
    "question": _StepSession._question,
    "change": _StepSession._change,
    "task": _StepSession._task,
    "agent": _StepSession._of_agent,
}
"""How each step is carried out: it returns the result of the call."""


# Tokens that end


@attrs.frozen
class _CountedAuth:
    """Somebody else's way to get tokens, which counts each new one, and the time that it took."""

    _auth: ClientAuth
    _load: Load

    @asynccontextmanager
    async def connected(self, server: str, /) -> AsyncIterator[Authorizes]:
        async with self._auth.connected(server) as authorizes:
            yield _Counted(authorizes, self._load, authorizes.person)


def _pass_on_person(counted: _Counted, _: Any, person: Any) -> Any:
    counted._inner.person = person
    return person


@attrs.define(eq=False)
class _Counted:
    _inner: Authorizes
    _load: Load
    person: Callable[[], AbstractContextManager[None]] = attrs.field(on_setattr=_pass_on_person)
    _token: str | None = attrs.field(init=False, default=None)
    _began: float | None = attrs.field(init=False, default=None)  # when a token was refused

    async def headers(self, method: str, url: str, /) -> Mapping[str, str]:
        began = trio.current_time() if self._began is None else self._began
        headers = await self._inner.headers(method, url)
        token = next((value for name, value in headers.items() if name.lower() == "authorization"), None)
        if self._token is not None and token != self._token:
            self._load.tally.observe("token renewed", trio.current_time() - began)
        self._token, self._began = token, None
        return headers

    def helps(self, status: int, headers: Mapping[str, str], /) -> bool:
        return self._inner.helps(status, headers)

    def accepted(self, sent: Mapping[str, str], /) -> None:
        self._inner.accepted(sent)

    async def refused(self, status: int, headers: Mapping[str, str], sent: Mapping[str, str], tries: int, /) -> None:
        self._began = trio.current_time()
        await self._inner.refused(status, headers, sent, tries)
