"""That subscribers who are told of a change are counted, and those who are told wrongly found out."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import told
from environments import Peer, Way

OURS = Path(__file__).parents[2] / "benchmarks" / "peers" / "ours.py"


def measure(monkeypatch: pytest.MonkeyPatch, program: Path) -> list[dict[str, Any]]:
    monkeypatch.setattr(told, "CELLS", {"told-40": 40})
    monkeypatch.setattr(told, "WARM_CALLS", 1)
    monkeypatch.setenv("PYTHONPATH", str(OURS.parent))
    peer = Peer("ours", (sys.executable, str(program)), (Way("http", "2025-11-25", "json"),))
    return told.measure([peer], rounds=2, quick=True)


@pytest.mark.needs("taskset")
@pytest.mark.slow
def test_ours_can_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    found = measure(monkeypatch, OURS)
    assert [(row["cell"], row["figure"], row["unit"]) for row in found] == [
        ("told-40", "cpu", "µs"),
        ("told-40", "meanwhile", "ms"),
    ]
    assert all(len(row["values"]) == 2 and min(row["values"]) > 0 for row in found)


@pytest.mark.needs("taskset")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("right", "wrong", "said"),
    [
        ('server.resource_updated("bench://greeting")', "pass", "not all were told"),
        ('return "changed"', 'return "not changed"', "the resource was not changed"),
        ('    """Return the text."""\n    return text', '    """Return the text."""\n    return "!"', "wanted 'hello"),
    ],
)
def test_what_is_wrong_is_found_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, right: str, wrong: str, said: str
) -> None:
    source = OURS.read_text("utf-8")
    assert right in source
    program = tmp_path / "wrong.py"
    program.write_text(source.replace(right, wrong, 1))
    if wrong == "pass":  # nobody is told, however long it waits
        monkeypatch.setattr(told, "TOLD_LIMIT", 0.2)
    with pytest.raises((AssertionError, BaseExceptionGroup)) as caught:
        measure(monkeypatch, program)
    assert said in first_of(caught.value)


def first_of(error: BaseException) -> str:
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)


class Stream:
    """A subscriber's stream, on which there is one event."""

    def __init__(self, **notice: Any) -> None:
        self.stream, self.notice = self, notice

    async def event(self) -> str:
        return json.dumps(self.notice)


async def test_each_notice_is_checked() -> None:
    right = Stream(method="notifications/resources/updated", params={"uri": told.RESOURCE})
    for wrong in (
        Stream(method="notifications/resources/updated", params={"uri": "bench://another"}),
        Stream(method="notifications/tools/list_changed"),
    ):
        nobody: Any = None
        streams: Any = [right, wrong]
        await told.Told(0, streams[:1], nobody, nobody)._read_notices()
        with pytest.raises(AssertionError, match="was told"):
            await told.Told(0, streams, nobody, nobody)._read_notices()
