"""When a request is sent again, how long that waits, and what a status means."""

from __future__ import annotations

import random
from email.utils import formatdate

import pytest

from tests.protocol.support import ConnectionPair
from trimcp.transports.http.client.policy import (
    REPEATABLE,
    AttemptFailure,
    Backoff,
    answers,
    error_in,
    in_reply_to,
    refusal,
    seconds_to_wait,
)
from trimcp.transports.targets import status_text
from trimcp.wire.jsonrpc import Batch, ErrorResponse, Malformed, Notification, Request, Response, parse
from trimcp.wire.revisions import REVISIONS, Revision

BACKOFF = Backoff(3, random.Random(1))
BROKEN = AttemptFailure("it broke", passing=True)


@pytest.mark.parametrize("method", sorted(REPEATABLE))
def test_what_only_reads_is_sent_again(method: str) -> None:
    assert BACKOFF.before_next(0, BROKEN, method, False) is not None


@pytest.mark.parametrize(
    "method", ["tools/call", "initialize", "logging/setLevel", "resources/subscribe", "com.example/own"]
)
def test_what_may_change_something_is_not(method: str) -> None:
    assert BACKOFF.before_next(0, BROKEN, method, False) is None
    assert BACKOFF.before_next(0, BROKEN, method, True) is not None


@pytest.mark.parametrize("method", ["tools/call", "ping"])
def test_what_never_left_is_sent_again_whatever_it_is(method: str) -> None:
    assert BACKOFF.before_next(0, AttemptFailure("refused", untouched=True, passing=True), method, False) is not None


def test_what_will_not_pass_is_not_sent_again() -> None:
    assert BACKOFF.before_next(0, AttemptFailure("no", untouched=True), "ping", True) is None


def test_attempts_are_bounded() -> None:
    assert [BACKOFF.before_next(n, BROKEN, "ping", False) is None for n in range(5)] == [False] * 3 + [True] * 2


def test_pauses_double_and_vary_and_are_bounded() -> None:
    backoff = Backoff(99, random.Random(1), first=1, longest=8)
    for attempt, due in enumerate((1, 2, 4, 8, 8, 8)):
        pauses = {backoff.pause(attempt) for _ in range(50)}
        assert len(pauses) == 50
        assert all(due / 2 <= pause <= due for pause in pauses)
    assert backoff.pause(10**6) <= 8


def test_a_server_may_ask_for_more_time_within_reason() -> None:
    for after, expected in ((2.5, 2.5), (30.0, 30.0)):
        assert BACKOFF.before_next(0, AttemptFailure("busy", passing=True, after=after), "ping", False) == expected
    assert BACKOFF.before_next(0, AttemptFailure("busy", passing=True, after=31.0), "ping", False) is None
    pause = BACKOFF.before_next(0, AttemptFailure("busy", passing=True, after=0.0), "ping", False)
    assert pause is not None
    assert pause >= 0.125


@pytest.mark.parametrize(
    ("header", "seconds"),
    [
        ("120", 120.0),
        (" 0 ", 0.0),
        ("9" * 5000, 9_999_999_999.0),
        (formatdate(1_000_010, usegmt=True), 10.0),
        (formatdate(999_000, usegmt=True), 0.0),
        ("soon", None),
        ("", None),
        ("-1", None),
        ("٣", None),
        ("Fri, 32 Dec 9999999 99:99:99 GMT", None),
    ],
)
def test_retry_after_is_seconds_or_a_date(header: str, seconds: float | None) -> None:
    assert seconds_to_wait(header, lambda: 1_000_000.0) == seconds


def test_a_refusal_says_what_to_do() -> None:
    assert refusal(503) == "the server answered 503 Service Unavailable"
    assert refusal(799) == "the server answered 799"
    assert status_text(404) == "404 Not Found"
    assert "credentials" in refusal(401)
    assert "does not allow" in refusal(403)
    assert "'https://other.example'" in refusal(307, None, "https://other.example")


def test_a_refusal_quotes_the_server_cut_and_escaped() -> None:
    text = refusal(400, ErrorResponse(1, -32600, "bad\n\x1b[31m" + "x" * 1000))
    assert "\n" not in text
    assert "\x1b" not in text
    assert len(text) < 300


def test_an_error_in_a_refusal_answers_the_request_whatever_its_id() -> None:
    for id in (b'"server-error"', b"null", b"7"):
        body = b'{"jsonrpc":"2.0","id":%b,"error":{"code":-32600,"message":"no"}}' % id
        assert error_in(body, 3) == ErrorResponse(3, -32600, "no")
    assert error_in(b'{"jsonrpc":"2.0","error":{"code":-32600,"message":"no"}}', 3) == ErrorResponse(3, -32600, "no")


@pytest.mark.parametrize(
    "body", [b"", b"<html>", b'{"error":"invalid_token"}', b'{"jsonrpc":"2.0","id":1,"result":{}}', b"\xff", b"[]"]
)
def test_a_body_that_is_no_error_is_none(body: bytes) -> None:
    assert error_in(body, 3) is None


def test_the_reply_to_a_request_has_no_answer_to_another() -> None:
    mine, notification = Response(1, {}), Notification("n")
    others = [Response(2, {}), ErrorResponse(2, 1, ""), Malformed(-1, "", 2, "json", True), Response("2", {})]
    for other in others:
        assert in_reply_to(other, 1) is None
        assert in_reply_to(Batch((other, mine, notification)), 1) == Batch((mine, notification))
        assert in_reply_to(Batch((other,)), 1) is None
    # The server's own requests, and what nobody can tell whom it answers:
    for message in (
        mine,
        notification,
        Request(2, "m"),
        ErrorResponse(None, 1, ""),
        Malformed(-1, "", 2, "json", is_request=True),
    ):
        assert in_reply_to(message, 1) is message


def test_what_answers_a_request() -> None:
    answering = [Response(1, {}), ErrorResponse(1, 1, ""), Malformed(1, "", 1, "json", True)]
    for message in answering:
        assert answers(message, 1)
        assert not answers(message, 2)
        assert answers(Batch((Notification("n"), message)), 1)
    assert not answers(Request(1, "m"), 1)
    assert not answers(Malformed(1, "", 1, "params", is_request=True), 1)  # the server's own, by the same number
    assert not answers(Notification("n"), 1)


@pytest.mark.parametrize("revision", REVISIONS)
def test_what_settles_a_post_settles_its_call(revision: Revision) -> None:
    whole = b'{"jsonrpc":"2.0","id":11,%b}'
    parts = (b'"result":{}', b'"result":7', b'"error":{}', b'"error":{"code":1,"message":"no"}', b'"method":"x"')
    texts = [whole % part for part in (*parts, b'"method":7', b'"method":"x","params":7', b'"method":"x","result":{}')]
    texts += [b'{"id":11,"result":{}', b'{"jsonrpc":"1.0","id":11,"result":{}}', whole.replace(b"%b", b'"x":1')]
    settled = 0
    for text in (*texts, *(b"[%b]" % text for text in texts)):
        engine = ConnectionPair().open(revision).client
        engine.sent(11, engine.method("tools/call"))
        message = parse(text)
        engine.receive(message)
        assert not (answers(message, 11) and 11 in engine.outbound), text
        settled += answers(message, 11)
    assert settled >= 14
