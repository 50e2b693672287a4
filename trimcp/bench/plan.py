"""What a measurement does: which requests, how many at a time, for how long. Values that check themselves."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, Literal, TypeAlias

import attrs

from trimcp.errors import LocalError
from trimcp.wire.jsonrpc import encode
from trimcp.wire.revisions import REVISIONS, find

__all__ = ["NUMBER", "MixEntry", "Plan", "Reply", "Spacing", "Transport"]

NUMBER: Final = "{n}"
"""What stands for the number of a call in the texts of its parameters, and in the text that is expected."""

Transport: TypeAlias = Literal["auto", "http", "sse"]
"""Of a server at an http URL: Streamable HTTP, the HTTP+SSE of 2024-11-05, or whichever it turns out to speak."""

Reply: TypeAlias = Literal["any", "json", "sse"]
"""How a server over Streamable HTTP has to answer a request: with JSON, with a stream of events, or as it likes."""

Spacing: TypeAlias = Literal["constant", "poisson"]
"""Whether calls at a fixed rate begin at equal distances, or at random ones as those of many people do."""

_OPEN_LOOP: Final = 256
_MOST_SESSIONS: Final = 100_000
_MOST_UNDER_WAY: Final = 100_000

_Check: TypeAlias = Callable[[Any, "attrs.Attribute[Any]", Any], None]


def _number(*, least: float = 0.0, most: float = math.inf, above: bool = False, whole: bool = False) -> _Check:
    """Return a validator for numbers in a range; it lets None pass."""

    def check(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None:
            return
        kind = int if whole else int | float
        if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
            raise LocalError(f"{attribute.name} must be a {'whole ' if whole else ''}number, not {value!r:.60}")
        if value < least or value > most or (above and value == least):
            range_ = f"{'more than' if above else 'at least'} {least:g}"
            if most != math.inf:
                range_ += f" and at most {most:g}"
            raise LocalError(f"{attribute.name} must be {range_}, not {value!r:.60}")

    return check


def _one_of(*choices: str) -> _Check:
    def check(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value not in choices:
            raise LocalError(f"{attribute.name} is one of {', '.join(choices)}, not {value!r:.60}")

    return check


def _text(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and not isinstance(value, str):
        raise LocalError(f"{attribute.name} must be a text, not {value!r:.60}")


def _jsonable(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, Mapping):
        raise LocalError(f"{attribute.name} must be an object, not {value!r:.60}")
    encode(dict(value))  # raises LocalError


@attrs.frozen
class MixEntry:
    """One kind of request in the mix of a load.

    Attributes:
        method: what is called.
        params: its parameters; `{n}` in any text of them becomes the call's number, which begins with 1.
        weight: how often it is sent, in proportion to the others of the mix.
        expect: what the first text block of the result has to be, `{n}` replaced; None for any result that is no
            error.
    """

    method: str = attrs.field(validator=_text)
    params: Mapping[str, Any] = attrs.field(factory=dict, validator=_jsonable)
    weight: float = attrs.field(default=1.0, validator=_number(above=True), kw_only=True)
    expect: str | None = attrs.field(default=None, validator=_text, kw_only=True)

    def __attrs_post_init__(self) -> None:
        if not self.method:
            raise LocalError("method must name a method")
        if self.method in ("initialize", "server/discover") or self.method.startswith("notifications/"):
            raise LocalError(f"{self.method} is no request that can be repeated on one session")
        if self.method == "tools/call" and not isinstance(self.params.get("name"), str):
            raise LocalError("tools/call needs the name of a tool in its params")

    @staticmethod
    def tool(
        name: str, arguments: Mapping[str, Any] | None = None, *, weight: float = 1.0, expect: str | None = None
    ) -> MixEntry:
        """Return a call of a tool."""
        return MixEntry("tools/call", {"name": name, "arguments": dict(arguments or {})}, weight=weight, expect=expect)

    @staticmethod
    def from_json(value: object) -> MixEntry:
        """Return the request that one entry of a script file describes.

        Args:
            value: `{"tool": ..., "arguments": ..., "weight": ..., "expect": ...}` or `{"method": ..., "params": ...,
                "weight": ..., "expect": ...}`.

        Raises:
            LocalError: it describes none; the text says why.
        """
        if not isinstance(value, Mapping):
            raise LocalError(f"an entry of the mix must be an object, not {value!r:.60}")
        entry = dict(value)
        options = {name: entry.pop(name) for name in ("weight", "expect") if name in entry}
        if "tool" in entry:
            name, arguments = entry.pop("tool"), entry.pop("arguments", {})
            if not isinstance(name, str) or not isinstance(arguments, Mapping):
                raise LocalError("an entry's tool must be a text and its arguments an object")
            request = MixEntry.tool(name, arguments, **options)
        elif "method" in entry:
            request = MixEntry(entry.pop("method"), entry.pop("params", {}), **options)
        else:
            raise LocalError("an entry of the mix names a tool or a method")
        if entry:
            raise LocalError(f"an entry of the mix cannot have {', '.join(map(repr, entry))}")
        return request

    @property
    def label(self) -> str:
        """What to call it: the tool's name, or the method."""
        return str(self.params["name"]) if self.method == "tools/call" else self.method


def _as_mix(value: MixEntry | Iterable[MixEntry]) -> tuple[MixEntry, ...]:
    return (value,) if isinstance(value, MixEntry) else tuple(value)


@attrs.frozen
class Plan:
    """One measurement. Each session is a connection of its own (Streamable HTTP: as many as calls are under way).

    Attributes:
        mix: the requests, chosen at random by weight; one alone is sent over and over.
        sessions: how many at the same time.
        under_way: calls under way in each session at most; None for 1, and with `rate` for 256 in all sessions.
        rate: calls that begin per second in all sessions together, whether or not earlier ones are answered (open
            loop). A call's time counts from when it should have begun. None: the next begins when one is answered.
        spacing: how those calls are spaced.
        backlog: calls of the open loop that wait for a free place at most; what comes then is not begun at all and
            counted as an error.
        seconds: how long to measure; with neither this nor `count` 10.
        count: measure so many calls.
        warm_up: seconds before the measurement, in which the same calls are sent and not counted.
        warm_up_count: calls before the measurement, likewise.
        think: seconds between an answer and the next call in its place.
        cancel: share of the calls that are given up midway, from 0 to 1.
        cancel_after: seconds after which they are; None for a random part of the mean time of a call so far.
        timeout: seconds after which a call is given up.
        timeouts: share of the calls that have this timeout.
        progress: ask for progress, and count the notifications.
        seed: of everything that is random.
        revision: the one to speak, by its date; None for what client and server agree on.
        transport: which of the two over HTTP.
        reply: how a server over Streamable HTTP has to answer; something else is an error.
        pids: processes whose CPU time and memory are measured, with their descendants, as the server's. A child
            process that is the server needs no naming.
        reopen: how often a session that breaks is opened again.
        opening: seconds a session may take to open.
        patience: seconds to wait in the end for calls still under way, and of silence after which a run that counts
            calls is given up.
    """

    mix: tuple[MixEntry, ...] = attrs.field(converter=_as_mix)
    sessions: int = attrs.field(default=1, validator=_number(least=1, most=_MOST_SESSIONS, whole=True), kw_only=True)
    under_way: int | None = attrs.field(
        default=None, validator=_number(least=1, most=_MOST_UNDER_WAY, whole=True), kw_only=True
    )
    rate: float | None = attrs.field(default=None, validator=_number(above=True), kw_only=True)
    spacing: Spacing = attrs.field(default="constant", validator=_one_of("constant", "poisson"), kw_only=True)
    backlog: int = attrs.field(default=10_000, validator=_number(least=1, whole=True), kw_only=True)
    seconds: float | None = attrs.field(default=None, validator=_number(above=True), kw_only=True)
    count: int | None = attrs.field(default=None, validator=_number(least=1, whole=True), kw_only=True)
    warm_up: float = attrs.field(default=0.0, validator=_number(), kw_only=True)
    warm_up_count: int = attrs.field(default=0, validator=_number(whole=True), kw_only=True)
    think: float = attrs.field(default=0.0, validator=_number(), kw_only=True)
    cancel: float = attrs.field(default=0.0, validator=_number(most=1.0), kw_only=True)
    cancel_after: float | None = attrs.field(default=None, validator=_number(), kw_only=True)
    timeout: float | None = attrs.field(default=None, validator=_number(above=True), kw_only=True)
    timeouts: float = attrs.field(default=1.0, validator=_number(most=1.0), kw_only=True)
    progress: bool = attrs.field(default=False, kw_only=True)
    seed: int = attrs.field(default=0, kw_only=True)
    revision: str | None = attrs.field(default=None, kw_only=True)
    transport: Transport = attrs.field(default="auto", validator=_one_of("auto", "http", "sse"), kw_only=True)
    reply: Reply = attrs.field(default="any", validator=_one_of("any", "json", "sse"), kw_only=True)
    pids: tuple[int, ...] = attrs.field(default=(), converter=tuple, kw_only=True)
    reopen: int = attrs.field(default=3, validator=_number(whole=True), kw_only=True)
    opening: float = attrs.field(default=30.0, validator=_number(above=True), kw_only=True)
    patience: float = attrs.field(default=10.0, validator=_number(above=True), kw_only=True)

    def __attrs_post_init__(self) -> None:
        if not self.mix:
            raise LocalError("there is nothing to send: name a tool or a method")
        if self.seconds is not None and self.count is not None:
            raise LocalError("say either for how many seconds to measure or how many calls")
        if self.warm_up and self.warm_up_count:
            raise LocalError("say either for how many seconds to warm up or with how many calls")
        if self.rate is not None and self.think:
            raise LocalError("calls that begin at a fixed rate leave no time to think")
        if self.revision is not None and find(self.revision) is None:
            names = ", ".join(revision.name for revision in REVISIONS)
            raise LocalError(f"there is no revision {self.revision!r:.60}; trimcp speaks {names}")

    @property
    def duration(self) -> float | None:
        """Seconds to measure, or None if calls are counted."""
        if self.count is not None:
            return None
        return 10.0 if self.seconds is None else self.seconds

    @property
    def places(self) -> int:
        """Calls under way in each session at most."""
        if self.under_way is not None:
            return self.under_way
        return 1 if self.rate is None else max(1, math.ceil(_OPEN_LOOP / self.sessions))

    def to_json(self) -> dict[str, Any]:
        """Return the options as JSON values, under the names they have here."""
        plan: dict[str, Any] = attrs.asdict(self, recurse=False)
        plan["mix"] = [
            {"method": each.method, "params": dict(each.params), "weight": each.weight, "expect": each.expect}
            for each in self.mix
        ]
        plan["pids"] = list(self.pids)
        plan["under_way"] = self.places
        plan["seconds"] = self.duration
        return plan
