"""A store of contexts in Redis, for processes on many machines.

A context is a hash: its stamp, and its value as JSON. One script compares stamps and writes, so that a write is whole
or nothing, and knows the write that this process did last, so that one which is sent again does nothing. Each write
adds an entry to a stream of changes. Indexes say how many contexts each owner has, which, and when each may go.
"""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any, Final

import attrs
import trio

from trimcp.store.contexts import ContextKey, ContextStore, KeptContext, Owner
from trimcp.store.redis.connection import RedisScript
from trimcp.store.redis.resp import NotOurs, Part, RedisRefusal, stored
from trimcp.store.redis.streams import Entry, SharedRedis, entries_of
from trimcp.wire.jsonrpc import encode

_FORM: Final = 1
_REMEMBERED: Final = 10_000  # changes
_AT_ONCE: Final = 500  # contexts forgotten by one script
_NEVER: Final = 253_402_300_799  # seconds: the end of the year 9999

# How a script forgets one context, and how it tells of changes. Keys live an hour longer than what they are for: clocks
# differ.
_SHARED: Final = """
local changes, owners, due = KEYS[1], KEYS[2], KEYS[3]
local changed = {}
local now = tonumber(redis.call('TIME')[1]) * 1000
local latest = now + 3600000
local function stay(key, at)
  if redis.call('PEXPIRETIME', key) < at then redis.call('PEXPIREAT', key, string.format('%.0f', at)) end
end
local function forget(context, ids, member, owner, id)
  redis.call('DEL', context)
  redis.call('ZREM', due, member)
  if redis.call('SREM', ids, id) == 1 and redis.call('HINCRBY', owners, owner, -1) < 1 then
    redis.call('HDEL', owners, owner)
  end
  changed[#changed + 1] = member
end
local function tell(by)
  if #changed == 0 then return '0' end
  local names = '[' .. table.concat(changed, ',') .. ']'
  return redis.call('XADD', changes, 'MAXLEN', '~', ARGV[1], '*', 'by', by, 'contexts', names)
end
"""

# KEYS: changes, owners, due, the last write; then a context and its owner's ids for each that is deleted or kept.
# ARGV: changes to remember, who writes, the write's id, how many are deleted, how many are kept; then member, owner, id
# for each, and for each that is kept its stamp, until when, and its value.
_WRITE_BODY: Final = (
    _SHARED
    + """
local done = redis.call('HMGET', KEYS[4], 'write', 'stamps')
if done[1] == ARGV[3] then return done[2] end
local key, arg, stamps = 5, 6, {}
for _ = 1, tonumber(ARGV[4]) do
  forget(KEYS[key], KEYS[key + 1], ARGV[arg], ARGV[arg + 1], ARGV[arg + 2])
  key, arg = key + 2, arg + 3
end
for n = 0, tonumber(ARGV[5]) - 1 do
  local at = arg + 6 * n
  if (redis.call('HGET', KEYS[key + 2 * n], 'stamp') or '0-0') == ARGV[at + 3] then
    changed[#changed + 1] = ARGV[at]
    stamps[n + 1] = true
  end
end
local stamp = tell(ARGV[2])
for n = 0, tonumber(ARGV[5]) - 1 do
  if stamps[n + 1] then
    local at, context, ids = arg + 6 * n, KEYS[key + 2 * n], KEYS[key + 2 * n + 1]
    local stays = math.max(tonumber(ARGV[at + 4]) * 1000 + 3600000, now + 3600000)
    latest = math.max(latest, stays)
    redis.call('HSET', context, 'stamp', stamp, 'value', ARGV[at + 5])
    redis.call('PEXPIREAT', context, string.format('%.0f', stays))
    redis.call('ZADD', due, ARGV[at + 4], ARGV[at])
    if redis.call('SADD', ids, ARGV[at + 2]) == 1 then redis.call('HINCRBY', owners, ARGV[at + 1], 1) end
    stay(ids, stays)
    stamps[n + 1] = stamp
  else
    stamps[n + 1] = '0-0'
  end
end
for _, name in ipairs({changes, owners, due}) do stay(name, latest) end
local text = table.concat(stamps, ' ')
redis.call('HSET', KEYS[4], 'write', ARGV[3], 'stamps', text)
redis.call('PEXPIRE', KEYS[4], 3600000)
return text
"""
)
_WRITE: Final = RedisScript(_WRITE_BODY)
_DELETE: Final = RedisScript(_WRITE_BODY, "allow-oom")  # with a full memory it makes some free

# KEYS: changes, owners, due; then a context and its owner's ids for each. ARGV: changes to remember, who writes, the
# time; then member, owner, id for each.
_EXPIRE: Final = RedisScript(
    _SHARED
    + """
for n = 0, (#KEYS - 3) / 2 - 1 do
  local arg = 4 + 3 * n
  local at = redis.call('ZSCORE', due, ARGV[arg])
  if at and tonumber(at) < tonumber(ARGV[3]) then
    forget(KEYS[4 + 2 * n], KEYS[5 + 2 * n], ARGV[arg], ARGV[arg + 1], ARGV[arg + 2])
  end
end
tell(ARGV[2])
return changed
""",
    "allow-oom",
)

# KEYS: changes. ARGV: changes to remember, who asks, the last change that it knows. Without that one nobody knows what
# came after it: an entry begins anew.
_CHANGED: Final = RedisScript(
    """
if #redis.call('XRANGE', KEYS[1], ARGV[3], ARGV[3]) == 1 then
  local found = redis.call('XRANGE', KEYS[1], '(' .. ARGV[3], '+', 'COUNT', ARGV[1])
  if #found < tonumber(ARGV[1]) then return found end
end
local id = redis.call('XADD', KEYS[1], 'MAXLEN', '~', ARGV[1], '*', 'by', ARGV[2], 'contexts', '[]')
if redis.call('PTTL', KEYS[1]) < 0 then redis.call('PEXPIRE', KEYS[1], 3600000) end
return id
""",
    "allow-oom",
)


@attrs.define(eq=False)
class RedisContexts(SharedRedis, ContextStore):
    """Contexts in Redis, for processes on many machines.

    An update is kept as Redis keeps what it has: with an append-only file and `appendfsync always` it survives a power
    cut, with `everysec` at most the last second is lost.

    Args:
        url: where Redis is: `redis://user:password@host:6379/0`, `rediss://...` or `unix:///path`.
        prefix: what all its keys begin with. Servers that have one share contexts.
        limits: of its connections.
        context: of `rediss://`; by default the system's certificates count.
    """

    shared: bool = attrs.field(init=False, default=True)
    _what = "contexts"
    _writes: int = attrs.field(init=False, default=0)
    _seen: str = attrs.field(init=False, default="0-0")  # the latest change that `changed` has returned
    _others: trio.Event = attrs.field(init=False, factory=trio.Event)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keep connections while the block runs. Raises OSError: Redis cannot be used, or it is open."""
        async with self._used() as redis:
            await self._look()
            await redis.follow(self._key("changes"), self._seen, self._told)
            yield

    def _key(self, name: str) -> str:
        return f"{self.prefix}:contexts:{name}"

    def _places(self, key: ContextKey) -> tuple[str, str]:
        """Return the keys of a context and of its owner's ids."""
        return f"{self.prefix}:context:{{{_member(key)}}}", f"{self.prefix}:contexts-of:{_owner(key[0])}"

    async def counts(self) -> Mapping[Owner, int]:
        found = await self._ask("HGETALL", self._key("owners"))
        return {_owner_of(name): int(count) for name, count in zip(found[::2], found[1::2], strict=True)}

    async def ids(self, owner: Owner) -> Sequence[str]:
        found = await self._ask("SMEMBERS", self._places((owner, ""))[1])
        return [id.decode() for id in found]

    async def load(self, owner: Owner, id: str) -> KeptContext | None:
        stamp, value = await self._ask("HMGET", self._places((owner, id))[0], "stamp", "value")
        return None if value is None else _loaded(owner, id, _stamp_of(stamp.decode()), value)

    async def write(self, kept: Sequence[KeptContext], deleted: Sequence[ContextKey]) -> Mapping[ContextKey, int]:
        self._writes += 1
        keys, values = list[str](), list[Part]()
        for key in [*deleted, *(one.key for one in kept)]:
            keys += self._places(key)
        for key in deleted:
            values += _names(key)
        for one in kept:
            until = f"{min(max(one.until, 0.0), _NEVER):.3f}"
            values += [*_names(one.key), _stamp_text(one.stamp), until, _value_of(one)]
        token = self._redis.token
        places = [*map(self._key, ("changes", "owners", "due", f"write:{token}")), *keys]
        head = (_REMEMBERED, token, self._writes, len(deleted), len(kept))
        try:
            text = await self._script(_WRITE if kept else _DELETE, places, *head, *values)
        except RedisRefusal as error:
            if error.code == "OOM" and kept and deleted:
                await self.write((), deleted)
            raise
        stamps = text.decode().split()
        return {one.key: _stamp_of(stamp) for one, stamp in zip(kept, stamps, strict=True) if stamp != "0-0"}

    async def expire(self, now: float) -> Sequence[ContextKey]:
        due = await self._ask("ZRANGEBYSCORE", self._key("due"), "-inf", f"({now}", "LIMIT", 0, _AT_ONCE)
        if not due:
            return ()
        keys, values = list[str](), list[Part]()
        for member in due:
            key = _key_of(stored(member, list))
            keys += self._places(key)
            values += _names(key)
        names = [self._key(name) for name in ("changes", "owners", "due")]
        gone = await self._script(_EXPIRE, [*names, *keys], _REMEMBERED, self._redis.token, f"{now}", *values)
        return [_key_of(stored(member, list)) for member in gone]

    # What others change. Redis alone knows: what it sends may be on its way when somebody has been answered already.

    @property
    def alone(self) -> bool:
        return False

    @property
    def told(self) -> bool:
        return True

    async def wait_told(self) -> None:
        await self._others.wait()

    def _told(self, entries: list[Entry] | None) -> None:
        if self._redis.from_others(entries):
            self._others.set()

    async def changed(self) -> Mapping[ContextKey, int] | None:
        if self._others.is_set():
            self._others = trio.Event()
        return await self._look()

    async def _look(self) -> dict[ContextKey, int] | None:
        found = await self._script(_CHANGED, [self._key("changes")], _REMEMBERED, self._redis.token, self._seen)
        if isinstance(found, bytes):
            self._seen = found.decode()
            return None
        entries, stamps = entries_of(found), dict[ContextKey, int]()
        for id, fields in entries:
            for name in stored(fields.get(b"contexts", b""), list):
                stamps[_key_of(name)] = _stamp_of(id)
        if entries:
            self._seen = entries[-1][0]
        return stamps


# Names in keys and values, as JSON: [principal, agent], and the id behind them.


def _owner(owner: Owner) -> str:
    return encode(list(owner)).decode()


def _member(key: ContextKey) -> str:
    return encode([*key[0], key[1]]).decode()


def _names(key: ContextKey) -> tuple[str, str, str]:
    return _member(key), _owner(key[0]), key[1]


def _owner_of(text: bytes) -> Owner:
    match stored(text, list):
        case [str(principal), str(agent)]:
            return principal, agent
    raise NotOurs("Redis has an owner that was not written so")


def _key_of(name: list[Any]) -> ContextKey:
    match name:
        case [str(principal), str(agent), str(id)]:
            return (principal, agent), id
    raise NotOurs("Redis has a name that was not written so")


def _stamp_text(stamp: int) -> str:
    return f"{stamp >> 64}-{stamp & (1 << 64) - 1}"


def _stamp_of(text: str) -> int:
    time, _, count = text.partition("-")
    return int(time) << 64 | int(count)


# Values. A time that never comes is null.


def _value_of(one: KeptContext) -> bytes:
    times = [None if time == math.inf else time for time in (one.created, one.ends, one.until)]
    head = encode({"form": _FORM, "version": one.version, "times": times, "state": dict(one.state)})
    return b'%b,"history":[%b]}' % (head[:-1], b",".join(one.history))


def _loaded(owner: Owner, id: str, stamp: int, value: bytes) -> KeptContext:
    found = stored(value, dict)
    form, times = found.get("form"), found.get("times")
    if type(form) is int and form > _FORM:
        raise NotOurs(f"a newer trimcp wrote the context (form {form}; this one knows {_FORM})")
    match form, found.get("version"), found.get("state"), found.get("history"), times:
        case 1, int(version), dict(state), list(history), [created, ends, until] if all(map(_is_time, times)):
            made, over, stays = [math.inf if time is None else float(time) for time in (created, ends, until)]
            return KeptContext(owner, id, version, state, [encode(each) for each in history], made, over, stays, stamp)
    raise NotOurs("Redis has a context that was not written so")


def _is_time(value: Any) -> bool:
    return type(value) in (int, float, type(None))
