from __future__ import annotations

import pytest

from trimcp.wire import codes
from trimcp.wire.codes import ERRORS

CONSTANTS = {name: value for name, value in vars(codes).items() if isinstance(value, int)}


def test_every_constant_stands_in_the_table() -> None:
    assert sorted(CONSTANTS.values()) == sorted(ERRORS)
    assert all(kind.code == code for code, kind in ERRORS.items())


def test_reasons_are_unique_words() -> None:
    reasons = [kind.reason for kind in ERRORS.values()]
    assert len(set(reasons)) == len(reasons)
    assert all(reason.replace("_", "").isalpha() and reason.islower() for reason in reasons)


def test_our_own_codes_lie_outside_the_range_json_rpc_reserves() -> None:
    ours = {code for code in ERRORS if code > 0}
    assert ours == {
        codes.OVERLOADED,
        codes.CANCELLED_BY_DRAIN,
        codes.TIMED_OUT,
        codes.FORBIDDEN,
        codes.CANCELLED_BY_OPERATOR,
    }


def test_reserved_codes_are_only_those_the_specification_defines() -> None:
    assert {code for code in ERRORS if -32099 <= code <= -32000} == {-32002, -32042, -32020, -32021, -32022}
    assert {code for code in ERRORS if code < -32099} == {-32700, -32600, -32601, -32602, -32603}


@pytest.mark.parametrize(
    ("code", "status"),
    [(-32601, 404), (-32602, 400), (-32020, 400), (-32021, 400), (-32022, 400), (-32700, 400), (-32600, 400)],
)
def test_http_statuses_the_specification_fixes(code: int, status: int) -> None:
    assert ERRORS[code].http_status == status


def test_only_what_did_nothing_may_be_retried() -> None:
    assert [kind.name for kind in ERRORS.values() if kind.retryable] == ["Overloaded"]
