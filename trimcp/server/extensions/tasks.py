"""Calls that become tasks (the extension "Tasks"): which do, when their callers are told, and the methods for that."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, Final

import attrs
import trio

from trimcp.budget import owner_of
from trimcp.errors import CannotAsk, ErrorReply
from trimcp.extensions.tasks import NEEDED, declared
from trimcp.protocol.bound_methods import foreign
from trimcp.protocol.connection import Encoded
from trimcp.server.extensions.task_claims import TaskClaims
from trimcp.server.extensions.task_runs import RECORD, TaskRun, TaskRuns, TaskSettings, as_json, require_tasks
from trimcp.server.handlers.calling import Handler, answer_all
from trimcp.server.options import TaskRule
from trimcp.server.running import Running
from trimcp.server.tools import ToolEntry, check_headers
from trimcp.session.context import Context
from trimcp.session.facts import Beside
from trimcp.session.outgoing.asking import Questions
from trimcp.store.naming import tasks_of
from trimcp.store.tasks import KeptTask, TaskStore
from trimcp.support.bounds import check_number
from trimcp.support.nurseries import open_service_nursery
from trimcp.wire.codes import INTERNAL_ERROR, INVALID_PARAMS, METHOD_NOT_FOUND, OVERLOADED
from trimcp.wire.common import META_LOG_LEVEL, META_PROGRESS_TOKEN, META_TIMEOUT, RESULT_TASK
from trimcp.wire.jsonrpc import encode
from trimcp.wire.tools import CallToolParams

log: logging.Logger = logging.getLogger("trimcp.server")

_INSIDE: Final = ("result", "error", "inputRequests")  # not told of a task that is created
_OF_CALLER: Final = (META_PROGRESS_TOKEN, META_TIMEOUT, META_LOG_LEVEL)  # of the call, and not of the task


@attrs.define(eq=False)
class ServedTasks(TaskSettings):
    """The tasks of a server, over all its runs."""

    runs: dict[Running, TaskRuns] = attrs.field(init=False, factory=dict)

    def set(self, **given: Any) -> None:
        """Change settings. Raises TypeError and ValueError for what cannot be one."""
        store = given.pop("store", None)
        if isinstance(store, str):
            store = tasks_of(store)
        if store is not None and not isinstance(store, TaskStore):
            raise TypeError(f"store is a URL, a trimcp.SqliteTasks(path) or another TaskStore, not {store!r:.60}")
        self.workers: bool = bool(given.pop("workers", self.workers))
        for name, value in given.items():
            check_number(name, value, whole=name in ("running", "most"), zero=name == "grace")
            setattr(self, name, value)
        self.store: TaskStore = store or self.store
        if self.workers and not self.store.durable:
            raise ValueError(
                "workers=True wants a store that other processes see, such as sqlite:///path or redis://host"
            )

    @asynccontextmanager
    async def while_running(self, running: Running) -> AsyncIterator[None]:
        """Serve the tasks of a run of the server while the block runs."""
        async with self.store.opened(), open_service_nursery() as nursery:
            runs = self.runs[running] = TaskRuns(self, running, nursery)
            running.replace("tools/call", partial(self._deciding, runs))
            running.subscribers.tasks.append(runs.watching)
            claims = TaskClaims(runs)
            await claims.look_around()
            nursery.start_soon(claims.keep_up)
            nursery.start_soon(claims.hear)
            try:
                yield
                await claims.drain()
            finally:
                del self.runs[running]
                for run in list(runs.tasks.values()):
                    run.leave()

    def run_of(self, ctx: Context[Any]) -> TaskRuns:
        """Return what runs the tasks of a request's run of the server, if its sender may use them.

        Raises ErrorReply: the revision has no tasks (-32601), or the client did not declare them (-32021).
        """
        if not ctx.revision.tasks:
            raise ErrorReply(METHOD_NOT_FOUND, f"revision {ctx.revision.name} has no {ctx.method} of this server")
        require_tasks(ctx)
        session, _ = ctx.internals
        return next(runs for running, runs in self.runs.items() if session.endpoint is running)

    async def get(self, ctx: Context[Any], params: Mapping[str, Any]) -> dict[str, Any]:
        """Answer `tasks/get`."""
        runs = self.run_of(ctx)
        return runs.told(await runs.find(ctx, params))

    async def update(self, ctx: Context[Any], params: Mapping[str, Any]) -> dict[str, Any]:
        """Answer `tasks/update`."""
        runs = self.run_of(ctx)
        task = await runs.find(ctx, params)
        given = params.get("inputResponses")
        if not isinstance(given, dict):
            raise ErrorReply(INVALID_PARAMS, "inputResponses must be an object")
        await runs.tell(task, {"answers": {key: one for key, one in given.items() if isinstance(one, dict)}})
        return {}

    async def cancel(self, ctx: Context[Any], params: Mapping[str, Any]) -> dict[str, Any]:
        """Answer `tasks/cancel`."""
        runs = self.run_of(ctx)
        await runs.tell(await runs.find(ctx, params), {"cancelled": True})
        return {}

    def beside(self) -> Iterator[Beside]:
        """Say of each task that is not at work what it waits for; those at work are requests."""
        now = time.time()
        for run in [run for runs in self.runs.values() for run in runs.tasks.values()]:
            if not run.at_work and not run.kept.ended:
                state = f"{run.kept.params['name']}: {run.kept.status}"
                yield Beside("task", f"{run.id[:8]}... of {run.kept.owner}", state, max(0.0, now - run.kept.updated))

    # Calls

    def _deciding(self, runs: TaskRuns, inner: Handler) -> Handler:
        """Return the handler of calls that makes tasks of those that want to be, and leaves the others to `inner`."""
        tools = runs.running.server.tools

        def call(ctx: Context[Any], params: CallToolParams) -> Awaitable[Any]:
            entry = tools.get(params.name)
            if entry is None or entry.task is None or isinstance(ctx.internals[1].origin, TaskRun):
                return inner(ctx, params)
            return self._decide(runs, entry, entry.task, inner, ctx, params)

        return call

    async def _decide(
        self,
        runs: TaskRuns,
        entry: ToolEntry,
        rule: TaskRule,
        inner: Handler,
        ctx: Context[Any],
        params: CallToolParams,
    ) -> Any:
        name, permission = entry.listed.name, entry.permission
        if not ctx.revision.tasks or not declared(ctx.capabilities):
            if rule.required:
                needed = dict(NEEDED) if ctx.revision.tasks else None
                raise CannotAsk(f"{name} runs as a task only, and this client has not declared tasks", needed)
            return await inner(ctx, params)
        arguments = params.arguments or {}
        if not entry.validator.is_valid(arguments) or (permission is not None and permission.hides(ctx.admission)):
            return await inner(ctx, params)  # which refuses it
        # What asks before the handler does is asked for the call itself, and answered before there is a task.
        check_headers(name, entry.mirrors, ctx, arguments)
        if permission is not None:
            permission.check_scopes(ctx, name)
        await entry.obtain(ctx, arguments)
        if entry.prepared.questions:
            await answer_all(entry.prepared.questions, ctx)
        return await self._begin(runs, rule, ctx)

    async def _begin(self, runs: TaskRuns, rule: TaskRule, ctx: Context[Any]) -> Any:
        """Begin a task, and return its result if that is soon there, else the task once it is kept."""
        _, job = ctx.internals
        owner = owner_of(ctx.principal, job.client)
        stored = await self.store.count(owner)
        # Counted after it: those that begin now are not stored yet.
        unfinished = sum(run.kept.owner == owner and not run.kept.ended for run in runs.tasks.values())
        if runs.draining or max(stored, unfinished) >= self.most:
            raise ErrorReply(OVERLOADED, "too many tasks; try again later", {"retryAfter": self.poll_interval})
        now = time.time()
        questions = job.questions
        kept = KeptTask(
            id=secrets.token_urlsafe(24),
            owner=owner,
            principal=None if ctx.principal is None else ctx.principal.facts(),
            params=_own_params(job.request.raw),
            restart=rule.restart,
            created=now,
            updated=now,
            until=now + self.longest + self.ttl,
            memory=as_json(questions.memory) if isinstance(questions, Questions) else None,
            runs=0 if self.workers else 1,
            runner="" if self.workers else runs.runner,
        )
        if self.workers:
            return await self._leave(runs, rule, ctx, kept)
        run = TaskRun(runs, kept, ctx.principal, job.headers, job.client)
        if not runs.admit(run, job.size + RECORD):
            raise ErrorReply(OVERLOADED, "no room for another task; try again later")
        run.foreground = None if rule.required else ctx
        try:
            if not rule.required:
                runs.nursery.start_soon(run.live)
                with trio.move_on_after(rule.after):
                    await run.not_working.wait()
                if kept.ended:
                    run.leave()
                    return _answer(kept)
            run.foreground = None
            await self.store.create(kept)
            run.stored.set()
            if rule.required:
                runs.nursery.start_soon(run.live)
        except BaseException:  # mostly a cancellation: nobody will know of the task
            run.foreground = None
            run.abandon()
            runs.nursery.start_soon(runs.forget, run.id)
            raise
        return _created(runs, ctx, kept)

    async def _leave(self, runs: TaskRuns, rule: TaskRule, ctx: Context[Any], kept: KeptTask) -> Any:
        """Leave a call to a worker, and return its result if that is soon there, else the task."""
        await self.store.create(kept)
        try:
            with trio.move_on_after(rule.after):
                kept = await runs.wait_not_working(kept)
        except BaseException:  # mostly a cancellation: nobody will know of the task
            runs.nursery.start_soon(runs.forget, kept.id, True)
            raise
        if not kept.ended:
            return _created(runs, ctx, kept)
        await runs.forget(kept.id)
        return _answer(kept)


def _created(runs: TaskRuns, ctx: Context[Any], kept: KeptTask) -> Encoded:
    """Return the answer to a call that has become a task."""
    session, _ = ctx.internals
    created = {key: value for key, value in runs.told(kept).items() if key not in _INSIDE}
    raw = session.engine.modern.dump_result(foreign("tasks/get"), {"resultType": RESULT_TASK, **created}, ctx.revision)
    return Encoded(encode(raw))


def _own_params(raw: Mapping[str, Any]) -> dict[str, Any]:
    meta = {key: each for key, each in (raw.get("_meta") or {}).items() if key not in _OF_CALLER}
    return {"name": raw["name"], "arguments": raw.get("arguments") or {}, "_meta": {**meta, META_PROGRESS_TOKEN: 0}}


def _answer(kept: KeptTask) -> Encoded:
    """Return the answer to a call whose task has ended before anybody knew of it. Raises ErrorReply."""
    if kept.result is not None:
        return Encoded(kept.result)
    error = kept.error or {"code": INTERNAL_ERROR, "message": "the call was cancelled"}
    raise ErrorReply(error["code"], error["message"], error.get("data"))
