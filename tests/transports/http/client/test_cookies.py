from __future__ import annotations

import pytest

from tests.transports.http.scripted import Exchange, exchanges_with, listening
from trimcp.transports.http.client.cookies import BoundedCookieJar

pytestmark = pytest.mark.usefixtures("on_both_engines")


def jar_after(*cookies: str) -> BoundedCookieJar:
    jar = BoundedCookieJar()
    for cookie in cookies:
        jar.note("http://server.test/mcp", [cookie])
    return jar


def test_a_cookie_is_kept_and_replaced() -> None:
    jar = jar_after("route=a; Path=/", "route=b; Path=/", "other=c; Path=/mcp")
    assert {cookie.name: cookie.value for cookie in jar} == {"route": "b", "other": "c"}


def test_fifty_are_enough() -> None:
    jar = jar_after(*(f"n{n}=v" for n in range(60)), "n3=w")
    assert len(jar) == 50
    assert {cookie.name: cookie.value for cookie in jar}["n3"] == "w"


def test_so_are_eight_kibibytes() -> None:
    jar = jar_after(*(f"n{n}={'v' * 1_000}" for n in range(20)), f"n0={'w' * 3_000}", "n1=x")
    kept = {cookie.name: cookie.value for cookie in jar}
    assert list(kept) == [f"n{n}" for n in range(8)]
    assert kept["n0"] == "v" * 1_000
    assert kept["n1"] == "x"


async def test_a_server_is_told_what_it_set() -> None:
    async def set_some(exchange: Exchange) -> None:
        await exchange.respond(200, b"fine", {"set-cookie": f"n={len(server.asked)}; Path=/; Max-Age=999"})

    async with listening(set_some) as (server, port), exchanges_with(f"http://127.0.0.1:{port}/mcp") as http:
        for _ in range(3):
            async with http.open("GET", {}) as reply:
                await reply.body(100)
        assert [exchange.headers.get("cookie") for exchange in server.asked] == [None, "n=1", "n=2"]
