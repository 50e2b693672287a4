"""What may be measured, and what is refused before anything is started."""

from __future__ import annotations

from typing import Any

import pytest

from trimcp.bench.plan import MixEntry, Plan
from trimcp.errors import LocalError

ECHO = MixEntry.tool("echo", {"text": "{n}"}, expect="{n}")


def test_a_plan_needs_no_more_than_a_request() -> None:
    plan = Plan(ECHO)
    assert (plan.mix, plan.sessions, plan.places, plan.duration) == ((ECHO,), 1, 1, 10.0)
    assert Plan([ECHO, MixEntry("ping")]).mix == (ECHO, MixEntry("ping"))


def test_a_count_leaves_no_duration() -> None:
    assert Plan(ECHO, count=5).duration is None
    assert Plan(ECHO, seconds=0.5).duration == 0.5


@pytest.mark.parametrize(("sessions", "places"), [(1, 256), (100, 3), (1000, 1)])
def test_an_open_loop_has_places_enough_for_a_slow_server(sessions: int, places: int) -> None:
    assert Plan(ECHO, rate=10.0, sessions=sessions).places == places
    assert Plan(ECHO, rate=10.0, sessions=sessions, under_way=7).places == 7


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"sessions": 0}, "sessions must be at least 1 and at most 100000, not 0"),
        ({"sessions": 1.5}, "sessions must be a whole number, not 1.5"),
        ({"sessions": True}, "sessions must be a whole number, not True"),
        ({"under_way": 0}, "under_way must be at least 1"),
        ({"rate": 0}, "rate must be more than 0, not 0"),
        ({"rate": float("inf")}, "rate must be a number, not inf"),
        ({"rate": float("nan")}, "rate must be a number, not nan"),
        ({"seconds": -1}, "seconds must be"),
        ({"count": 0}, "count must be at least 1"),
        ({"seconds": 1, "count": 1}, "either for --seconds or a --count"),
        ({"warm_up": 1, "warm_up_count": 1}, "either for how many seconds to warm up"),
        ({"rate": 5, "think": 1}, "no time to think"),
        ({"cancel": 1.1}, "cancel must be at least 0 and at most 1, not 1.1"),
        ({"cancel_after": 1.0}, "--cancel-after goes with --cancel"),
        ({"timeouts": 0.5}, "say with --timeout which"),
        ({"spacing": "poisson"}, "--spacing goes with --rate"),
        ({"timeout": 0}, "timeout must be more than 0"),
        ({"timeouts": -0.5}, "timeouts must be"),
        ({"spacing": "random"}, "spacing is one of constant, poisson"),
        ({"transport": "stdio"}, "transport is one of auto, http, sse"),
        ({"reply": "xml"}, "reply is one of any, json, sse"),
        ({"revision": "1999"}, "there is no revision '1999'; trimcp speaks 2024-11-05"),
        ({"patience": 0}, "patience must be more than 0"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(LocalError, match=complaint):
        Plan(**{"mix": ECHO, **options})


def test_a_script_describes_tools_and_other_requests() -> None:
    assert MixEntry.from_json({"tool": "echo", "arguments": {"text": "{n}"}, "expect": "{n}"}) == ECHO
    assert MixEntry.from_json({"tool": "t", "weight": 2}) == MixEntry.tool("t", weight=2)
    assert MixEntry.from_json({"method": "tools/list", "params": {"cursor": "x"}, "weight": 0.5}) == MixEntry(
        "tools/list", {"cursor": "x"}, weight=0.5
    )


@pytest.mark.parametrize(
    ("entry", "complaint"),
    [
        ("echo", "must be an object"),
        ({}, "names a tool or a method"),
        ({"tool": 1}, "tool must be a text"),
        ({"tool": "echo", "arguments": []}, "arguments an object"),
        ({"tool": "echo", "method": "ping"}, "cannot have 'method'"),
        ({"method": 7}, "method must be a text"),
        ({"method": ""}, "method must name a method"),
        ({"method": "initialize"}, "initialize is no request that can be repeated"),
        ({"method": "notifications/cancelled"}, "no request"),
        ({"method": "tools/call", "params": {}}, "needs the name of a tool"),
        ({"method": "ping", "params": []}, "params must be an object"),
        ({"method": "ping", "weight": 0}, "weight must be more than 0"),
        ({"method": "ping", "expect": 5}, "expect must be a text"),
        ({"tool": "echo", "arguments": {"x": float("nan")}}, "NaN"),
    ],
)
def test_an_entry_that_describes_no_request_is_refused(entry: object, complaint: str) -> None:
    with pytest.raises(LocalError, match=complaint):
        MixEntry.from_json(entry)


def test_a_plan_as_json_says_what_its_defaults_come_to() -> None:
    plan = Plan([ECHO], rate=100.0, pids=(1, 2)).to_json()
    assert plan["mix"] == [
        {
            "method": "tools/call",
            "params": {"name": "echo", "arguments": {"text": "{n}"}},
            "weight": 1.0,
            "expect": "{n}",
            "step": "call",
            "resource": None,
        }
    ]
    assert (plan["under_way"], plan["seconds"], plan["pids"], plan["spacing"]) == (256, 10.0, [1, 2], "constant")
    assert Plan(ECHO, count=3).to_json()["seconds"] is None


def test_a_request_has_a_name_for_people() -> None:
    assert (ECHO.label, MixEntry("tools/list").label) == ("echo", "tools/list")
