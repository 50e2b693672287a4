"""Headers that cannot be sent are refused, and secrets are not shown."""

from __future__ import annotations

import contextlib
import errno
import ssl
from itertools import pairwise
from socket import gaierror

import pytest

from trimcp.errors import LocalError
from trimcp.transports.targets import checked_headers, masked_url, shown_url, unreachable


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


@pytest.mark.parametrize("name", ["Content-Length", "transfer-encoding"])
def test_where_a_request_ends_is_not_for_a_user_to_say(name: str) -> None:
    with pytest.raises(LocalError, match=f"the header {name} is set for each request"):
        checked_headers({name: "4"})


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


def test_a_url_may_be_shown_with_its_path() -> None:
    assert masked_url("https://user:key@host.test:8000/a/mcp?key#key", path=True) == "https://host.test:8000/a/mcp?..."
    assert masked_url("http://[::1]", path=True) == "http://[::1]/"


def caused(*chain: BaseException) -> BaseException:
    """Return the first of these errors, each with the next one as its cause."""
    for error, cause in pairwise(chain):
        error.__cause__ = cause
    return chain[0]


def refused(host: str) -> OSError:
    return ConnectionRefusedError(errno.ECONNREFUSED, f"Error connecting to {host}: Connection refused")


def handshake_trouble(data: bytes) -> ssl.SSLError:
    """Return what TLS says of such an answer to its first words."""
    trust = ssl.create_default_context()
    incoming = ssl.MemoryBIO()
    tls = trust.wrap_bio(incoming, ssl.MemoryBIO(), server_hostname="server.test")
    with contextlib.suppress(ssl.SSLWantReadError):
        tls.do_handshake()
    incoming.write(data)
    with pytest.raises(ssl.SSLError) as caught:
        tls.do_handshake()
    return caught.value


def untrusted() -> ssl.SSLError:
    error = ssl.SSLCertVerificationError(1, "...")
    error.verify_message = "self-signed certificate"
    return error


@pytest.mark.parametrize(
    ("error", "why"),
    [
        (
            caused(RuntimeError(), OSError("all attempts failed"), ExceptionGroup("", [refused("a"), refused("b")])),
            "Connection refused; is the server running, and is this its address?",
        ),
        (caused(OSError("all attempts failed"), refused("a")), "Connection refused; is the server running, "),
        (FileNotFoundError(errno.ENOENT, "x", "y"), "No such file or directory; is the server running, "),
        (OSError("odd"), "odd; is the server running, "),
        (caused(RuntimeError(), gaierror(-2, "unknown")), "no address is known for this host (unknown)"),
        (caused(RuntimeError(), untrusted()), "its certificate is not trusted (self-signed certificate); trust it"),
        (
            caused(RuntimeError(), handshake_trouble(b"HTTP/1.1 400 Bad Request\r\n\r\n")),
            "TLS failed (WRONG_VERSION_NUMBER); does the server speak TLS on this port?",
        ),
    ],
)
def test_why_nobody_was_reached_is_found_among_the_causes(error: BaseException, why: str) -> None:
    assert (unreachable(error, "trust it") or "").startswith(why)


def test_what_is_no_trouble_of_the_network_is_for_others_to_tell() -> None:
    assert unreachable(caused(RuntimeError("a"), RuntimeError("b")), "") is None


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("http://127.0.0.1:8000/mcp", "http://127.0.0.1:8000/mcp"),
        ("https://me:secret@server.test/v1/mcp?key=secret#secret", "https://server.test/v1/mcp"),
        ("https://server.test/s/ab12cd34ef/mcp", "https://server.test/s/.../mcp"),
        ("https://server.test/averyveryverylongword", "https://server.test/..."),
        ("http://[::1]:80/", "http://[::1]:80/"),
    ],
)
def test_a_url_is_shown_without_what_may_be_secret(url: str, shown: str) -> None:
    assert shown_url(url) == shown
