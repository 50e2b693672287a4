"""What processes of many machines keep together, in Redis: one script for each change, streams for letters.

A session is a hash, which its holder's fence guards, and a sorted set of its events, each with its stream and number in
front. A lease is a hash that expires; it has what the last commit came to, so that one which is sent again does
nothing.
"""

from __future__ import annotations

import ssl
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import chain
from struct import Struct
from typing import Final
from urllib.parse import quote

import attrs
import trio

from trimcp.store.redis.connection import RedisLimits, RedisScript
from trimcp.store.redis.counted import RedisCounts
from trimcp.store.redis.resp import NotOurs, Part
from trimcp.store.redis.streams import entries_of
from trimcp.store.shared import (
    LEASE,
    MOST_LETTERS,
    AppendEvent,
    DropEvents,
    EndSession,
    KeptSession,
    Letter,
    SaveSession,
    Write,
)
from trimcp.support.bounds import checked

_PLACE: Final = Struct(">QQ")  # of an event: stream, number
_AT_ONCE: Final = 4 * 1024 * 1024  # bytes of events or letters after which a reply ends
_EVER: Final = 10 * 365 * 86_400  # seconds
_LAST: Final = 2.0  # seconds for giving up the lease

# KEYS: the lease, all processes; then for each session it and its events, for each receiver its lease and its mailbox.
# ARGV: the process, the number of the commit, the most letters; then for each change what it is, the place of its keys,
# the fence or who is written to, how many values it has, and these. What is known of a session or a mailbox is asked
# once.
_COMMIT_BODY: Final = """
local mine = redis.call('HMGET', KEYS[1], 'commit', 'refused')
if mine[1] == ARGV[2] then return mine[2] end
local most, refused, room, fences = tonumber(ARGV[3]), {}, {}, {}
local function send(lease, mailbox, data)
  local left = room[mailbox]
  local first = not left
  if first then left = redis.call('EXISTS', lease) == 1 and most - redis.call('XLEN', mailbox) or 0 end
  room[mailbox] = left - 1
  if left < 1 then return false end
  redis.call('XADD', mailbox, '*', 'letter', data)
  if first then redis.call('PEXPIRE', mailbox, 3600000) end
  return true
end
local function change(what, session, events, fence, values)
  if not mine[1] then return false end
  if not fences[session] then
    local held = redis.call('HMGET', session, 'holder', 'fence')
    fences[session] = not held[1] and 'none' or held[1] == ARGV[1] and held[2] or 'taken'
  end
  if what == 'new' and fences[session] == 'none' then
    redis.call('HSET', session, 'holder', ARGV[1], 'fence', fence)
    fences[session] = fence
  elseif fences[session] ~= fence then
    return false
  end
  if what == 'append' then
    local scored = {}
    for n, value in ipairs(values) do scored[2 * n - 1], scored[2 * n] = 0, value end
    redis.call('ZADD', events, unpack(scored))
    if redis.call('PTTL', events) < 0 then redis.call('PEXPIREAT', events, redis.call('PEXPIRETIME', session)) end
  elseif what == 'drop' then
    redis.call('ZREMRANGEBYLEX', events, values[1], values[2])
  elseif what == 'end' then
    redis.call('DEL', session, events)
    fences[session] = 'none'
  else
    redis.call('HSET', session, 'data', values[1])
    if what == 'release' then
      redis.call('HSET', session, 'holder', '')
      fences[session] = 'taken'
    end
    redis.call('PEXPIRE', session, values[2])
    redis.call('PEXPIRE', events, values[2])
  end
  return true
end
local at, number = 4, 0
while at <= #ARGV do
  local what, key, who, values = ARGV[at], tonumber(ARGV[at + 1]), ARGV[at + 2], {}
  for n = 1, tonumber(ARGV[at + 3]) do values[n] = ARGV[at + 3 + n] end
  local done
  if what == 'letter' then
    done = send(KEYS[key], KEYS[key + 1], values[1])
  elseif what == 'copy' then
    done = true
    if not send(KEYS[key], KEYS[key + 1], values[1]) and redis.call('EXISTS', KEYS[key]) == 0 then
      redis.call('SREM', KEYS[2], who)
    end
  else
    done = change(what, KEYS[key], KEYS[key + 1], who, values)
  end
  if not done then refused[#refused + 1] = number end
  at, number = at + 4 + #values, number + 1
end
local text = table.concat(refused, ' ')
if mine[1] then redis.call('HSET', KEYS[1], 'commit', ARGV[2], 'refused', text) end
return text
"""
_COMMIT: Final = RedisScript(_COMMIT_BODY)
_FREE: Final = RedisScript(_COMMIT_BODY, "allow-oom")  # what makes some memory free

# KEYS: a session, its events, the lease, that of the holder. ARGV: the process, the holder as it is known, its fence,
# the number of the attempt.
_TAKE: Final = RedisScript(
    """
local kept = redis.call('HMGET', KEYS[1], 'holder', 'fence', 'data', 'taken')
if not kept[1] or redis.call('EXISTS', KEYS[3]) == 0 then return nil end
local again = kept[4] == ARGV[4]
if not again then
  if kept[1] ~= ARGV[2] or kept[2] ~= ARGV[3] then return nil end
  if kept[1] ~= ARGV[1] and redis.call('EXISTS', KEYS[4]) == 1 then return nil end
  kept[2] = string.format('%.0f', tonumber(kept[2]) + 1)
  redis.call('HSET', KEYS[1], 'holder', ARGV[1], 'fence', kept[2], 'taken', ARGV[4])
end
local streams, from = {}, '-'
while true do
  local event = redis.call('ZRANGEBYLEX', KEYS[2], from, '+', 'LIMIT', 0, 1)[1]
  if not event then break end
  local stream = string.sub(event, 1, 8)
  streams[#streams + 1] = stream
  from = '(' .. stream .. string.rep('\\255', 9)
end
return {kept[2], kept[3], streams}
""",
    "allow-oom",
)

# KEYS: events. ARGV: from where, to where, bytes. Returns whether there is more.
_AFTER: Final = RedisScript(
    """
local found, size, from, some = {}, 0, ARGV[1], nil
repeat
  some = redis.call('ZRANGEBYLEX', KEYS[1], from, ARGV[2], 'LIMIT', 0, 10)
  for _, event in ipairs(some) do
    found[#found + 1], size, from = event, size + #event, '(' .. event
  end
until #some < 10 or size > tonumber(ARGV[3])
return {#some < 10 and 0 or 1, found}
""",
    "no-writes",
)

# KEYS: the mailbox. ARGV: the first entry that was not read, bytes.
_RECEIVE: Final = RedisScript(
    """
redis.call('XTRIM', KEYS[1], 'MINID', ARGV[1])
local found, size, from, some = {}, 0, ARGV[1], nil
repeat
  some = redis.call('XRANGE', KEYS[1], from, '+', 'COUNT', 10)
  for _, entry in ipairs(some) do
    found[#found + 1], size, from = entry, size + #entry[2][2], '(' .. entry[1]
  end
until #some < 10 or #found >= 1000 or size > tonumber(ARGV[2])
return found
""",
    "allow-oom",
)

# KEYS: the lease, all processes, the mailbox. ARGV: the process, milliseconds, whether it begins.
_LEASE: Final = RedisScript(
    """
if ARGV[3] == '1' then redis.call('HSET', KEYS[1], 'commit', '0', 'refused', '') end
if redis.call('PEXPIRE', KEYS[1], ARGV[2]) == 0 then return 0 end
redis.call('SADD', KEYS[2], ARGV[1])
redis.call('PEXPIRE', KEYS[2], 86400000)
redis.call('PEXPIRE', KEYS[3], 3600000)
return 1
""",
    "allow-oom",
)

# KEYS: the lease, all processes, the mailbox. ARGV: the process, the first entry that was not read. Returns 0: there
# are letters.
_RETIRE: Final = RedisScript(
    """
local from = redis.call('EXISTS', KEYS[1]) == 1 and ARGV[2]
while from do
  local entry = redis.call('XRANGE', KEYS[3], from, '+', 'COUNT', 1)[1]
  if entry and entry[2][1] == 'letter' then return 0 end
  from = entry and '(' .. entry[1]
end
redis.call('DEL', KEYS[1], KEYS[3])
redis.call('SREM', KEYS[2], ARGV[1])
return 1
""",
    "allow-oom",
)


@attrs.define(eq=False, field_transformer=checked())
class RedisStore(RedisCounts):
    """What processes of many machines keep together, in a Redis that they all name.

    A commit is kept as Redis keeps what it has: with an append-only file it outlives an end of Redis. A process that
    was killed is gone for the others once its lease is over.

    Args:
        url: where Redis is: `redis://user:password@host:6379/0`, `rediss://...` or `unix:///path`.
        prefix: what all its keys begin with. Servers that have one share sessions.
        lease: seconds.
        limits: of its connections.
        context: of `rediss://`; by default the system's certificates count.
    """

    # All named again, for the order of the arguments.
    url: str = attrs.field(repr=False)
    prefix: str = "trimcp"
    lease: float = LEASE
    limits: RedisLimits = attrs.field(factory=RedisLimits)
    context: ssl.SSLContext | None = None
    name: str = attrs.field(init=False, default="")
    _what = "sessions"
    _commits: int = attrs.field(init=False, default=0)
    _next: str = attrs.field(init=False, default="0-1")  # the first entry of the mailbox that was not read
    _unread: trio.Event = attrs.field(init=False, factory=trio.Event)

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """Keep connections while the block runs, with a lease. Raises OSError: Redis cannot be used, or it is open."""
        async with self._used(lambda entries: self._unread.set()) as redis:
            self.name, self._next = redis.token, "0-1"
            self._unread.set()
            await self._renew("1")
            try:
                yield
            finally:
                with suppress(OSError), trio.move_on_after(_LAST, shield=True):  # else the lease ends by itself
                    await self._ask("DEL", self._lease_of(self.name), redis.mailbox)
                    await self._ask("SREM", self._key("processes"), self.name)

    def _lease_of(self, name: str) -> str:
        return self._key(f"lease:{quote(name, '', errors='replace')}")

    def _mailbox_of(self, name: str) -> str:
        return self._redis.mailbox_of(quote(name, "", errors="replace"))

    def _places(self, session: str) -> tuple[str, str]:
        id = quote(session, "", errors="replace")
        return self._key(f"session:{{{id}}}"), self._key(f"events:{{{id}}}")

    async def commit(self, writes: Sequence[Write]) -> Collection[Write]:
        self._commits += 1
        keys = [self._lease_of(self.name), self._key("processes")]
        places, changes, carried = dict[tuple[str, str], int](), list[list[Part]](), list[list[Write]]()
        appended = dict[str, int]()  # which change appends the latest events of a session

        def add(what: str, of: tuple[str, str], write: Write, who: Part, *values: Part) -> None:
            place = places.get(of)
            if place is None:
                place = places[of] = len(keys) + 1
                keys.extend(of)
            changes.append([what, place, who, 0, *values])
            carried.append([write])

        for write in writes:
            if type(write) is AppendEvent:  # nearly always
                event = _PLACE.pack(write.stream, write.seq) + write.data
                latest = appended.get(write.session)
                if latest is not None and changes[latest][2] == write.fence:
                    changes[latest].append(event)
                    carried[latest].append(write)
                else:
                    appended[write.session] = len(changes)
                    add("append", self._places(write.session), write, write.fence, event)
                continue
            if isinstance(write, Letter):
                for name in await self._others() if write.to is None else (write.to,):
                    what = "copy" if write.to is None else "letter"
                    add(what, (self._lease_of(name), self._mailbox_of(name)), write, name, write.data)
                continue
            place = self._places(write.session)
            appended.pop(write.session, None)
            match write:
                case SaveSession():
                    what = "new" if write.new else "release" if write.release else "save"
                    add(what, place, write, write.fence, write.data, round(write.ttl * 1000))
                case EndSession():
                    add("end", place, write, write.fence)
                case DropEvents():
                    add("drop", place, write, write.fence, *_range(write.stream, write.before))
        for change in changes:
            change[3] = len(change) - 4
        script = _FREE if all(isinstance(write, EndSession | DropEvents) for write in writes) else _COMMIT
        values = chain.from_iterable(changes)
        text = await self._script(script, keys, self.name, self._commits, MOST_LETTERS, *values)
        return [write for number in bytes(text).split() for write in carried[int(number)]]

    async def _others(self) -> list[str]:
        names = await self._ask("SMEMBERS", self._key("processes"))
        return [name.decode() for name in names if name.decode() != self.name]

    async def load(self, session: str) -> KeptSession | None:
        holder, fence, data = await self._ask("HMGET", self._places(session)[0], "holder", "fence", "data")
        if fence is None:
            return None
        name, number = _text(holder), _number(fence, data)
        return KeptSession(name, number, data, gone=await self.gone(name))

    async def take(self, session: str, fence: int) -> KeptSession | None:
        self._commits += 1
        found = await self._ask("HGET", self._places(session)[0], "holder")
        if found is None:
            return None
        holder = _text(found)
        keys = [*self._places(session), self._lease_of(self.name), self._lease_of(holder)]
        taken = await self._script(_TAKE, keys, self.name, holder, fence, f"{self.name}-{self._commits}")
        if taken is None:
            return None
        number, data, found = taken
        streams = [int.from_bytes(each, "big") for each in found]
        return KeptSession(self.name, _number(number, data), data, streams=streams)

    async def after(self, session: str, stream: int, seq: int) -> Sequence[tuple[int, bytes]]:
        first, last = _range(stream)
        first = b"[" + _PLACE.pack(stream, seq + 1)
        events, more = list[tuple[int, bytes]](), 1
        while more:
            keys = [self._places(session)[1]]
            more, found = await self._script(_AFTER, keys, first, last, _AT_ONCE)
            if any(len(event) < _PLACE.size for event in found):
                raise NotOurs("Redis has an event that was not written so")
            events += [(_PLACE.unpack_from(event)[1], event[_PLACE.size :]) for event in found]
            if found:
                first = b"(" + found[-1]
        return events

    async def agree(self, name: str, data: bytes) -> bytes:
        key = self._key(f"agreed:{quote(name, '')}")
        found = await self._ask("SET", key, data, "NX", "GET", "EX", _EVER)
        return data if found is None else bytes(found)

    async def receive(self) -> Sequence[bytes]:
        while True:
            await self._unread.wait()
            unread, self._unread = self._unread, trio.Event()
            try:
                found = await self._script(_RECEIVE, [self._redis.mailbox], self._next, _AT_ONCE)
                entries = entries_of(found)
            except BaseException:
                self._unread = unread
                raise
            if entries:
                self._unread.set()  # there may be more
                time, _, number = entries[-1][0].partition("-")
                self._next = f"{time}-{int(number) + 1}"
            letters = [fields[b"letter"] for _, fields in entries if b"letter" in fields]
            if letters:
                return letters

    async def renew(self) -> bool:
        return await self._renew("0")

    async def _renew(self, begins: str) -> bool:
        return bool(await self._script(_LEASE, self._own, self.name, round(self.lease * 1000), begins))

    async def retire(self) -> bool:
        retired = bool(await self._script(_RETIRE, self._own, self.name, self._next))
        if not retired:
            self._unread.set()
        return retired

    @property
    def _own(self) -> list[str]:
        return [self._lease_of(self.name), self._key("processes"), self._redis.mailbox]

    async def gone(self, name: str) -> bool:
        return not await self._ask("EXISTS", self._lease_of(name))


def _range(stream: int, before: int | None = None) -> tuple[bytes, bytes]:
    """Return from where to where the events of a stream are, or those before one."""
    end = (stream + 1, 0) if before is None else (stream, before)
    return b"[" + _PLACE.pack(stream, 0), b"(" + _PLACE.pack(*end)


def _text(value: bytes | None) -> str:
    return (value or b"").decode("ascii", "replace")


def _number(value: bytes, data: bytes | None) -> int:
    """Return a fence. Raises NotOurs: it is none, or there is no state beside it."""
    if data is None or not value.isdigit():
        raise NotOurs("Redis has a session that was not written so")
    return int(value)
