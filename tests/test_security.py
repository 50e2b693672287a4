"""Security events: their record, their bounds, and that every one that is reported is documented."""

from __future__ import annotations

import ast
import json
import logging
import re
from functools import cache
from pathlib import Path

import pytest

from trimcp import JsonFormatter, security
from trimcp.security import PER_MINUTE, SECURITY_EVENTS, security_event

PACKAGE = Path(security.__file__).parent
HOWTO = PACKAGE.parent / "docs" / "howto" / "audit.md"


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Time stands still until a test moves it, and nothing was logged yet."""
    now = [1_000.0]
    monkeypatch.setattr(security, "_bounds", security._EventCounts())
    monkeypatch.setattr(security, "_clock", lambda: now[0])
    return now


def test_an_event_is_one_warning_with_fields(caplog: pytest.LogCaptureFixture) -> None:
    security_event("origin_refused", peer="127.0.0.1:5", size=7, session=None)
    (record,) = caplog.records
    assert (record.name, record.levelno) == ("trimcp.security", logging.WARNING)
    assert record.getMessage() == "origin_refused peer=127.0.0.1:5 size=7"
    written = json.loads(JsonFormatter().format(record))
    assert written["event"] == "origin_refused"
    assert (written["peer"], written["size"]) == ("127.0.0.1:5", 7)
    assert "session" not in written


def test_what_a_stranger_wrote_can_pretend_nothing(caplog: pytest.LogCaptureFixture) -> None:
    security_event("garbage", why='x\nWARNING trimcp.security fake="1"\x1b[2J\u202e', long="y" * 10_000)
    (record,) = caplog.records
    text = record.getMessage()
    assert text.isprintable()
    assert text.isascii()
    assert len(text) < 1_000
    assert json.loads(JsonFormatter().format(record))["long"].endswith("...")


def test_secrets_are_masked_by_name_and_by_look(caplog: pytest.LogCaptureFixture) -> None:
    security_event(
        "authentication_failed", authorization="Bearer s3cr3t", url="http://h/?token=s3cr3t", why="Bearer s3cr3t"
    )
    assert "s3cr3t" not in repr(vars(caplog.records[0]))


def test_names_that_a_record_has_itself_do_no_harm(caplog: pytest.LogCaptureFixture) -> None:
    security_event("garbage", name="x", message="y", args=(1, 2))
    (record,) = caplog.records
    assert record.name == "trimcp.security"
    assert vars(record)["name_"] == "x"
    assert vars(record)["args_"] == "(1, 2)"


def test_an_attacker_cannot_fill_the_log(caplog: pytest.LogCaptureFixture, clock: list[float]) -> None:
    for n in range(10_000):
        security_event("garbage", n=n)
    assert len(caplog.records) == PER_MINUTE
    security_event("oversize")  # another kind has its own bound
    assert len(caplog.records) == PER_MINUTE + 1
    clock[0] += 60
    caplog.clear()
    security_event("garbage", n=10_000)
    assert [record.getMessage() for record in caplog.records] == [
        f"garbage left_out={10_000 - PER_MINUTE}",
        "garbage n=10000",
    ]
    assert vars(caplog.records[0])["left_out"] == 10_000 - PER_MINUTE


def test_another_kind_tells_what_was_left_out_too(caplog: pytest.LogCaptureFixture, clock: list[float]) -> None:
    for _ in range(PER_MINUTE + 3):
        security_event("garbage")
    clock[0] += 61
    caplog.clear()
    security_event("oversize")
    assert [record.getMessage() for record in caplog.records] == ["garbage left_out=3", "oversize"]


def test_what_was_left_out_is_told_when_the_program_ends(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(PER_MINUTE + 2):
        security_event("garbage")
    caplog.clear()
    security.tell_left_out()
    assert [record.getMessage() for record in caplog.records] == ["garbage left_out=2"]
    caplog.clear()
    security.tell_left_out()
    assert caplog.records == []


def test_kinds_of_an_applications_own_share_one_bound(caplog: pytest.LogCaptureFixture) -> None:
    for n in range(10_000):
        security_event(f"made_up_{n}")
    assert len(caplog.records) == PER_MINUTE
    assert len(security._bounds._kinds) == 1


def test_nothing_is_counted_where_nobody_listens(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.ERROR, "trimcp.security")
    security_event("garbage")
    assert security._bounds._kinds == {}


@cache
def reported() -> dict[str, str]:
    """Every kind the package reports, by the module that does; the kind must stand there as text."""
    found = {}
    sources = {path: path.read_text("utf-8") for path in sorted(PACKAGE.rglob("*.py"))}
    for path in [path for path, source in sources.items() if "security_event" in source]:
        for node in ast.walk(ast.parse(sources[path])):
            name = node.func.id if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) else ""
            if name == "security_event":
                assert isinstance(node, ast.Call)
                (kind,) = node.args
                assert isinstance(kind, ast.Constant), f"{path.name}: the kind must be a literal"
                found[str(kind.value)] = path.name
    return found


def test_every_kind_that_is_reported_is_documented() -> None:
    assert set(reported()) <= set(SECURITY_EVENTS)


def test_every_documented_kind_is_reported_somewhere() -> None:
    assert set(SECURITY_EVENTS) - set(reported()) == set()


def test_the_page_lists_every_kind() -> None:
    _, _, table = HOWTO.read_text("utf-8").partition("| kind | what happened |")
    listed = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert sorted(listed) == sorted(SECURITY_EVENTS)
