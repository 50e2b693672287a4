"""The settings of a measurement, validated: which requests, how many at a time, for how long.

A field of `Plan` with a help text is an option of `trimcp bench`; its metadata are settings of that option. `prepare`
makes a request of its mix one in which only two numbers are filled in per call, and which checks its responses.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, Final, Literal

import attrs

from trimcp.bench.stages import Stages
from trimcp.errors import LocalError
from trimcp.framing.headers import Mirror, decode_value, param_headers, request_headers
from trimcp.wire.common import META_CLIENT_CAPABILITIES, META_CLIENT_INFO, META_PROTOCOL_VERSION, RESULT_COMPLETE
from trimcp.wire.jsonrpc import JSON, encode
from trimcp.wire.methods import METHODS
from trimcp.wire.revisions import REVISIONS, Revision, find

NUMBER: Final = "{n}"
"""The placeholder for a call's number in the texts of its parameters, and in the expected text."""

STEPS: Final = ("call", "question", "change", "task", "agent")
"""How a call is made, as `steps` carries them out: `call` is one request and its answer."""

_OPEN_LOOP: Final = 256
_MOST: Final = 100_000
_USUAL_SECONDS: Final = 10.0


@attrs.frozen
class NumberCheck:
    """A validator for numbers in a range; it accepts None."""

    # `least`, `most`: the limits
    least: float = 0
    most: float = math.inf
    above: bool = False  # `least` itself is not allowed
    whole: bool = False  # only whole numbers are allowed

    def __call__(self, instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value is None:
            return
        kind = int if self.whole else int | float
        if isinstance(value, bool) or not isinstance(value, kind) or not math.isfinite(value):
            raise LocalError(f"{attribute.name} must be a {'whole ' if self.whole else ''}number, not {value!r:.60}")
        if value < self.least or value > self.most or (self.above and value == self.least):
            range_ = f"{'more than' if self.above else 'at least'} {self.least:g}"
            if self.most != math.inf:
                range_ += f" and at most {self.most:g}"
            raise LocalError(f"{attribute.name} must be {range_}, not {value!r:.60}")


def _setting(default: object, check: Any = None, help: str | None = None, metavar: str | None = "N") -> Any:
    return attrs.field(default=default, validator=check, kw_only=True, metadata={"help": help, "metavar": metavar})


def _choice(*choices: str, help: str) -> Any:
    """Return a field that has one of these values; the first is the default."""

    def check(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
        if value not in choices:
            raise LocalError(f"{attribute.name} is one of {', '.join(choices)}, not {value!r:.60}")

    return attrs.field(default=choices[0], validator=check, kw_only=True, metadata={"help": help, "choices": choices})


_COUNT: Final = NumberCheck(1, whole=True)
_AMOUNT: Final = NumberCheck(1, _MOST, whole=True)
_POSITIVE: Final = NumberCheck(above=True)
_SHARE: Final = NumberCheck(0, 1)


def _text(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if value is not None and not isinstance(value, str):
        raise LocalError(f"{attribute.name} must be a text, not {value!r:.60}")


def _stages(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    _text(instance, attribute, value)
    if value is not None:
        Stages.read(value)  # raises LocalError


def _jsonable(instance: object, attribute: attrs.Attribute[Any], value: Any) -> None:
    if not isinstance(value, Mapping):
        raise LocalError(f"{attribute.name} must be an object, not {value!r:.60}")
    encode(dict(value))  # raises LocalError


@attrs.frozen
class MixEntry:
    """One kind of request in the mix of a load."""

    method: str = attrs.field(validator=_text)  # the method of the request
    # its parameters; `{n}` in any of their texts becomes the call's number, which begins with 1
    params: Mapping[str, Any] = attrs.field(factory=dict, validator=_jsonable)
    weight: float = _setting(1.0, _POSITIVE)  # how often it is sent, relative to the others of the mix
    # the expected first text block of the result, with `{n}` replaced; None for any result except an error
    expect: str | None = attrs.field(default=None, validator=_text, kw_only=True)
    step: Literal["call", "question", "change", "task", "agent"] = _choice(*STEPS, help="")
    resource: str | None = attrs.field(default=None, validator=_text, kw_only=True)  # what a `change` changes

    def __attrs_post_init__(self) -> None:
        if not self.method:
            raise LocalError("method must name a method")
        if self.method in ("initialize", "server/discover") or self.method.startswith("notifications/"):
            raise LocalError(f"{self.method} is no request that can be repeated on one session")
        if self.method == "tools/call" and not isinstance(self.params.get("name"), str):
            raise LocalError("tools/call needs the name of a tool in its params")
        if self.step != "call" and self.method != "tools/call":
            raise LocalError(f"a {self.step} begins with a call of a tool, not with {self.method}")
        if (self.step == "change") is (self.resource is None):
            raise LocalError("a change goes with a resource: the URI of what the tool changes")

    @staticmethod
    def tool(name: str, arguments: Mapping[str, Any] | None = None, **options: Any) -> MixEntry:
        """Return a call of a tool; `options` are other fields."""
        return MixEntry("tools/call", {"name": name, "arguments": dict(arguments or {})}, **options)

    @staticmethod
    def from_json(value: object) -> MixEntry:
        """Return the request that one entry of a script file describes.

        `value`: `{"tool": ..., "arguments": ..., "weight": ..., "expect": ..., "step": ..., "resource": ...}` or
        `{"method": ..., "params": ..., "weight": ..., "expect": ...}`. Raises LocalError: the entry is not valid; the
        text has the reason.
        """
        if not isinstance(value, Mapping):
            raise LocalError(f"an entry of the mix must be an object, not {value!r:.60}")
        entry = dict(value)
        options = {name: entry.pop(name) for name in ("weight", "expect", "step", "resource") if name in entry}
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
        """Its display name: the tool's name, or the method."""
        return str(self.params["name"]) if self.method == "tools/call" else self.method


def _as_mix(value: MixEntry | Iterable[MixEntry]) -> tuple[MixEntry, ...]:
    return (value,) if isinstance(value, MixEntry) else tuple(value)


@attrs.frozen
class Plan:
    """One measurement. Each session is a connection of its own (Streamable HTTP: one for each concurrent call).

    It has more than 20 fields because each is an option of one measurement.
    """

    # the requests, chosen at random by weight; a single one is repeated
    mix: tuple[MixEntry, ...] = attrs.field(default=(), converter=_as_mix)
    sessions: int = _setting(1, _AMOUNT, "Connections.")
    under_way: int | None = _setting(None, _AMOUNT, "Calls under way in each.  [default: 1]")
    """The most concurrent calls in each session; None for 1, and with `rate` for 256 in all sessions together."""
    rate: float | None = _setting(None, _POSITIVE, "Begin so many calls a second, answered or not (open loop).")
    """Calls per second, in all sessions together. A call's time counts from when it should have begun."""
    spacing: Literal["constant", "poisson"] = _choice("constant", "poisson", help="How --rate spaces them.")
    """At equal intervals, or at random ones (a Poisson process), as from many independent users."""
    stages: str | None = _setting(
        None, _stages, "A load that changes: 0:10,30s:200,2m:200,10s:0 (time to get there : level).", "LIST"
    )
    """How the load changes, as `Stages.read` reads it; it says how long the measurement takes."""
    stages_of: Literal["calls", "sessions"] = _choice(
        "calls", "sessions", help="What the levels of --stages are: calls that begin a second, or sessions."
    )
    session_calls: int | None = _setting(None, _COUNT, "End a session after so many calls, and open another (churn).")
    backlog: int = _setting(10_000, _COUNT)
    """The most calls of the open loop that wait for a free place; further ones are not begun and count as errors."""
    think: float = _setting(0.0, NumberCheck(), "Time between an answer and the next.", "SECONDS")
    seconds: float | None = _setting(None, _POSITIVE, "Measure for so long.  [default: 10; each round: 3]", "SECONDS")
    count: int | None = _setting(None, _COUNT, "Measure so many calls instead.")
    warm_up: float = _setting(0.0, NumberCheck())
    """Seconds before the measurement in which the same calls are sent but not counted."""
    warm_up_count: int = _setting(0, NumberCheck(whole=True))
    """Calls before the measurement that are not counted."""
    cancel: float = _setting(0.0, _SHARE, "Cancel this share, 0.1 for a tenth.", "SHARE")
    cancel_after: float | None = _setting(None, NumberCheck(), "Time until then.  [default: random]", "SECONDS")
    """Seconds from the beginning of a call to its cancellation; None for a random part of the mean time of a call."""
    cut: float = _setting(0.0, _SHARE, "Cut the connection of this share midway, and resume (HTTP).", "SHARE")
    timeout: float | None = _setting(None, _POSITIVE, "Give a call up after this time.", "SECONDS")
    timeouts: float = _setting(1.0, _SHARE, "The share that --timeout is for.", "SHARE")
    progress: bool = _setting(False, None, "Ask for progress, and count the notifications.", None)
    answer: Mapping[str, Any] = attrs.field(factory=dict, validator=_jsonable, kw_only=True)
    """The values that questions with a form are answered with; a form's defaults come before."""
    sampled: str = _setting("sampled", _text, "What is answered for the model (--step question).", "TEXT")
    seed: int = _setting(0, None, "What everything random begins with.")
    revision: str | None = attrs.field(default=None, kw_only=True)
    """The revision to use, by its date; None to negotiate it."""
    transport: Literal["auto", "http", "sse"] = _choice(
        "auto", "http", "sse", help="Streamable HTTP, or the older HTTP+SSE."
    )
    """The transport for an http URL; "auto" to detect it."""
    reply: Literal["any", "json", "sse"] = _choice(
        "any", "json", "sse", help="How a server has to answer a POST; anything else is an error."
    )
    replica_by: str | None = _setting(
        None, _text, "Count by replica, as a response header (X-Served-By), serverInfo or _meta:KEY says.", "NAME"
    )
    """What says which replica behind a balancer answered; see `replicas`."""
    first_number: int = attrs.field(default=0, kw_only=True)
    """What `{n}` counts from: generators that share a plan do not use the same numbers."""
    pids: tuple[int, ...] = attrs.field(default=(), kw_only=True)
    """Processes whose CPU time and memory count as the server's, with their descendants and any child process."""
    reopen: int = _setting(3, NumberCheck(whole=True))
    """How often a broken session is opened again."""
    opening: float = _setting(30.0, _POSITIVE)
    """Seconds for opening a session."""
    patience: float = _setting(10.0, _POSITIVE)
    """Seconds to wait at the end for running calls; also the silence after which a measurement by calls ends."""

    def __attrs_post_init__(self) -> None:
        steps = self.steps
        if "question" in steps and self.under_way not in (None, 1):
            raise LocalError("a question does not say which call it is of: ask for more --sessions, not --under-way")
        if "agent" in steps and len(steps) > 1:
            raise LocalError("agent tools are another protocol: all calls of a mix have the step agent, or none")
        if self.answer and "question" not in steps and steps:
            raise LocalError("--answer goes with --step question")
        if steps - {"call"} and self.needs_raw_messages:
            raise LocalError("--progress, --cut, --reply and --replica-by go with --step call")
        if self.seconds is not None and self.count is not None:
            raise LocalError("measure either for --seconds or a --count of calls")
        if self.warm_up and self.warm_up_count:
            raise LocalError("say either for how many seconds to warm up or with how many calls")
        if self.paced and self.think:
            raise LocalError("calls that begin at a fixed rate leave no time to think")
        if not self.paced and self.spacing != "constant":
            raise LocalError("--spacing goes with --rate")
        if self.stages is not None and (self.rate, self.seconds, self.count) != (None, None, None):
            raise LocalError("--stages says how much and for how long; leave out --rate, --seconds and --count")
        if self.stages is not None and (self.warm_up or self.warm_up_count):
            raise LocalError("--stages is measured from its first stage on: make that the warm-up")
        if self.stages is None and self.stages_of != "calls":
            raise LocalError("--stages-of says what the levels of --stages are")
        if self.cancel_after is not None and not self.cancel:
            raise LocalError("--cancel-after goes with --cancel, the share of calls to cancel")
        if self.timeout is None and self.timeouts < 1:
            raise LocalError("--timeouts is the share of calls that have a timeout: say with --timeout which")
        if self.revision is not None and find(self.revision) is None:
            names = ", ".join(revision.name for revision in REVISIONS)
            raise LocalError(f"there is no revision {self.revision!r:.60}; trimcp speaks {names}")

    @property
    def steps(self) -> set[str]:
        """How its calls are made."""
        return {entry.step for entry in self.mix}

    @property
    def needs_raw_messages(self) -> bool:
        """Whether it asks for what an ordinary client does not show."""
        return self.progress or self.cut > 0 or self.reply != "any" or self.replica_by is not None

    @property
    def course(self) -> Stages | None:
        """The stages; None for a load that does not change."""
        return None if self.stages is None else Stages.read(self.stages)

    @property
    def paced(self) -> bool:
        """Whether calls begin at times fixed beforehand (an open loop)."""
        return self.rate is not None or (self.stages is not None and self.stages_of == "calls")

    @property
    def mean_rate(self) -> float | None:
        """Calls per second that an open loop begins on the average; None for a closed loop."""
        if self.rate is not None or self.course is None or not self.paced:
            return self.rate
        return self.course.total(self.course.seconds) / self.course.seconds

    @property
    def duration(self) -> float | None:
        """Seconds to measure, or None if the number of calls is given."""
        if self.course is not None:
            return self.course.seconds
        if self.count is not None:
            return None
        return _USUAL_SECONDS if self.seconds is None else self.seconds

    @property
    def places(self) -> int:
        """The most concurrent calls in each session."""
        if self.under_way is not None:
            return self.under_way
        return 1 if not self.paced or "question" in self.steps else max(1, math.ceil(_OPEN_LOOP / self.sessions))

    def to_json(self) -> dict[str, Any]:
        """Return the settings as JSON values, under the names of the attributes."""
        plan = attrs.asdict(self)
        lists = {"mix": list(plan["mix"]), "pids": list(self.pids)}
        seconds = None if self.stages is not None else self.duration
        return {**plan, **lists, "under_way": self.places, "seconds": seconds}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Plan:
        """Return the plan that `to_json` was called on. Raises LocalError: it is not valid."""
        known = {field.name for field in attrs.fields(Plan)}
        fields = {name: each for name, each in value.items() if name in known}
        mix = tuple(MixEntry(**entry) for entry in fields.pop("mix"))
        return Plan(**{**fields, "mix": mix, "pids": tuple(fields.pop("pids", ()))})


CLIENT: Final = {"name": "trimcp-bench", "version": "1"}
"""The `clientInfo` of the load."""

_MEMBER: Final = {
    "tools/call": "content",
    "tools/list": "tools",
    "prompts/list": "prompts",
    "prompts/get": "messages",
    "resources/list": "resources",
    "resources/templates/list": "resourceTemplates",
    "resources/read": "contents",
    "completion/complete": "completion",
}
"""The required member of a result, by method."""

WrongAnswer = tuple[str, Any]
"""An error in a response: its kind, and an example text."""


@attrs.define(eq=False)
class PreparedRequest:
    """One request of the mix."""

    entry: MixEntry  # the entry of the mix
    _body: bytes = attrs.field(alias="body")
    _is_plain: bool = attrs.field(alias="is_plain")
    headers: bytes  # the lines of its additional HTTP headers, or b""
    _headers_vary: bool = attrs.field(alias="headers_vary")
    _expect_varies: bool = attrs.field(alias="expect_varies")
    _member: str | None = attrs.field(alias="member")
    label: str = attrs.field(init=False)  # the name its times are counted under

    def __attrs_post_init__(self) -> None:
        self.label = self.entry.label

    def render(self, id: int, number: int) -> bytes:
        """Return the request's text with its id and the call's number filled in."""
        if self._is_plain:
            return self._body % id
        return self._body % {b"i": id, b"n": number}

    def render_headers(self, number: int) -> bytes:
        """Return the header lines with the call's number filled in."""
        return self.headers % {b"n": number} if self._headers_vary else self.headers

    def check(self, message: Mapping[str, Any], number: int) -> WrongAnswer | None:
        """Return the error in the response to the call of this number, or None if it is right."""
        result = message.get("result")
        if type(result) is not dict or "error" in message or message.get("jsonrpc") != "2.0":
            return _refusal(message)
        if result.get("isError", False) is not False:
            return "tool error", _first_text(self._member, result) or result
        if result.get("resultType", RESULT_COMPLETE) != RESULT_COMPLETE:
            return "no result but a question", result
        expected = self.entry.expect
        if expected is None:
            if self._member is not None and self._member not in result:
                return f"no {self._member} in the result", result
            return None
        text = _first_text(self._member, result)
        if text is None:
            return "no text", result
        if self._expect_varies:
            expected = expected.replace(NUMBER, str(number))
        return None if text == expected else ("wrong text", text)


def _refusal(message: Mapping[str, Any]) -> WrongAnswer:
    error = message.get("error")
    if isinstance(error, dict) and type(error.get("code")) is int and "result" not in message:
        return f"error {error['code']}", error.get("message")
    return "no JSON-RPC", dict(message)


def _first_text(member: str | None, result: Mapping[str, Any]) -> str | None:
    """Return the first text of a result; its place depends on the method."""
    try:
        first = result[member or ""][0]
        text = first["content"]["text"] if member == "messages" else first["text"]
    except (LookupError, TypeError):
        return None
    return text if isinstance(text, str) else None


def prepare(
    entry: MixEntry, revision: Revision, *, progress: bool, http: bool, mirrors: tuple[Mirror, ...] = ()
) -> PreparedRequest:
    """Return a request ready to be sent many times.

    `mirrors`: the arguments that the tool's schema mirrors in headers. Raises LocalError: it cannot be sent over this
    transport.
    """
    params = dict(entry.params)
    meta: dict[str, JSON] = dict(params.pop("_meta", None) or {})
    if revision.modern:
        meta |= {META_PROTOCOL_VERSION: revision.name, META_CLIENT_INFO: CLIENT, META_CLIENT_CAPABILITIES: {}}
    text = b'{"jsonrpc":"2.0","id":%%(i)d,"method":%b' % _format(encode(entry.method))
    if params or meta or progress:
        members = _format(encode(params))[1:-1]
        if meta or progress:
            known = _format(encode(meta))[1:-1]
            token = b'"progressToken":%(i)d' if progress else b""
            members += b',"_meta":{%b}' % b",".join(filter(None, (known, token)))
        text += b',"params":{%b}' % members.removeprefix(b",")
    text += b"}"
    is_plain = text.count(b"%(") == 1
    lines = _header_lines(entry, revision, mirrors) if http else b""
    return PreparedRequest(
        entry=entry,
        body=text.replace(b"%(i)d", b"%d") if is_plain else text,
        is_plain=is_plain,
        headers=lines if b"%(n)d" in lines else lines.replace(b"%%", b"%"),
        headers_vary=b"%(n)d" in lines,
        expect_varies=entry.expect is not None and NUMBER in entry.expect,
        member=_MEMBER.get(entry.method),
    )


def _format(text: bytes) -> bytes:
    """Turn JSON into a format for the operator %, with the call's number for `{n}`, which occurs in strings only."""
    return text.replace(b"%", b"%%").replace(NUMBER.encode(), b"%(n)d")


def _header_lines(entry: MixEntry, revision: Revision, mirrors: tuple[Mirror, ...]) -> bytes:
    if not revision.method_headers:
        return b""
    method = METHODS.get(entry.method)
    named = None if method is None or method.mirrored is None else entry.params.get(method.mirrored)
    headers = request_headers(revision.name, entry.method, named if isinstance(named, str) else None)
    headers |= param_headers(mirrors, entry.params.get("arguments") or {})
    for name, value in headers.items():
        if NUMBER in decode_value(value) and NUMBER not in value:
            raise LocalError(f"{NUMBER} cannot stand in {name}, which travels in base64")
    return _format("".join(f"{name}: {value}\r\n" for name, value in headers.items()).encode())


def cancellation(id: int) -> bytes:
    """Return the notification that cancels a call."""
    return b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":%d}}' % id
