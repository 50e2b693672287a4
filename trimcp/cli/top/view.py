"""What `trimcp top` shows, as lines of a given size: a pure function of pictures and of what the user has chosen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from textwrap import wrap
from typing import Any, Final, TypeAlias

import attrs
from rich.text import Text

from trimcp.cli.text import count_of, number_text, theirs

Json: TypeAlias = Mapping[str, Any]

KEYS: Final = "q quit  ↑↓ select  enter open  c cancel  x close  d drain  s sort  / filter"
SORTS: Final = ("age", "progress", "tool", "who")
_BAR: Final = 12
_STEP: Final = "  "
_WIDE: Final = 100  # columns from which on there is room for the bar
_TITLES: Final = ("AGE", "LEFT", "PROGRESS", "TOOL", "WHO", "WHERE")
_YEAR: Final = 365 * 86_400  # seconds
_STATES: Final = {"running": "", "waiting": "waiting", "asking": "asks the client", "cancelled": "being cancelled"}


@attrs.frozen
class RequestRow:
    """One request, with the session and the picture it is in."""

    picture: Json
    session: Json
    request: Json

    @property
    def key(self) -> tuple[str, str]:
        """Names it among all pictures."""
        return self.picture["source"], self.request["key"]

    @property
    def tool(self) -> str:
        """What is called, or the method."""
        return theirs(self.request["target"] or self.request["method"], 60)

    @property
    def who(self) -> str:
        """Whose request it is, as far as is known."""
        return theirs(self.session["principal"] or self.session["peer"] or self.session["owner"] or "a client", 60)


@attrs.define(eq=False)
class Shown:
    """What the user has chosen."""

    selected: tuple[str, str] | None = None
    opened: bool = False
    sort: str = SORTS[0]
    filter: str = ""
    asked: str | None = None
    """A question below the list, which the user answers with `typed`."""
    typed: str = ""
    said: str = ""
    """What came of the last thing that was done."""


def rows_of(pictures: Sequence[Json], choice: Shown) -> list[RequestRow]:
    """Return the requests of all pictures as they are shown: sorted, and those alone that the filter finds."""
    rows = [
        RequestRow(one, session, request)
        for one in pictures
        for session in one["sessions"]
        for request in session["requests"]
    ]
    wanted = choice.filter.casefold()
    rows = [row for row in rows if wanted in f"{row.tool} {row.who} {row.picture['server']}".casefold()]
    order = {
        "age": lambda row: -row.request["seconds"],
        "progress": lambda row: -(_share(row.request) or 0.0),
        "tool": lambda row: row.tool,
        "who": lambda row: row.who,
    }[choice.sort]
    return sorted(rows, key=order)


def view(pictures: Sequence[Json], size: tuple[int, int], choice: Shown) -> list[Text]:
    """Return what is shown on a terminal of so many columns and lines: exactly so many, none longer."""
    columns, lines = size
    rows = rows_of(pictures, choice)
    top = [_totals(pictures), *map(_server, pictures[: max(1, lines // 4)]), Text("")]
    foot = _foot(choice)
    room = max(1, lines - len(top) - len(foot))
    body = list(_opened(rows, columns, choice)) if choice.opened else list(_table(rows, room, columns, choice))
    if not choice.opened or choice.selected not in [row.key for row in rows]:
        body += list(_beside(pictures, room - len(body)))
        body += list(_ended(pictures, room - len(body)))
    shown = [*top, *body[:room]]
    shown += [Text("")] * (lines - len(shown) - len(foot)) + foot
    for line in shown:
        line.truncate(columns, overflow="ellipsis")
        line.no_wrap = True
    return shown[:lines]


def whole_view(pictures: Sequence[Json], columns: int) -> list[Text]:
    """Return all that there is to show, as lines of at most so many columns, without what is for keys."""
    calls = sum(len(session["requests"]) for one in pictures for session in one["sessions"])
    others = sum(len(one["beside"]) + len(one["ended"]) for one in pictures)
    shown = view(pictures, (columns, 12 + 4 * len(pictures) + calls + 2 * others), Shown())[: -len(_foot(Shown()))]
    while not shown[-1]:
        shown.pop()
    for line in shown:
        line.rstrip()
    return shown


def _totals(pictures: Sequence[Json]) -> Text:
    names = ("sessions", "running", "waiting", "refused")
    sums = {name: sum(one["statistics"][name] for one in pictures) for name in names}
    held = sum(one["statistics"]["memory"]["held"] for one in pictures)
    told = f"{count_of(len(pictures), 'server')}: {count_of(sums.pop('sessions'), 'session')}"
    told += "".join(f", {count:,} {name}" for name, count in sums.items())
    return Text(f"{told}, {_bytes(held)} held for clients", style="bold")


def _server(picture: Json) -> Text:
    stats = picture["statistics"]
    lanes = stats["lanes"].values()
    told = f"  {theirs(picture['server'], 30)} {theirs(picture['version'], 12)} · process {picture['pid']}"
    told += f" · {count_of(stats['sessions'], 'session')}, {stats['running']:,} running, {stats['waiting']:,} waiting"
    told += f", {picture['more_requests']:,} not shown" if picture["more_requests"] else ""
    told += f", {sum(one['dropped'] for one in lanes):,} dropped, {sum(one['merged'] for one in lanes):,} merged"
    if stats["processes"] is not None:
        told += f" · {stats['processes']['busy']} of {stats['processes']['alive']} worker processes busy"
    told += "".join(f", {name.replace('_', ' ')} {count:,}" for name, count in stats["hosts"].items())
    return Text(told, style="dim")


def _table(rows: Sequence[RequestRow], room: int, columns: int, choice: Shown) -> Iterator[Text]:
    keys = [row.key for row in rows]
    chosen = keys.index(choice.selected) if choice.selected in keys else -1
    first = max(0, min(chosen - (room - 2) // 2, len(rows) - (room - 1)))
    lines = [_cells(row, _BAR if columns >= _WIDE else 0) for row in rows[first : first + room - 1]]
    # None is wider than what is in it, so that there is room for where a call waits; without a deadline LEFT is empty.
    widths = [max(len(cell) for cell in column) for column in zip(_TITLES, *lines, strict=True)]
    widths[1] *= any(line[1] for line in lines)
    for number, line in enumerate((_TITLES, *lines)):
        cells = [
            f"{cell:{'>' if at < 2 else '<'}{width}}"
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
            if width
        ]
        style = "reverse" if number and keys[first + number - 1] == choice.selected else ""
        yield Text("  " + " ".join(cells), style=style if number else "bold cyan")
    if not rows:
        yield Text("  nothing runs" if not choice.filter else "  nothing that runs has this", style="dim")


def _cells(row: RequestRow, bar: int) -> tuple[str, ...]:
    request = row.request
    left = "" if request["left"] is None else _seconds(request["left"])
    where = _STATES[request["state"]] or (theirs(request["waits"][-1].strip(), 200) if request["waits"] else "")
    return _seconds(request["seconds"]), left, _progress(request, bar), row.tool[:20], row.who[:18], where


def _opened(rows: Sequence[RequestRow], columns: int, choice: Shown) -> Iterator[Text]:
    row = next((row for row in rows if row.key == choice.selected), None)
    if row is None:
        yield Text("  it has ended", style="dim")
        return
    request, session = row.request, row.session
    yield Text(f"  {row.tool} ({theirs(request['method'])}), request {theirs(request['id'], 60)}", style="bold")
    peer = theirs(session["peer"] or "no name")
    who = row.who if peer == row.who else f"{row.who} · {peer}"
    yield Text(f"  for {who} · revision {session['revision']}{_came(session)}")
    yield Text(f"  {request['state']} for {_seconds(request['seconds'])}{_until(request)}")
    if request["progress"] is not None:
        yield Text(f"  progress {_progress(request)} {theirs(request['message'] or '', 80)}".rstrip())
    if request["reason"] is not None:
        yield Text(f"  {theirs(request['reason'])}", style="yellow")
    held = f"{_bytes(session['held'])} held, {_bytes(session['unread'])} unread"
    yield Text(f"  its session: {session['running']} running, {session['waiting']} waiting, {held}", style="dim")
    yield Text("  waits at" if request["waits"] else "  where it waits is not known", style="bold cyan")
    for line in request["waits"]:
        for part in wrap(theirs(line.rstrip(), 400), max(20, columns - 4), subsequent_indent=_STEP):
            yield Text(f"    {part}")


def _beside(pictures: Sequence[Json], room: int) -> Iterator[Text]:
    told = [one for picture in pictures for one in picture["beside"]]
    if not told or room < 6:
        return
    yield Text("")
    yield Text(f"  {'SINCE':>7} BESIDE", style="bold cyan")
    for one in told[: room // 2 - 2]:
        since = "" if one["seconds"] is None else _seconds(one["seconds"])
        yield Text(f"  {since:>7} {one['kind']} {theirs(one['name'], 40)}: {theirs(one['state'], 200)}")


def _ended(pictures: Sequence[Json], room: int) -> Iterator[Text]:
    ended = sorted((one for picture in pictures for one in picture["ended"]), key=lambda one: -one["at"])
    if not ended or room < 3:
        return
    yield Text("")
    yield Text(f"  {'TOOK':>7} ENDED", style="bold cyan")
    for one in ended[: room - 2]:
        reason = "" if one["reason"] is None else f": {theirs(one['reason'], 100)}"
        text = f"  {_seconds(one['seconds']):>7} {theirs(one['target'] or one['method'], 30)} {one['outcome']}{reason}"
        yield Text(text, style="" if one["outcome"] == "ok" else "yellow")


def _foot(choice: Shown) -> list[Text]:
    if choice.asked is not None:
        return [Text(f"{choice.asked} {theirs(choice.typed, 200)}▏", style="bold")]
    said = theirs(choice.said, 200) or f"sorted by {choice.sort}" + (
        f", with {theirs(choice.filter, 40)}" * bool(choice.filter)
    )
    return [Text(said, style="dim"), Text(KEYS, style="dim")]


def _share(request: Json) -> float | None:
    done, total = request["progress"], request["total"]
    return None if done is None or not total or total < 0 else min(1.0, max(0.0, done / total))


def _progress(request: Json, bar: int = _BAR) -> str:
    done, share = request["progress"], _share(request)
    if done is None:
        return ""
    if share is None:
        return number_text(done)
    filled = round(share * bar)
    rate = request["per_second"]
    left = f" {_seconds((request['total'] - done) / rate)}" if rate and rate > 0 and share < 1 else ""
    return f"{'━' * filled}{'─' * (bar - filled)} {share:4.0%}{left}"


def _came(session: Json) -> str:
    told = f" · {session['transport']}" if session["transport"] else ""
    told += f" for {_seconds(session['seconds'])}" if session["seconds"] is not None else ""
    return told + (f" from {theirs(session['address'], 60)}" if session["address"] else "")


def _until(request: Json) -> str:
    return "" if request["left"] is None else f", {_seconds(request['left'])} left to its deadline"


def _seconds(value: float) -> str:
    """Return a time as people read it: 7 ms, 0.4 s, 12 s, 3:05, 2:00:07, > 1 year."""
    if value < 0.1:
        return f"{1000 * value:.0f} ms"
    if value < 10:
        return f"{value:.1f} s"
    if value > _YEAR:
        return "> 1 year"
    minutes, seconds = divmod(round(value), 60)
    if not minutes:
        return f"{seconds} s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"


def _bytes(value: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} GiB"
