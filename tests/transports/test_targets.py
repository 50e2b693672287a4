"""Headers that cannot be sent are refused, and secrets are not shown."""

from __future__ import annotations

import pytest

from trimcp.errors import LocalError
from trimcp.transports.targets import checked_headers, masked_url


def test_headers_have_lower_case_names() -> None:
    assert checked_headers({"X-Trace": "7", "authorization": "Bearer a b"}) == {
        "x-trace": "7",
        "authorization": "Bearer a b",
    }
    assert checked_headers(None) == {}


@pytest.mark.parametrize("headers", [{"": "v"}, {"a b": "v"}, {"a:": "v"}, {"a\r\nb": "v"}, {"ä": "v"}])
def test_names_are_tokens(headers: dict[str, str]) -> None:
    with pytest.raises(LocalError, match="cannot be the name of a header"):
        checked_headers(headers)


@pytest.mark.parametrize("value", ["secret\r\nx: y", "secret\x00", "secret\t", "secretä", "secret\x7f"])
def test_values_are_printable_and_not_quoted(value: str) -> None:
    with pytest.raises(LocalError, match="the header X-Key") as caught:
        checked_headers({"X-Key": value})
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("https://host.test/key", "https://host.test/..."),
        ("ws://user:key@host.test:8000/?key", "ws://host.test:8000/..."),
        ("http://[::1]:80/key#key", "http://[::1]:80/..."),
        ("ws+unix://%2Frun%2Fs.sock/key", "ws+unix://%2Frun%2Fs.sock/..."),
    ],
)
def test_what_is_shown_of_a_url(url: str, shown: str) -> None:
    assert masked_url(url) == shown
