"""What clients of several processes went through, as a file that a checker reads: each line is one thing they did.

A call's history is that of `tests.store.history`; beside it there are those of a counter in a context, and of watchers.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import attrs

from tests.store.history import CallHistory, problems


@attrs.define
class CounterHistory:
    """A counter in an agent's context, which its clients raise one by one."""

    name: str
    acknowledged: int = 0
    unknown: int = 0  # nobody knows whether these were carried out
    found: int = -1  # in the end


@attrs.define
class WatchHistory:
    """Changes of a resource that was watched: each was made after the one before was heard."""

    name: str
    heard: int = 0
    ended: int = 0  # subscriptions that were told of their end, after which the client has to look anew
    missed: list[int] = attrs.field(factory=list)  # places of changes of which nothing was heard


History: TypeAlias = CallHistory | CounterHistory | WatchHistory
_KINDS = {kind.__name__: kind for kind in (CallHistory, CounterHistory, WatchHistory)}


def write(path: Path, histories: Iterable[History]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for history in histories:
            file.write(json.dumps({"kind": type(history).__name__, **attrs.asdict(history)}) + "\n")


def read(path: Path) -> list[History]:
    found: list[History] = []
    for line in path.read_text("utf-8").splitlines():
        said: dict[str, Any] = json.loads(line)
        found.append(_KINDS[said.pop("kind")](**said))
    return found


def wrong(histories: Sequence[History], longest: float, *, all_answered: bool = False) -> list[str]:
    """Return what is wrong with these histories: what was lost, doubled, never answered, or answered too late.

    `longest`: seconds that a call takes at most. `all_answered`: an error is wrong, too.
    """
    calls = [history for history in histories if isinstance(history, CallHistory)]
    found = problems(calls, longest)
    if all_answered:
        found += [f"call {place}: {call.ends}" for place, call in enumerate(calls) if call.ends != ["result"]]
    for history in histories:
        if isinstance(history, CounterHistory):
            if not history.acknowledged <= history.found <= history.acknowledged + history.unknown:
                found.append(f"counter {history.name}: lost, or doubled: {history}")
            if all_answered and history.unknown:
                found.append(f"counter {history.name}: {history.unknown} unknown")
        elif isinstance(history, WatchHistory):
            if history.missed:
                found.append(f"watch {history.name}: lost: {history.missed}")
            if all_answered and not history.heard:
                found.append(f"watch {history.name}: nothing was heard")
    return found


def told(histories: Sequence[History]) -> str:
    """Return in one line what they went through."""
    calls = [history for history in histories if isinstance(history, CallHistory)]
    ends: dict[str, int] = {}
    for call in calls:
        for end in call.ends:
            ends[end] = ends.get(end, 0) + 1
    how = ", ".join(f"{number} {end}" for end, number in sorted(ends.items()))
    events = sum(len(call.numbers) for call in calls)
    slowest = max((call.seconds for call in calls), default=0.0)
    resumed = sum(call.resumed for call in calls)
    counted = sum(each.acknowledged for each in histories if isinstance(each, CounterHistory))
    unknown = sum(each.unknown for each in histories if isinstance(each, CounterHistory))
    heard = sum(each.heard for each in histories if isinstance(each, WatchHistory))
    return (
        f"{len(calls)} calls ({how}), {events} events, {resumed} resumptions, the slowest {slowest:.1f} s; "
        f"{counted} updates of contexts and {unknown} unknown; {heard} changes heard"
    )


@attrs.frozen
class Judged:
    """What became of the clients of one test."""

    name: str
    histories: Sequence[History]
    longest: float  # seconds that a call might take


def table(tried: Iterable[Judged]) -> list[str]:
    """Return a table of what clients went through, in Markdown: that of docs/reliability/replicas.md."""
    lines = ["| | calls | result | one error | events | resumed | updates | changes heard | slowest call |"]
    lines.append("| --- " * 9 + "|")
    for each in tried:
        calls = [history for history in each.histories if isinstance(history, CallHistory)]
        answered = sum(call.ends == ["result"] for call in calls)
        cells = [len(calls), answered, len(calls) - answered, sum(len(call.numbers) for call in calls)]
        cells.append(sum(call.resumed for call in calls))
        cells.append(sum(history.acknowledged for history in each.histories if isinstance(history, CounterHistory)))
        cells.append(sum(history.heard for history in each.histories if isinstance(history, WatchHistory)))
        slowest = f"{max((call.seconds for call in calls), default=0.0):.1f} s of {each.longest:.1f}"
        lines.append(f"| {each.name} | {' | '.join(f'{cell:,}' for cell in cells)} | {slowest} |")
    return lines
