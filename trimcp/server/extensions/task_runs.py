"""Tasks under way: how each is carried out, told of, asked, cancelled, and found again after a restart.

A task is a `tools/call` of its own that is delivered to a session of its own, as the calls of agents are: so all that
holds for a call holds for it. Its sink is the `TaskRun`, which notes progress and takes the reply. A handler that asks
unwinds, as in every request of a revision where a server may not call its client, and begins again with the answers.
"""

from __future__ import annotations

import logging
import secrets
import time
from collections import Counter
from collections.abc import AsyncIterator, Hashable, Mapping
from contextlib import asynccontextmanager, suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any, Final

import attrs
import orjson
import trio

from trimcp.budget import MemoryAccount, MemoryCharge
from trimcp.channel import Incoming, Kind, Link, Outgoing, Sink, lane_of
from trimcp.errors import ErrorReply, LocalError
from trimcp.extensions.tasks import NEEDED, declared, status_text
from trimcp.principal import Principal
from trimcp.protocol.request_state import Memory, request_digest
from trimcp.server.running import Running
from trimcp.server.subscribing import LookAtTask, Watch, task_change
from trimcp.session.context import Context
from trimcp.session.incoming.turns import MOST_WAITING, Turns
from trimcp.session.limits import Quota
from trimcp.session.push import Pushed
from trimcp.store.tasks import KeptTask, TaskStore
from trimcp.support.cleaning import log_crash, one_line
from trimcp.wire import codes
from trimcp.wire.common import META_PROGRESS
from trimcp.wire.jsonrpc import JSON, Notification, Request, RequestId, encode
from trimcp.wire.methods import TASK_ID

log: logging.Logger = logging.getLogger("trimcp.server")

RECORD: Final = 4096
"""Bytes that a task takes beside its arguments."""
_LARGEST: Final = 1024 * 1024  # bytes of a checkpoint
_NUMBERS: Final = ("progress", "total", "message")


@attrs.define(eq=False)
class TaskSettings:
    """Where the tasks of a server are kept, and their bounds. `Server.tasks` documents them."""

    store: TaskStore = attrs.field(factory=TaskStore)
    longest: float = 86_400.0
    ttl: float = 3_600.0
    poll_interval: float = 1.0
    running: int = 100
    most: int = 1_000
    lease: float = 15.0
    grace: float = 5.0
    workers: bool = False


def require_tasks(ctx: Context[Any]) -> None:
    """Raise ErrorReply if the sender of a request did not declare tasks with it."""
    if not declared(ctx.capabilities):
        text = "this client did not declare the extension for tasks with the request"
        raise ErrorReply(codes.MISSING_CAPABILITY, text, {"requiredCapabilities": dict(NEEDED)})


@attrs.define(eq=False)
class TaskRuns:
    """The tasks that one run of a server carries out."""

    served: TaskSettings
    running: Running
    nursery: trio.Nursery
    runner: str = attrs.field(init=False, factory=lambda: secrets.token_hex(8))
    tasks: dict[str, TaskRun] = attrs.field(init=False, factory=dict)  # those not ended; without a file, all
    turns: Turns = attrs.field(init=False)
    watched: Counter[str] = attrs.field(init=False, factory=Counter)
    draining: bool = attrs.field(init=False, default=False)
    missed: bool = attrs.field(init=False, default=False)  # the store may have tasks for this run that it does not know
    woken: trio.Event = attrs.field(init=False, factory=trio.Event)
    _seen: dict[str, float] = attrs.field(init=False, factory=dict)  # when tasks that others run changed, if watched

    def __attrs_post_init__(self) -> None:
        self.turns = Turns(Quota(running=self.served.running, waiting=MOST_WAITING), "tasks")

    @property
    def store(self) -> TaskStore:
        return self.served.store

    # What clients ask

    async def find(self, ctx: Context[Any], params: Mapping[str, Any]) -> KeptTask:
        """Return a task that the sender of a request may see. Raises ErrorReply: there is none such."""
        id = params.get(TASK_ID)
        if not isinstance(id, str):
            raise ErrorReply(codes.INVALID_PARAMS, f"{TASK_ID} must be a text")
        task = await self._look(id, ctx.principal)
        if task is None:
            raise ErrorReply(codes.INVALID_PARAMS, "there is no such task, or no more")
        return task

    async def _look(self, id: str, principal: Principal | None) -> KeptTask | None:
        task = await self._now(id)
        if task is None or task.principal_id != (None if principal is None else principal.id):
            return None
        return None if task.ended and task.until < time.time() else task

    async def _now(self, id: str) -> KeptTask | None:
        """Return a task as it is, but its end only once that is kept: no restart can change what was told."""
        run = self.tasks.get(id)
        if run is None or not run.stored.is_set():
            return await self.store.load(id)
        if run.kept.ended:
            await run.over.wait()
        return run.kept

    async def tell(self, task: KeptTask, note: Mapping[str, Any]) -> None:
        """Pass answers or a cancellation on to whoever runs a task."""
        run = self.tasks.get(task.id)
        if run is not None:
            await run.tell(note)
        elif not task.ended:
            answers = task.wanted(note.get("answers", {}))  # nobody keeps what was not asked
            if answers or note.get("cancelled"):
                await self.store.tell(task.id, {**note, "answers": answers})

    def told(self, task: KeptTask) -> dict[str, Any]:
        """Return a task as clients are told of it."""
        said: dict[str, Any] = {
            TASK_ID: task.id,
            "status": task.status,
            "createdAt": _stamp(task.created),
            # The clock may have been set back since it began.
            "lastUpdatedAt": _stamp(max(task.created, task.updated)),
            "ttlMs": max(1, round(max(task.until - task.created, self.served.ttl) * 1_000)),
            "pollIntervalMs": max(1, round(self.served.poll_interval * 1_000)),
        }
        if task.message is not None:
            said["statusMessage"] = task.message
        if task.progress is not None:
            said["_meta"] = {META_PROGRESS: {key: each for key, each in task.progress.items() if key in _NUMBERS}}
        if task.status == "completed":
            assert task.result is not None
            said["result"] = orjson.Fragment(task.result)
        elif task.status == "failed":
            said["error"] = task.error
        elif task.status == "input_required":
            said["inputRequests"] = {key: each for key, each in task.questions.items() if key not in task.answers}
        return said

    # Subscriptions

    @asynccontextmanager
    async def watching(self, ctx: Context[Any], ids: list[str]) -> AsyncIterator[dict[str, LookAtTask]]:
        """See `WatchTasks`. Raises ErrorReply: the client did not declare tasks."""
        require_tasks(ctx)
        found = [task for id in ids if (task := await self._look(id, ctx.principal)) is not None]
        for task in found:
            self._seen.setdefault(task.id, task.updated)
        self.wake()  # what has changed since is no news any more
        looks: dict[str, LookAtTask] = {task.id: partial(self._told_now, task.id) for task in found}
        self.watched.update(looks.keys())
        try:
            yield looks
        finally:
            self.watched -= Counter(looks.keys())  # which drops those at 0

    async def _told_now(self, id: str) -> dict[str, Any] | None:
        task = await self._now(id)
        return None if task is None else self.told(task)

    def changed(self, task: KeptTask) -> None:
        """Have subscribers told of a task as it is now."""
        if self.watched[task.id]:
            self.running.server.changes.publish(task_change(task.id))

    async def wait_not_working(self, task: KeptTask) -> KeptTask:
        """Wait until a task that another process runs has ended or asks, and return it."""
        watch = Watch(frozenset({task_change(task.id)}))
        self._seen.setdefault(task.id, task.updated)
        self.watched[task.id] += 1
        self.running.server.changes.attach(watch.note)
        self.wake()  # what has changed since is no news any more
        try:
            while task.status == "working":
                await watch.noted.receive_all()
                task = await self.store.load(task.id) or attrs.evolve(task, status="cancelled")
        finally:
            self.running.server.changes.detach(watch.note)
            self.watched -= Counter([task.id])
        return task

    async def tell_watchers(self) -> None:
        """Have subscribers told of the tasks that others run and have changed."""
        self._seen = {id: at for id, at in self._seen.items() if self.watched[id] and id not in self.tasks}
        for id, at in (await self.store.updated(list(self._seen))).items():
            if self._seen[id] != at:
                self._seen[id] = at
                self.running.server.changes.publish(task_change(id))

    async def forget(self, id: str, running: bool = False) -> None:
        """Drop a task from the store, or cancel it if it may be `running`, if that works; else its time ends it."""
        try:
            if running:
                await self.store.tell(id, {"cancelled": True})
            else:
                await self.store.forget([id], 0.0)
        except Exception as error:
            log_crash(log, error, "a task could not be forgotten")

    def admit(self, run: TaskRun, size: int) -> bool:
        """Add a task of so many bytes, and return True, unless there is no room for it and for its call."""
        if not run.account.fits(2 * size):
            run.account.refuse("tasks")
            run.leave()
            return False
        run.size = size
        run.charge.set(2 * size)  # until its session counts the call
        self.tasks[run.id] = run
        return True

    async def save(self, task: KeptTask) -> bool:
        """Save a task, and wait while the store is away; return False if another process has the task."""
        warned = False
        while True:
            try:
                return await self.store.save(task)
            except OSError as error:
                if not warned:
                    log_crash(log, error, "a task could not be kept, which is tried again")
                warned = True
            await trio.sleep(self.served.poll_interval)

    def wake(self) -> None:
        """Look at the store soon: something may have changed."""
        self.woken.set()


def as_json(memory: Memory) -> dict[str, Any]:
    """Return what a handler was answered so far as JSON; `Memory(**...)` restores it."""
    return {name: getattr(memory, name) for name in ("answers", "asked", "kept", "progress")}


def _stamp(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@attrs.define(eq=False, repr=False)
class TaskRun(Sink):
    """One task: the origin and the sink of its `tools/call`, and its place in the memory of the server.

    It has more than 300 lines because each of the three depends on whether it runs, waits, asks or is over.
    """

    runs: TaskRuns
    kept: KeptTask
    _principal: Principal | None
    _headers: Mapping[str, str] | None = None
    client: str | None = None
    foreground: Context[Any] | None = attrs.field(init=False, default=None)  # the call that waits for it
    size: int = attrs.field(init=False, default=RECORD)  # bytes of it and its arguments
    account: MemoryAccount = attrs.field(init=False)
    charge: MemoryCharge = attrs.field(init=False)
    not_working: trio.Event = attrs.field(init=False, factory=trio.Event)  # it has ended, or asks
    stored: trio.Event = attrs.field(init=False, factory=trio.Event)
    over: trio.Event = attrs.field(init=False, factory=trio.Event)  # nothing runs for it any more
    begun: bool = attrs.field(init=False, default=False)  # its handler has begun
    _deadline: float = attrs.field(init=False)
    _scope: trio.CancelScope = attrs.field(init=False, factory=trio.CancelScope)
    _pushed: Pushed | None = attrs.field(init=False, default=None)
    _replied: trio.Event = attrs.field(init=False, factory=trio.Event)
    _answered: trio.Event = attrs.field(init=False, factory=trio.Event)
    _saving: bool = attrs.field(init=False, default=False)  # its progress, soon
    _lost: bool = attrs.field(init=False, default=False)  # another run of a server may claim it, or has

    def __attrs_post_init__(self) -> None:
        served = self.runs.served
        # All of its time, unless it began in another process.
        left = min(served.longest, max(0.0, self.kept.until - served.ttl - time.time()))
        self._deadline = trio.current_time() + left
        self.account = self.runs.running.budget.holding(self.kept.owner, self)
        self.charge = MemoryCharge(self.account)

    @property
    def id(self) -> str:
        """Its id."""
        return self.kept.id

    # Its life

    async def live(self) -> None:
        """Carry the task out, until it has ended or another process has it."""
        kept = self.kept
        try:
            with trio.move_on_at(self._deadline) as limit, self._scope:
                await self._carry_out()
            if limit.cancelled_caught and not kept.ended:
                self.fail(codes.TIMED_OUT, f"the task took longer than {self.runs.served.longest:g} seconds")
            if self._lost:
                return
            if not kept.ended:
                self._end("cancelled")
            self.not_working.set()
            await self.stored.wait()
            await self._save()
        except trio.Cancelled:  # the run of the server ends without a word
            self._lost = True
            raise
        except Exception as error:  # of a store of somebody's own, or a bug: it is begun again from what is kept
            self._lost = self.runs.missed = True
            log_crash(log, error, "a task could not be kept")
        finally:
            self._disconnect()
            self.over.set()
            if self._lost or self.runs.store.durable:
                self.leave()
            self.runs.wake()  # another may begin

    async def _carry_out(self) -> None:
        kept, turns = self.kept, self.runs.turns
        while not (kept.ended or self._lost or self._scope.cancel_called):
            if kept.questions:
                self.not_working.set()
                await self.stored.wait()
                await self._save()
                if len(kept.answers) < len(kept.questions):
                    await self._answered.wait()
                kept.remember()
                self._answered = trio.Event()
                await self._save()
            since = await turns.acquire(kept.owner)
            try:
                await self._attempt()
            finally:
                turns.give_back(since)

    async def _attempt(self) -> None:
        """Run the handler once, until it has returned or asks."""
        kept, self._replied, self.begun = self.kept, trio.Event(), True
        self.charge.set(self.size + len(kept.checkpoint or b""))
        params = dict(kept.params)
        if kept.memory is not None:
            sealer = self.runs.running.server.sealer
            params["requestState"] = sealer.seal(Memory(**kept.memory), **self._sealed_for)
        self._pushed = self.runs.running.open_for_one(self.account)
        message = Request(0, "tools/call", params)
        self._pushed.deliver((Incoming(message, 0, self, self._headers, self._principal),))
        await self._replied.wait()
        self._disconnect()

    def _disconnect(self) -> None:
        pushed, self._pushed = self._pushed, None
        if pushed is not None:
            pushed.close()

    async def _save(self) -> None:
        if await self._saved():
            self.runs.changed(self.kept)

    async def _saved(self) -> bool:
        """Save it; return False if another process has it, so that it is lost here."""
        kept = await self.runs.save(self.kept)
        if not kept:
            self.lose()
        return kept

    async def _save_progress(self) -> None:
        """Let other processes see how far it is, as often as clients are to look."""
        with trio.move_on_after(self.runs.served.poll_interval):
            await self.over.wait()
        self._saving = False
        if not self.over.is_set() and not self.kept.ended and not self._lost:
            with suppress(OSError):  # it is for show
                await self.runs.store.save(self.kept)

    async def tell(self, note: Mapping[str, Any]) -> None:
        """Take answers to its questions, or a cancellation."""
        kept = self.kept
        if note.get("cancelled"):
            self.cancel("cancelled by its client")
        if kept.status == "input_required" and kept.answer(note.get("answers", {})):
            kept.updated = time.time()
            if len(kept.answers) < len(kept.questions):
                await self.runs.store.save(kept)  # once: who asks, or keeps the lease, does not wait for a store
            else:
                self._answered.set()
            self.runs.changed(kept)

    def cancel(self, why: str) -> None:
        """Cancel it, which it may end by returning all the same."""
        if self._pushed is not None:
            self._pushed.deliver((Incoming(Notification("notifications/cancelled", {"requestId": 0, "reason": why})),))
        else:
            self._scope.cancel(reason=why)

    def abandon(self) -> None:
        """Cancel it, and keep nothing of it."""
        self._lost = True
        self.cancel("its call was cancelled")
        self.leave()

    def lose(self) -> None:
        """Stop it here without an end: another run of a server may claim it."""
        self._lost = True
        if self._pushed is not None:
            self._pushed.disconnect("the server ends", ending=True)
        else:
            self._scope.cancel(reason="another process may go on with it")

    def leave(self) -> None:
        """Forget it in memory; it may still be in the store."""
        if self.runs.tasks.get(self.id) is self:
            del self.runs.tasks[self.id]
        self.stored.set()
        self.charge.set(0)
        self.account.close()

    @property
    def at_work(self) -> bool:
        """Whether its handler runs, or waits for a turn."""
        return not self.over.is_set() and self.kept.status == "working"

    def _end(self, status: Any, message: str | None = None) -> None:
        kept = self.kept
        kept.status, kept.message, kept.questions, kept.checkpoint = status, message, {}, None
        kept.updated = time.time()
        kept.until = kept.updated + self.runs.served.ttl
        kept.params, kept.memory = {"name": kept.params["name"]}, None
        self.charge.set(RECORD + len(kept.result or b""))

    def fail(self, code: int, message: str, data: Any = None) -> None:
        """End it with an error."""
        self.kept.error = {"code": code, "message": message} | ({} if data is None else {"data": data})
        self._end("failed", one_line(message))

    # The task for its handler

    @property
    def task(self) -> TaskRun:
        """What the handler gets as `ctx.task`."""
        return self

    @property
    def saved(self) -> Any:
        """The value of the last checkpoint, or None."""
        checkpoint = self.kept.checkpoint
        return None if checkpoint is None else orjson.loads(checkpoint)

    async def checkpoint(self, value: JSON) -> None:
        """Save how far the handler is; see `CallTask.checkpoint`."""
        saved = encode(value)
        if len(saved) > _LARGEST:
            raise LocalError(f"a checkpoint has at most {_LARGEST} bytes, not {len(saved)}")
        self.kept.checkpoint = saved
        self.charge.set(self.size + len(saved))
        await trio.lowlevel.checkpoint()
        if self.stored.is_set() and not await self._saved():
            await trio.sleep_forever()  # until the cancellation arrives: another process has the task

    # The holder of its memory

    @property
    def at_rest(self) -> bool:
        """Whether nothing runs for it."""
        return self.over.is_set()

    def evict(self, why: str) -> None:
        """Give its memory back: as others need it."""
        if self.over.is_set():
            self.leave()
            self.runs.nursery.start_soon(self.runs.forget, self.id)
        else:
            self.fail(codes.OVERLOADED, why)
            self.cancel(why)

    # The origin of its messages

    @property
    def link(self) -> Link:
        return Link("task")

    name = "task"

    @property
    def sink(self) -> Sink:
        return self

    @property
    def audited(self) -> dict[str, str]:
        """What a record of it has beside, or instead of, that of a call."""
        return {"transport": "task", "task": self.id[:8]}

    # Called by its session

    def post(self, outgoing: Outgoing) -> None:
        """Take the reply, or progress, of which only the latest is kept."""
        if outgoing.kind is Kind.REPLY:
            self._take(outgoing)
        elif lane_of(outgoing) == "progress" and not self.kept.ended:
            progress = orjson.loads(outgoing.data)["params"]
            self.kept.progress, self.kept.message, self.kept.updated = progress, status_text(progress), time.time()
            self.runs.changed(self.kept)
            if self.runs.store.durable and self.stored.is_set() and not self._saving:
                self._saving = True
                self.runs.nursery.start_soon(self._save_progress)
            if self.foreground is not None:
                self.foreground.report_progress_nowait(*(progress.get(key) for key in _NUMBERS))

    def post_latest(self, key: Hashable, outgoing: Outgoing) -> None:
        self.post(outgoing)

    def unanswered(self, request_id: RequestId) -> None:
        if not self.kept.ended and not self._lost:
            self._end("cancelled", "cancelled by its client")
        self._replied.set()

    def _take(self, outgoing: Outgoing) -> None:
        kept, data = self.kept, outgoing.data
        self._replied.set()
        if kept.ended or self._lost:
            return
        if outgoing.error is not None:
            error = orjson.loads(data)["error"]
            if error["code"] == codes.CANCELLED_BY_DRAIN:
                self._lost = True
            elif error["code"] == codes.CANCELLED_BY_OPERATOR:
                self._end("cancelled", error["message"])
            else:
                self.fail(error["code"], error["message"], error.get("data"))
            return
        result = data[data.index(b'"result":') + 9 : -1]
        if b'"input_required"' in result and (asks := orjson.loads(result)).get("resultType") == "input_required":
            self._ask(asks)
        elif not self.account.fits(len(result)):
            self.account.refuse("results of tasks")
            self.fail(codes.INTERNAL_ERROR, "the call was carried out, but there was no room to keep its result")
        else:
            kept.result = result
            self._end("completed")

    @property
    def _sealed_for(self) -> Any:
        digest = request_digest("tools/call", self.kept.params)
        return {"digest": digest, "principal": self.kept.principal_id, "now": time.time()}

    def _ask(self, asks: Mapping[str, Any]) -> None:
        """Note what the handler asks, and what it was answered before. A key names one question of a task."""
        kept = self.kept
        memory = self.runs.running.server.sealer.open(asks["requestState"], **self._sealed_for)
        kept.memory = as_json(memory)
        kept.ask(asks["inputRequests"])
        kept.updated = time.time()
