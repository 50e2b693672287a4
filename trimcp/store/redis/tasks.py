"""A store of tasks in Redis, for processes on many machines.

A task is a hash, which its runner alone saves; each save has a number, so that one which is sent again, or arrives
late, changes nothing. The lease of a runner is a key that expires. Tasks that wait are a sorted set for each owner, and
the owners stand in another one, in the order in which they are served.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import trio

from trimcp.store.redis.connection import RedisScript
from trimcp.store.redis.resp import NotOurs, Part, stored
from trimcp.store.redis.streams import Entry, SharedRedis
from trimcp.store.tasks import COLUMNS, KeptTask, TaskStore, facts_of, in_turn, noted, restored
from trimcp.wire.jsonrpc import encode

_AT_ONCE: Final = 500  # tasks that are forgotten, released or looked at by one command
_FIELDS: Final = (*COLUMNS[1:], "facts", "saves")

# Keys live an hour longer than what they are for: clocks differ.
_SHARED: Final = """
local function stay(key, at)
  if redis.call('PEXPIRETIME', key) < tonumber(at) then redis.call('PEXPIREAT', key, at) end
end
local function last(turns)
  return (tonumber(redis.call('ZREVRANGE', turns, 0, 0, 'WITHSCORES')[2]) or 0) + 1
end
local function wait(waiting, turns, owner, id, due, at)
  redis.call('ZADD', waiting, due, id)
  if not redis.call('ZSCORE', turns, owner) then redis.call('ZADD', turns, last(turns), owner) end
  stay(waiting, at)
  stay(turns, at)
end
local function tell(changes, by)
  redis.call('XADD', changes, 'MAXLEN', '~', 1000, '*', 'by', by)
  redis.call('PEXPIRE', changes, 3600000)
end
"""

# KEYS: the task, its owner's ids, due, what its runner runs, what waits of its owner, turns, runners, changes.
# ARGV: whether it is new, its id, member, owner, until, runner, whether it has ended, number of the save, when it
# changed, facts, result, checkpoint, who writes.
_KEEP: Final = RedisScript(
    _SHARED
    + """
local new, id, owner, due, runner = ARGV[1] == '1', ARGV[2], ARGV[4], ARGV[5], ARGV[6]
local held = redis.call('HMGET', KEYS[1], 'runner', 'saves', 'updated')
if new then
  if held[1] then return 1 end
elseif held[1] ~= runner then
  return 0
elseif tonumber(held[2]) >= tonumber(ARGV[8]) then
  return 1
end
local now = tonumber(redis.call('TIME')[1])
local at = string.format('%.0f', (math.max(tonumber(due), now) + 3600) * 1000)
redis.call('HSET', KEYS[1], 'owner', owner, 'until', due, 'ended', ARGV[7], 'saves', ARGV[8], 'updated', ARGV[9],
  'facts', ARGV[10])
for n, name in ipairs({'result', 'checkpoint'}) do
  if ARGV[10 + n] == '' then redis.call('HDEL', KEYS[1], name) else redis.call('HSET', KEYS[1], name, ARGV[10 + n]) end
end
redis.call('PEXPIREAT', KEYS[1], at)
redis.call('ZADD', KEYS[3], due, ARGV[3])
if new then
  redis.call('HSET', KEYS[1], 'runner', runner, 'note', '{}')
  redis.call('SADD', KEYS[2], id)
  if runner == '' then
    wait(KEYS[5], KEYS[6], owner, id, due, at)
  else
    redis.call('SADD', KEYS[4], id)
    redis.call('SADD', KEYS[7], runner)
  end
end
if ARGV[7] == '1' then redis.call('SREM', KEYS[4], id) end
for _, key in ipairs({KEYS[2], KEYS[3], KEYS[4], KEYS[7]}) do stay(key, at) end
if (new and runner == '') or (not new and held[3] ~= ARGV[9]) then tell(KEYS[8], ARGV[13]) end
return 1
"""
)

# KEYS: a task, what its runner was told, changes. ARGV: its id, its runner and its note as they are known, the new
# note, who writes.
_TELL: Final = RedisScript(
    _SHARED
    + """
local held = redis.call('HMGET', KEYS[1], 'runner', 'note')
if not held[1] or held[2] == ARGV[4] then return 1 end
if held[1] ~= ARGV[2] or held[2] ~= ARGV[3] then return 0 end
redis.call('HSET', KEYS[1], 'note', ARGV[4])
if held[1] ~= '' then
  redis.call('SADD', KEYS[2], ARGV[1])
  stay(KEYS[2], redis.call('PEXPIRETIME', KEYS[1]))
end
tell(KEYS[3], ARGV[5])
return 1
"""
)

# KEYS: a task, what its runner was told. ARGV: its id, the runner, what it has heard.
_HEARD: Final = RedisScript(
    """
local held = redis.call('HMGET', KEYS[1], 'runner', 'note')
if held[1] ~= ARGV[2] or held[2] == ARGV[3] then redis.call('SREM', KEYS[2], ARGV[1]) end
if held[1] == ARGV[2] and held[2] == ARGV[3] then redis.call('HSET', KEYS[1], 'note', '{}') end
""",
    "allow-oom",
)

# KEYS: the lease, runners, what the runner was told. ARGV: the runner, milliseconds.
_LEASE: Final = RedisScript(
    """
redis.call('SET', KEYS[1], '1', 'PX', ARGV[2])
redis.call('SADD', KEYS[2], ARGV[1])
if redis.call('PTTL', KEYS[2]) < 86400000 then redis.call('PEXPIRE', KEYS[2], 86400000) end
return redis.call('SMEMBERS', KEYS[3])
""",
    "allow-oom",
)

# KEYS: the lease, what the runner runs, what it was told, turns, runners, changes; then each task, and what waits of
# its owner. ARGV: the runner, who writes, whether the lease has to be over; then the id of each.
_RELEASE: Final = RedisScript(
    _SHARED
    + """
local gone = ARGV[3] == '1'
if gone and redis.call('EXISTS', KEYS[1]) == 1 then return end
for n = 4, #ARGV do
  local task, waiting = KEYS[2 * n - 1], KEYS[2 * n]
  local held = redis.call('HMGET', task, 'runner', 'ended', 'owner', 'until')
  if held[1] == ARGV[1] and held[2] ~= '1' then
    redis.call('HSET', task, 'runner', '')
    wait(waiting, KEYS[4], held[3], ARGV[n], held[4], redis.call('PEXPIRETIME', task))
  end
  redis.call('SREM', KEYS[2], ARGV[n])
  redis.call('SREM', KEYS[3], ARGV[n])
end
if gone and redis.call('SCARD', KEYS[2]) == 0 then redis.call('SREM', KEYS[5], ARGV[1]) end
if #ARGV > 3 then tell(KEYS[6], ARGV[2]) end
""",
    "allow-oom",
)

# KEYS: the lease, what the runner runs, what it was told, turns, runners; then each task, and what waits of its owner.
# ARGV: the runner; then the id and the owner of each. Returns the ids of those that it has now.
_CLAIM: Final = RedisScript(
    _SHARED
    + """
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
local got = {}
for n = 1, (#KEYS - 5) / 2 do
  local task, waiting, id, owner = KEYS[4 + 2 * n], KEYS[5 + 2 * n], ARGV[2 * n], ARGV[2 * n + 1]
  local held = redis.call('HMGET', task, 'runner', 'note')
  if held[1] == '' then
    redis.call('HSET', task, 'runner', ARGV[1])
    redis.call('SADD', KEYS[2], id)
    redis.call('SADD', KEYS[5], ARGV[1])
    local at = redis.call('PEXPIRETIME', task)
    if held[2] ~= '{}' then
      redis.call('SADD', KEYS[3], id)
      stay(KEYS[3], at)
    end
    stay(KEYS[2], at)
    stay(KEYS[5], at)
    redis.call('ZADD', KEYS[4], last(KEYS[4]), owner)
  end
  if held[1] == '' or held[1] == ARGV[1] then got[#got + 1] = id end
  redis.call('ZREM', waiting, id)
  if redis.call('ZCARD', waiting) == 0 then redis.call('ZREM', KEYS[4], owner) end
end
return got
""",
    "allow-oom",
)

# KEYS: tasks.
_UPDATED: Final = RedisScript(
    "local found = {} for n, key in ipairs(KEYS) do found[n] = redis.call('HGET', key, 'updated') end return found",
    "no-writes",
)

# KEYS: due, turns; then each task, its owner's ids, and what waits of its owner. ARGV: the time after which they are
# over, or nothing; then the id, the owner and the member of each.
_FORGET: Final = RedisScript(
    """
local now = ARGV[1] ~= '' and math.min(tonumber(ARGV[1]), tonumber(redis.call('TIME')[1]))
for n = 1, (#KEYS - 2) / 3 do
  local id, owner, member = ARGV[3 * n - 1], ARGV[3 * n], ARGV[3 * n + 1]
  local at = redis.call('ZSCORE', KEYS[1], member)
  if not now or (at and tonumber(at) < now) then
    redis.call('DEL', KEYS[3 * n])
    redis.call('SREM', KEYS[3 * n + 1], id)
    redis.call('ZREM', KEYS[1], member)
    redis.call('ZREM', KEYS[3 * n + 2], id)
    if redis.call('ZCARD', KEYS[3 * n + 2]) == 0 then redis.call('ZREM', KEYS[2], owner) end
  end
end
""",
    "allow-oom",
)


@attrs.define(eq=False)
class RedisTasks(SharedRedis, TaskStore):
    """Tasks in Redis, for processes on many machines.

    A task is kept as Redis keeps what it has: with an append-only file it outlives an end of Redis.

    Args:
        url: where Redis is: `redis://user:password@host:6379/0`, `rediss://...` or `unix:///path`.
        prefix: what all its keys begin with. Servers that have one share tasks.
        limits: of its connections.
        context: of `rediss://`; by default the system's certificates count.
    """

    durable = True
    _what = "tasks"
    _count: int = attrs.field(init=False, default=0)
    _told: trio.Event = attrs.field(init=False, factory=trio.Event)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keep connections while the block runs. Raises OSError: Redis cannot be used, or it is open."""
        async with self._used() as redis:
            await redis.follow(self._key("changes"), "0-0", self._hear)
            yield

    def _key(self, *names: str) -> str:
        return ":".join((self.prefix, "tasks", *names))

    def _task(self, id: str) -> str:
        return f"{self.prefix}:task:{{{id}}}"

    def _keys_of(self, runner: str) -> list[str]:
        """Return the keys of a runner: its lease, what it runs, what it was told."""
        return [self._key(name, runner) for name in ("lease", "run", "told")]

    async def create(self, task: KeptTask) -> None:
        await self._keep(task, "1")

    async def save(self, task: KeptTask) -> bool:
        task.saves += 1
        return bool(await self._keep(task, ""))

    async def _keep(self, task: KeptTask, new: str) -> Any:
        owner, runner = task.owner, task.runner
        keys = [self._task(task.id), self._key("of", owner), self._key("due"), self._key("run", runner)]
        keys += [self._key("waiting", owner), *map(self._key, ("turns", "runners", "changes"))]
        values: list[Part] = [new, task.id, _member(owner, task.id), owner, repr(task.until), runner]
        values += ["1" if task.ended else "", task.saves, repr(task.updated), facts_of(task)]
        return await self._script(_KEEP, keys, *values, task.result or b"", task.checkpoint or b"", self._redis.token)

    async def load(self, id: str) -> KeptTask | None:
        found = dict(zip(_FIELDS, await self._ask("HMGET", self._task(id), *_FIELDS), strict=True))
        if found["facts"] is None:
            return None
        facts, saves, note = (found.pop(name) for name in ("facts", "saves", "note"))
        try:
            times = {name: float(found.pop(name)) for name in ("until", "updated")}
            texts = {name: found.pop(name).decode() for name in ("owner", "runner")}
            task = restored({"id": id, **times, **texts, **found}, facts, note)
            task.saves = int(saves)
        except (ValueError, TypeError, AttributeError) as error:
            raise NotOurs("Redis has a task that was not written so") from error
        return task

    async def updated(self, ids: Collection[str]) -> Mapping[str, float]:
        left, found = list(ids), dict[str, float]()
        while left:
            some, left = left[:_AT_ONCE], left[_AT_ONCE:]
            times = await self._script(_UPDATED, [self._task(id) for id in some])
            found.update({id: float(at) for id, at in zip(some, times, strict=True) if at is not None})
        return found

    async def count(self, owner: str) -> int:
        return int(await self._ask("SCARD", self._key("of", owner)))

    async def tell(self, id: str, note: Mapping[str, Any]) -> None:
        done = False
        while not done:  # each time that it is not, somebody else has got on
            runner, before = await self._ask("HMGET", self._task(id), "runner", "note")
            if runner is None:
                return
            told = stored(before, dict)
            noted(told, note)
            keys = [self._task(id), self._key("told", runner.decode()), self._key("changes")]
            done = await self._script(_TELL, keys, id, runner, before, encode(told), self._redis.token)

    async def renew(self, runner: str, lease: float) -> Sequence[tuple[str, Mapping[str, Any]]]:
        lease_of, _, told_of = self._keys_of(runner)
        told = []
        milliseconds = max(1, round(lease * 1_000))
        for id in await self._script(_LEASE, [lease_of, self._key("runners"), told_of], runner, milliseconds):
            held, note = await self._ask("HMGET", self._task(id.decode()), "runner", "note")
            if held == runner.encode() and note != b"{}":
                told.append((id.decode(), stored(note, dict)))
            await self._script(_HEARD, [self._task(id.decode()), told_of], id, runner, note or b"")
        return told

    async def claim(self, runner: str, most: int) -> Sequence[KeptTask]:
        for name in await self._ask("SMEMBERS", self._key("runners")):
            other = name.decode()
            if other != runner and not await self._ask("EXISTS", self._keys_of(other)[0]):
                await self._release(await self.held(other), other, "1")
        waiting = OrderedDict[str, list[str]]()
        owners = [owner.decode() for owner in await self._ask("ZRANGE", self._key("turns"), 0, most - 1)]
        for owner in owners:
            some = await self._ask("ZRANGE", self._key("waiting", owner), 0, most - 1)
            waiting[owner] = [id.decode() for id in some]
        found = in_turn(OrderedDict((owner, ids) for owner, ids in waiting.items() if ids), most)
        if not found:
            return ()
        keys = [*self._keys_of(runner), self._key("turns"), self._key("runners")]
        values: list[Part] = [runner]
        for owner, id in found:
            keys += [self._task(id), self._key("waiting", owner)]
            values += [id, owner]
        claimed = [await self.load(id.decode()) for id in await self._script(_CLAIM, keys, *values)]
        return [task for task in claimed if task is not None]

    async def held(self, runner: str) -> Collection[str]:
        return [id.decode() for id in await self._ask("SMEMBERS", self._key("run", runner))]

    async def release(self, ids: Collection[str], runner: str) -> None:
        await self._release(ids, runner, "")

    async def _release(self, ids: Collection[str], runner: str, gone: str) -> None:
        """Let tasks wait; with `gone` only if the lease of their runner is over, which is forgotten with the last."""
        left = list(ids)
        while True:
            some, left = left[:_AT_ONCE], left[_AT_ONCE:]
            keys = [*self._keys_of(runner), *map(self._key, ("turns", "runners", "changes"))]
            for id in some:
                owner = await self._ask("HGET", self._task(id), "owner")
                keys += [self._task(id), self._key("waiting", (owner or b"").decode())]
            await self._script(_RELEASE, keys, runner, self._redis.token, gone, *some)
            if not left:
                return

    async def forget(self, ids: Collection[str], now: float) -> None:
        named = []
        for id in ids:
            owner = await self._ask("HGET", self._task(id), "owner")
            if owner is not None:
                named.append((owner.decode(), id))
        over = await self._ask("ZRANGEBYSCORE", self._key("due"), "-inf", f"({now}", "LIMIT", 0, _AT_ONCE)
        for time_over, pairs in (("", named), (repr(now), [_pair(member) for member in over])):
            keys, values = [self._key("due"), self._key("turns")], list[Part]([time_over])
            for owner, id in pairs:
                keys += [self._task(id), self._key("of", owner), self._key("waiting", owner)]
                values += [id, owner, _member(owner, id)]
            if pairs:
                await self._script(_FORGET, keys, *values)

    def _hear(self, entries: list[Entry] | None) -> None:
        if self._redis.from_others(entries):
            self._notify()


def _member(owner: str, id: str) -> str:
    return encode([owner, id]).decode()


def _pair(member: bytes) -> tuple[str, str]:
    match stored(member, list):
        case [str(owner), str(id)]:
            return owner, id
    raise NotOurs("Redis has a name that was not written so")
