"""What processes of many machines use up and know together, in Redis: turns, what is used once, records.

The turns of a quota are one sorted set, by their places in the queue; those whose time has come are below zero.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from hashlib import sha256
from typing import Final

from trimcp.store.redis.connection import RedisScript
from trimcp.store.redis.resp import NotOurs, Part
from trimcp.store.redis.streams import SharedRedis
from trimcp.store.shared import MOST_MARKS, RecordChange, SharedStore, SharedTurn, TurnAnswer

# KEYS: for each quota what it is, its turns, until when each of these counts, and the last place of each owner.
# ARGV: milliseconds that a turn counts; then for each turn what to do, the place of its keys, its id, its owner, its
# process, the bounds: running, per second (0: none), burst, waiting.
# A place is a round, and a number within it.
_TURNS: Final = RedisScript(
    """
local time = redis.call('TIME')
local now, lease = time[1] * 1000 + time[2] / 1000, tonumber(ARGV[1])
local after, come, ROUND = {}, {}, 2 ^ 24
local function forget(at, id)
  redis.call('ZREM', KEYS[at + 1], id)
  redis.call('ZREM', KEYS[at + 2], id)
  redis.call('HDEL', KEYS[at], 'p:' .. id)
end
local function go_on(at, most, rate, burst)
  local key, turns, until_, last = KEYS[at], KEYS[at + 1], KEYS[at + 2], KEYS[at + 3]
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', until_, '-inf', now)) do
    forget(at, id)
  end
  local kept = redis.call('HMGET', key, 'tokens', 'at')
  local tokens = tonumber(kept[1] or burst)
  if rate > 0 then tokens = math.min(burst, tokens + math.max(0, now - (kept[2] or now)) * rate / 1000 + 1e-6) end
  local running = redis.call('ZCOUNT', turns, '-inf', -1)
  while running < most and (rate == 0 or tokens >= 1) do
    local first = redis.call('ZRANGEBYSCORE', turns, 0, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)
    if not first[1] then break end
    redis.call('ZADD', turns, -1, first[1])
    local round = math.floor(first[2] / ROUND)
    redis.call('HSET', key, 'round', string.format('%.0f', round))
    redis.call('ZREMRANGEBYSCORE', last, '-inf', round)
    come[#come + 1] = redis.call('HGET', key, 'p:' .. first[1])
    come[#come + 1] = first[1]
    running = running + 1
    if rate > 0 then tokens = tokens - 1 end
  end
  redis.call('HSET', key, 'tokens', string.format('%.9f', tokens), 'at', string.format('%.3f', now))
  local keep = math.ceil(2 * lease + (rate > 0 and burst / rate * 1000 or 0))
  for each = at, at + 3 do redis.call('PEXPIRE', KEYS[each], keep) end
  return tokens
end
for arg = 2, #ARGV, 9 do
  local at, id, whose, process = tonumber(ARGV[arg + 1]), ARGV[arg + 2], ARGV[arg + 3], ARGV[arg + 4]
  local most, rate = tonumber(ARGV[arg + 5]), tonumber(ARGV[arg + 6])
  local burst, waiting = tonumber(ARGV[arg + 7]), tonumber(ARGV[arg + 8])
  local key, turns, until_, last = KEYS[at], KEYS[at + 1], KEYS[at + 2], KEYS[at + 3]
  if ARGV[arg] == 'end' then
    forget(at, id)
    go_on(at, most, rate, burst)
  else
    local known = redis.call('ZSCORE', turns, id)
    if not known then
      local round = tonumber(redis.call('HGET', key, 'round') or 0)
      local place = math.max(round, tonumber(redis.call('ZSCORE', last, whose) or 0)) + 1
      local number = redis.call('HINCRBY', key, 'number', 1) % ROUND
      redis.call('ZADD', turns, string.format('%.0f', place * ROUND + number), id)
      redis.call('ZADD', last, string.format('%.0f', place), whose)
    end
    redis.call('ZADD', until_, string.format('%.0f', now + lease), id)
    redis.call('HSET', key, 'p:' .. id, process)
    local tokens = go_on(at, most, rate, burst)
    local score = redis.call('ZSCORE', turns, id)
    local answer = lease / 1000
    if tonumber(score) < 0 then
      answer = 0
    elseif not known and redis.call('ZCOUNT', turns, 0, '+inf') > waiting then
      forget(at, id)
      answer = -1
    elseif rate > 0 then
      answer = math.max(0.001, (redis.call('ZCOUNT', turns, 0, score) - tokens) / rate)
    end
    after[#after + 1] = string.format('%.6f', answer)
  end
end
return {after, come}
"""
)

# KEYS: what is used, how often its owner has used something of late. ARGV: who uses it now, milliseconds, the bound.
_FIRST_USE: Final = RedisScript(
    """
local known = redis.call('GET', KEYS[1])
if known then return known == ARGV[1] and 1 or 0 end
if tonumber(redis.call('GET', KEYS[2]) or 0) >= tonumber(ARGV[3]) then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
if redis.call('INCR', KEYS[2]) == 1 then redis.call('PEXPIRE', KEYS[2], ARGV[2]) end
return 1
"""
)

# KEYS: all records of a kind. ARGV: milliseconds to keep them; then for each its name, "=" and what is known or "",
# and "=" and what it becomes or "". Each value begins with the time until which it is kept.
_CHANGE: Final = RedisScript(
    """
local time = redis.call('TIME')
local now, keep = time[1] * 1000 + math.floor(time[2] / 1000), tonumber(ARGV[1])
for arg = 2, #ARGV, 3 do
  local kept = redis.call('HGET', KEYS[1], ARGV[arg])
  local is = kept and tonumber(string.sub(kept, 1, 16)) >= now and '=' .. string.sub(kept, 17) or ''
  if is ~= ARGV[arg + 1] and is ~= ARGV[arg + 2] then return 0 end
end
for arg = 2, #ARGV, 3 do
  if ARGV[arg + 2] == '' then
    redis.call('HDEL', KEYS[1], ARGV[arg])
  else
    redis.call('HSET', KEYS[1], ARGV[arg], string.format('%016.0f', now + keep) .. string.sub(ARGV[arg + 2], 2))
  end
end
if redis.call('PTTL', KEYS[1]) < keep then redis.call('PEXPIRE', KEYS[1], keep) end
return 1
"""
)

# KEYS: all records of a kind. Returns names and values; what is over is left out, and forgotten.
_RECORDS: Final = RedisScript(
    """
local time = redis.call('TIME')
local now, found, all = time[1] * 1000 + math.floor(time[2] / 1000), {}, redis.call('HGETALL', KEYS[1])
for at = 1, #all, 2 do
  if (tonumber(string.sub(all[at + 1], 1, 16)) or 0) < now then
    redis.call('HDEL', KEYS[1], all[at])
  else
    found[#found + 1], found[#found + 2] = all[at], string.sub(all[at + 1], 17)
  end
end
return found
""",
    "allow-oom",
)


class RedisCounts(SharedRedis, SharedStore):
    """What processes use up and know together."""

    def _key(self, name: str) -> str:
        return f"{self.prefix}:{name}"

    async def turns(self, ended: Sequence[SharedTurn], asked: Sequence[SharedTurn]) -> TurnAnswer:
        keys, places, values = list[str](), dict[str, int](), list[Part]()
        for number, turn in enumerate((*ended, *asked)):
            place = places.get(turn.quota)
            if place is None:
                place = places[turn.quota] = len(keys) + 1
                name = _short(turn.quota)
                keys += [self._key(f"{part}:{{{name}}}") for part in ("quota", "turns", "until", "rounds")]
            most = 1 << 31 if turn.running is None else turn.running
            what = "end" if number < len(ended) else "ask"
            bounds = (most, repr(turn.per_second or 0), repr(turn.burst), turn.waiting)
            values += (what, place, turn.id, _short(turn.whose), self.name, *bounds)
        after, come = await self._script(_TURNS, keys, round(self.lease * 1000), *values)
        try:
            seconds = [float(each) for each in after]
            texts = [each.decode("ascii") for each in come]
        except (TypeError, ValueError, AttributeError) as error:
            raise NotOurs("Redis has a quota that was not written so") from error
        pairs = list(zip(texts[::2], texts[1::2], strict=True))
        return TurnAnswer([None if each < 0 else each for each in seconds], pairs)

    async def first_use(self, owner: str, mark: str, seconds: float) -> bool:
        name = _short(owner)
        keys = [self._key(f"mark:{{{name}}}:{_short(mark)}"), self._key(f"marks:{{{name}}}")]
        use = secrets.token_hex(8)
        return bool(await self._script(_FIRST_USE, keys, use, max(1, round(seconds * 1000)), MOST_MARKS))

    async def records(self, kind: str) -> dict[str, bytes]:
        found = await self._script(_RECORDS, [self._key(f"records:{kind}")])
        try:
            return {name.decode(): data for name, data in zip(found[::2], found[1::2], strict=True)}
        except (TypeError, AttributeError, ValueError) as error:
            raise NotOurs("Redis has a record that was not written so") from error

    async def change_records(self, kind: str, changes: Sequence[RecordChange], seconds: float) -> bool:
        values = list[Part]()
        for change in changes:
            values.append(change.name)
            values += (b"" if each is None else b"=" + each for each in (change.known, change.data))
        keep = max(1, round(seconds * 1000))
        return bool(await self._script(_CHANGE, [self._key(f"records:{kind}")], keep, *values))


def _short(name: str) -> str:
    """Return a name for a key, of any text."""
    return sha256(name.encode("utf-8", "replace")).hexdigest()[:32]
