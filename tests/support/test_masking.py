"""What a trace, an audit and a security event may show of a stranger's text."""

from __future__ import annotations

import ast
import logging
import sys
import traceback
from pathlib import Path
from typing import Any

import pytest

import trimcp
from tests.yardsticks import assert_costs
from trimcp.support.cleaning import digest, harmless, log_crash, mask, mask_text, shapes, traceback_text


@pytest.mark.parametrize(
    ("value", "shape"),
    [
        ("four", "string(4)"),
        ([1, 2], "array(2)"),
        ({"a": {}}, "object(1)"),
        (True, "boolean"),
        (1, "number"),
        (1.5, "number"),
        (None, "null"),
    ],
)
def test_a_shape_says_kind_and_size_and_no_more(value: Any, shape: str) -> None:
    assert shapes({"it": value}) == {"it": shape}


def test_names_of_arguments_are_bounded_and_harmless() -> None:
    found = shapes({f"a{n}\n\x1b[31m": n for n in range(1_000)})
    assert len(found) == 33
    assert found["..."] == "968 more"
    assert all(name.isprintable() for name in found)


def test_what_is_harmless_stays_and_everything_else_is_escaped() -> None:
    assert harmless("plain text, 1=2") == "plain text, 1=2"
    assert harmless('a"\n\x1b\u202e') == "a\\x22\\n\\x1b\\u202e"
    assert harmless("x" * 1_000) == "x" * 200 + "..."


def test_a_digest_tells_apart_and_gives_nothing_away() -> None:
    assert digest("a") != digest("b")
    assert len(digest("secret" * 100)) == 12
    assert digest("\ud800") == digest("\ud800")  # whatever a header held


@pytest.mark.parametrize("bait", ["?" + "a" * 50_000, "bearer " * 10_000, "&key" * 20_000, "?" * 50_000])
def test_masking_takes_no_time_whatever_the_text(bait: str) -> None:
    assert_costs(lambda: mask(bait), at_most=500)


@pytest.mark.parametrize(
    "text",
    [
        "the bearer is not valid",
        "the bearer token is not valid",
        "Bearer token required",
        "Basic authentication, or Bearer tokens.",
        "a basic example of a bearer scheme",
        "these are basic, then",
        "(of the bearer)",
        "WWW-Authenticate: Bearer error=invalid, Basic realm",
    ],
)
def test_words_of_a_sentence_are_no_secrets(text: str) -> None:
    shown = text.replace("error=invalid,", "***").replace("Basic realm", "Basic ***")
    assert mask_text(text) == shown


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("Bearer sesame", "Bearer ***"),
        ("bearer sesame ", "bearer *** "),
        ("Authorization: Bearer sesame", "Authorization: Bearer ***"),
        ("curl -H 'authorization: bearer sesame' http://x", "curl -H 'authorization: bearer ***' http://x"),
        ('{"authorization":"Bearer sesame"}', '{"authorization":"Bearer ***"}'),
        ("sent Bearer sesame to it", "sent Bearer *** to it"),
        ("sent bearer s3same to it", "sent bearer *** to it"),
        ("sent bearer Sesame to it", "sent bearer *** to it"),
        ("sent bearer eyJhbGciOiJIUzI1NiJ9.e30.x to it", "sent bearer *** to it"),
        ("sent bearer correcthorsebattery to it", "sent bearer *** to it"),
        ("basic dXNlcjpwYXNz", "basic ***"),
        ("http://x/?token=sesame&a=1", "http://x/?token=***&a=1"),
    ],
)
def test_what_may_be_a_secret_is_masked(text: str, masked: str) -> None:
    assert mask_text(text) == masked


def _raised(error: BaseException) -> BaseException:
    try:
        raise error
    except BaseException as raised:
        return raised


def test_a_traceback_cannot_be_made_to_look_like_other_lines() -> None:
    forged = "no\r\n\x1b[2K2026-01-01 ERROR root: forged\u2028\u202e\x85end"
    inner = ValueError(forged)
    inner.add_note(forged)
    group = ExceptionGroup(forged, [inner, SyntaxError(forged)])
    outer = RuntimeError("ü is no harm")
    outer.__cause__ = group
    text = traceback_text(_raised(outer))
    assert "test_masking.py" in text
    assert "RuntimeError: ü is no harm" in text
    lines = text.splitlines()
    assert all("\x1b" not in line and "\u202e" not in line for line in lines)
    told = [line for line in lines if "forged" in line]
    assert len(told) == 4
    assert all(line.lstrip(" |").startswith(r"\x1b[2K2026") and line.startswith("  ") for line in told)


def test_a_traceback_of_nothing_strange_is_what_python_writes() -> None:
    error = _raised(ValueError("plain"))
    assert traceback_text(error) == "".join(traceback.format_exception(error)).rstrip("\n")


def test_what_python_cannot_write_of_an_exception_is_told_without_its_text() -> None:
    class Bare(Exception):
        def __getattr__(self, name: str) -> Any:
            return {}[name]

    error = _raised(Bare("a\nsecret"))
    text = traceback_text(error)
    assert "test_masking.py" in text
    if sys.version_info < (3, 13):
        assert text.splitlines()[-1].endswith("Bare: <its traceback cannot be written: KeyError>")
    else:  # Python tells of the notes that it cannot get, and goes on
        assert "Bare: a\n    | secret\nIgnored error getting __notes__" in text


@pytest.mark.parametrize("level", [logging.DEBUG, logging.WARNING, logging.ERROR])
def test_what_is_logged_of_an_exception_forges_no_line(level: int, caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("trimcp.test")
    error = _raised(ValueError("no\n\x1b[2K2026-01-01 ERROR root: forged"))
    with caplog.at_level(level, "trimcp.test"):
        log_crash(logger, error, "it %s", "failed", level=level)
    [record] = caplog.records
    assert (record.getMessage(), record.levelno, record.funcName) == (
        "it failed",
        level,
        "test_what_is_logged_of_an_exception_forges_no_line",
    )
    assert record.exc_info == (ValueError, error, error.__traceback__)
    assert caplog.text.splitlines()[-1] == r"    | \x1b[2K2026-01-01 ERROR root: forged"
    caplog.clear()
    with caplog.at_level(level + 1, "trimcp.test"):
        log_crash(logger, error, "it failed", level=level)
    assert not caplog.records


def tracebacks_logged(source: str) -> list[int]:
    """The lines of a module where a traceback goes into a log as Python writes it."""
    if "exc_info" not in source and ".exception" not in source:
        return []  # to read a syntax tree takes long, and few modules have one of these
    calls = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Call)]
    return [
        call.lineno
        for call in calls
        if any(keyword.arg == "exc_info" for keyword in call.keywords)
        or (isinstance(call.func, ast.Attribute) and call.func.attr == "exception" and bool(call.args))
    ]


def test_every_traceback_in_a_log_is_harmless() -> None:
    """What strangers say may stand in any exception's text, and few who log one know whose it is."""
    assert tracebacks_logged("log.exception('x')\nlog.debug('x', exc_info=True)\nsys.exception()") == [1, 2]
    package = Path(trimcp.__file__).parent
    found = {path.relative_to(package): tracebacks_logged(path.read_text("utf-8")) for path in package.rglob("*.py")}
    assert {path: lines for path, lines in found.items() if lines} == {}
