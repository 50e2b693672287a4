"""Pages and host names that may reach a server, and those that may not, however they are spelled."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trimcp.transports.http.interfaces import Head, HttpResponse
from trimcp.transports.http.peers.origins import Origins


def head(
    origin: str | None = None,
    host: str | None = "127.0.0.1:8000",
    *,
    loopback: bool = True,
    secure: bool = False,
    peer: str = "127.0.0.1:40312",
    method: str = "POST",
    **more: str,
) -> Head:
    headers = {name.replace("_", "-"): value for name, value in more.items()}
    if origin is not None:
        headers["origin"] = origin
    if host is not None:
        headers["host"] = host
    return Head(method, "/mcp", headers=headers, loopback=loopback, secure=secure, peer=peer)


def public(origin: str | None, host: str | None = "mcp.example", **more: bool) -> Head:
    return head(origin, host, loopback=False, peer="203.0.113.7:40312", **more)


# Host


@pytest.mark.parametrize(
    "host",
    [
        *("localhost", "localhost:8000", "LocalHost:1", "app.localhost", "localhost:"),
        *("127.0.0.1", "127.0.0.1:8000", "127.8.9.1:1", "[::1]", "[::1]:8000", "[0:0:0:0:0:0:0:1]:8000"),
    ],
)
def test_on_loopback_its_own_names_pass(host: str) -> None:
    assert Origins().refuse(head(host=host)) is None


@pytest.mark.parametrize(
    "host",
    [
        *("evil.example", "localhost.evil.example", "127.0.0.1.evil.example", "evil.example:8000", "127.0.0.1@evil"),
        *("notlocalhost", "localhost:99999", "localhost:8000:1", "localhost,evil.example", "localhost, localhost"),
        *("[::1", "::1", "[::1]evil", "[::1%lo]", "[127.0.0.1]", "[::2]", "10.0.0.1", "0.0.0.0", "128.0.0.1"),
        *("127.1", "0x7f.1", "2130706433", "127.0.0.01", "127.0.0.1.", "localhost.", "localhost/", "local host", ""),
        *("localhost\n", "localhos\u0165", "localhost:８０", "localhost:-1", "localhost:+80", None),
    ],
)
def test_on_loopback_any_other_name_may_have_been_rebound(host: str | None) -> None:
    reason = Origins().refuse(head(host=host))
    assert reason is not None
    assert reason.isascii()
    assert reason.isprintable()
    assert Origins().refuse(head(host=host, loopback=False)) is None, "nobody said which hosts are ours"


@pytest.mark.parametrize(
    ("allowed", "host", "passes"),
    [
        ("mcp.example", "mcp.example", True),
        ("mcp.example", "MCP.Example:8443", True),
        ("mcp.example", "xmcp.example", False),
        ("mcp.example", "a.mcp.example", False),
        ("mcp.example:8443", "mcp.example:8443", True),
        ("mcp.example:8443", "mcp.example", False),
        ("mcp.example:8443", "mcp.example:84430", False),
        ("*.example", "mcp.example:1", True),
        ("*.example", "a.b.example", True),
        ("*.example", "example", False),
        ("*.example", "badexample", False),
        ("*.example:80", "a.example:80", True),
        ("*.example:80", "a.example:81", False),
        ("*.example:80", "a.example", False),
        ("[2001:db8::1]:80", "[2001:DB8:0::1]:80", True),
        ("10.0.0.1", "10.0.0.1:8000", True),
        ("*", "anything.at.all:7", True),
        ("*", "two, hosts", False),
        ("mcp.example", "localhost", False),
        ("mcp.example", None, False),
    ],
)
def test_named_hosts_are_compared_whole(allowed: str, host: str | None, passes: bool) -> None:
    assert (Origins(allowed_hosts=[allowed]).refuse(public(None, host)) is None) is passes


def test_on_loopback_named_hosts_stand_beside_its_own_names() -> None:
    origins = Origins(allowed_hosts=("mcp.example",))
    assert origins.refuse(head(host="mcp.example")) is None
    assert origins.refuse(head(host="localhost:8000")) is None
    assert origins.refuse(head(host="evil.example")) == "the Host 'evil.example' is not allowed here"


def test_over_a_unix_socket_any_host_passes_unless_some_are_named() -> None:
    for host in ("whatever", "", None, "a b"):
        assert Origins().refuse(head(host=host, peer="unix")) is None
    named = Origins(allowed_hosts=("mcp.example",))
    assert named.refuse(head(host="whatever", peer="unix")) is not None
    assert named.refuse(head(host="mcp.example", peer="unix")) is None
    assert named.refuse(head(host="localhost", peer="unix")) is None


# Origin


@pytest.mark.parametrize("loopback", [True, False])
def test_without_an_origin_nobody_is_refused_for_it(loopback: bool) -> None:
    assert Origins().refuse(head(loopback=loopback)) is None


@pytest.mark.parametrize(
    ("origin", "host", "secure"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1:8000", False),
        ("HTTP://LocalHost:8000", "localhost:8000", False),
        ("http://localhost", "localhost", False),
        ("http://localhost", "localhost:80", False),
        ("http://localhost:80", "localhost", False),
        ("https://localhost", "localhost:443", True),
        ("https://localhost:8443", "localhost:8443", True),
        ("http://[::1]:8000", "[0::1]:8000", False),
    ],
)
def test_a_page_of_this_very_server_passes(origin: str, host: str, secure: bool) -> None:
    assert Origins().refuse(head(origin, host, secure=secure)) is None
    assert Origins().refuse(head(origin, host, secure=secure, loopback=False)) is None


@pytest.mark.parametrize(
    "origin",
    [
        *("http://evil.example", "http://localhost:8001", "http://localhost", "https://localhost:8000"),
        *("http://localhost:8000.evil.example", "http://localhost:80000", "http://evil.example/localhost:8000"),
        *("http://localhost:8000/", "http://localhost:8000#", "http://localhost:8000?", "//localhost:8000"),
        *("http://user@localhost:8000", "http://localhost:8000@evil.example", "http://localhost:8000\\@evil.example"),
        *("null", "", " ", "localhost:8000", "http:localhost:8000", "http:///localhost:8000", "ws://localhost:8000"),
        *("http://localhost:8000, http://localhost:8000", "http://localhost:8000 http://evil.example", "*"),
        *(
            "http://localhost:8000\n",
            "http://localhos\u0165:8000",
            "http://localhost:８０００",
            "http://ⓛocalhost:8000",
        ),
    ],
)
@pytest.mark.parametrize("loopback", [True, False])
def test_any_other_page_is_refused_on_every_bind(origin: str, loopback: bool) -> None:
    reason = Origins().refuse(head(origin, "localhost:8000", loopback=loopback))
    assert reason is not None
    assert "Origin" in reason
    assert reason.isascii()
    assert reason.isprintable()
    assert len(reason) < 200


@pytest.mark.parametrize(
    ("allowed", "origin", "passes"),
    [
        ("https://app.example", "https://app.example", True),
        ("https://app.example", "https://APP.example:443", True),
        ("https://app.example", "http://app.example", False),
        ("https://app.example", "https://app.example:444", False),
        ("https://app.example", "https://app.example.evil.example", False),
        ("https://app.example", "https://a.app.example", False),
        ("http://localhost:6274", "http://localhost:6274", True),
        ("vscode-webview://1a2b", "vscode-webview://1a2b", True),
        ("https://app.example", "null", False),
        ("*", "https://anybody.example", True),
        ("*", "null", True),
        ("*", "garbage", False),
    ],
)
def test_pages_that_are_named_pass(allowed: str, origin: str, passes: bool) -> None:
    origins = Origins(allow_origins=[allowed])
    assert (origins.refuse(public(origin)) is None) is passes
    assert (origins.refuse(head(origin)) is None) is passes
    assert bool(dict(origins.cors(public(origin))).get("Access-Control-Allow-Origin")) is passes


@pytest.mark.parametrize("host", ["mcp.example", "mcp.example:443"])
def test_behind_a_proxy_that_takes_tls_off_a_named_host_is_known_to_be_ours(host: str) -> None:
    named = Origins(allowed_hosts=("mcp.example",))
    assert named.refuse(public("https://mcp.example", host)) is None
    assert named.refuse(head("https://mcp.example", host, peer="unix")) is None
    assert named.refuse(public("https://other.example", host)) is not None
    assert named.refuse(public("https://mcp.example:444", host)) is not None
    assert Origins().refuse(public("https://mcp.example", host)) is not None, "nobody said that this host is ours"


def test_a_page_without_tls_is_never_a_server_with_it() -> None:
    assert Origins(allowed_hosts=("mcp.example",)).refuse(public("http://mcp.example", secure=True)) is not None


# CORS


def test_without_allowed_origins_there_is_no_cors() -> None:
    asked = head("http://127.0.0.1:8000", method="OPTIONS", access_control_request_method="POST")
    assert Origins().cors(asked) == ()
    assert Origins().preflight(asked) is None


def test_a_page_that_may_call_may_read_the_answer() -> None:
    origins = Origins(("https://app.example",))
    headers = dict(origins.cors(public("https://app.example")))
    assert headers["Access-Control-Allow-Origin"] == "https://app.example"
    assert headers["Vary"] == "Origin"
    assert "Mcp-Session-Id" in headers["Access-Control-Expose-Headers"].split(", ")
    assert origins.cors(public(None)) == (("Vary", "Origin"),)
    assert origins.cors(public("http://mcp.example")) == (("Vary", "Origin"),)


def test_when_all_may_call_nothing_varies() -> None:
    headers = dict(Origins("*").cors(public("https://app.example")))
    assert headers["Access-Control-Allow-Origin"] == "*"
    assert "Vary" not in headers


def preflight(
    origins: Origins, requested: str | None = None, origin: str = "https://app.example"
) -> HttpResponse | None:
    more = {} if requested is None else {"access_control_request_headers": requested}
    return origins.preflight(head(origin, method="OPTIONS", access_control_request_method="POST", **more))


def test_a_preflight_is_answered() -> None:
    answer = preflight(Origins("https://app.example"), "content-type,mcp-param-region, Mcp-Param-City ,x-other")
    assert answer is not None
    headers = dict(answer.headers)
    assert (answer.status, answer.body) == (204, b"")
    assert headers["Access-Control-Allow-Origin"] == "https://app.example"
    assert headers["Access-Control-Allow-Methods"] == "GET, POST, PATCH, DELETE"
    allowed = headers["Access-Control-Allow-Headers"].split(", ")
    for name in (
        *("Authorization", "Content-Type", "Last-Event-ID", "Mcp-Session-Id", "MCP-Protocol-Version"),
        *("Mcp-Method", "Mcp-Name", "mcp-param-region", "Mcp-Param-City"),
    ):
        assert name in allowed
    assert "x-other" not in allowed
    assert int(headers["Access-Control-Max-Age"]) > 0
    assert "Origin" in headers["Vary"]


def test_only_a_preflight_of_a_page_that_may_call_is_answered() -> None:
    origins = Origins("https://app.example")
    assert preflight(origins, origin="https://evil.example") is None
    assert origins.preflight(head("https://app.example", method="OPTIONS")) is None
    assert origins.preflight(head("https://app.example", access_control_request_method="POST")) is None


@given(st.text(st.characters(max_codepoint=255), max_size=200))
def test_nothing_but_names_comes_back_from_a_preflight(text: str) -> None:
    answer = preflight(Origins("*"), f"mcp-param-{text},{text}, mcp-param-x")
    assert answer is not None
    value = dict(answer.headers)["Access-Control-Allow-Headers"]
    assert all(name.strip() and name.isascii() and name.isprintable() for name in value.split(", "))
    assert "mcp-param-x" in value


def test_a_preflight_does_not_grow_with_what_it_asks_for() -> None:
    answer = preflight(Origins("*"), ",".join(f"mcp-param-{number}" for number in range(10_000)))
    assert answer is not None
    assert len(dict(answer.headers)["Access-Control-Allow-Headers"]) < 2_000


# What an author writes


@pytest.mark.parametrize(
    "entry", ["app.example", "https://app.example/", "https://*.example", "null", "", "https://bücher.example", "**"]
)
def test_an_origin_that_is_none_is_named_to_its_author(entry: str) -> None:
    with pytest.raises(ValueError, match="is no origin: write scheme, host"):
        Origins(allow_origins=(entry,))


@pytest.mark.parametrize("entry", ["https://mcp.example", "mcp.example/", "", "bücher.example", "*.", "a:b", "::1"])
def test_a_host_that_is_none_is_named_to_its_author(entry: str) -> None:
    with pytest.raises(ValueError, match="is no host"):
        Origins(allowed_hosts=(entry,))


@pytest.mark.parametrize("entry", ["*example", "**", "*:80"])
def test_a_star_stands_alone_or_before_a_dot(entry: str) -> None:
    with pytest.raises(ValueError, match="stands alone or before a dot"):
        Origins(allowed_hosts=(entry,))


# Anything


hostile = st.one_of(
    st.text(st.characters(max_codepoint=255), max_size=300),
    st.lists(
        st.sampled_from(
            [*("http", "https", "://", ":", "@", "/", "localhost", "127.0.0.1", "[::1]", "evil", "."), "8000", ",", " "]
        ),
        max_size=8,
    ).map("".join),
)


@given(hostile, hostile, st.booleans())
def test_a_strangers_page_never_passes_for_ours(origin: str, host: str, secure: bool) -> None:
    """Who passes on loopback without being named shows an origin that spells out a loopback name, and no more."""
    if Origins().refuse(head(origin, host, secure=secure)) is None:
        scheme, _, place = origin.lower().partition("://")
        assert scheme == ("https" if secure else "http")
        name = place.rsplit(":", 1)[0] if not place.endswith("]") else place
        assert name == "localhost" or name.endswith(".localhost") or name.startswith(("127.", "[", "localhost"))
        assert "evil" not in name or name.endswith(".localhost")
        assert "@" not in place
        assert "/" not in place


@given(st.text(st.characters(max_codepoint=255), min_size=100, max_size=3_000))
def test_a_reason_is_short_and_harmless(text: str) -> None:
    reason = Origins().refuse(head(text, "localhost"))
    assert reason is not None
    assert len(reason) < 500
    assert reason.isascii()
    assert reason.isprintable()
