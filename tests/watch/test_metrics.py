"""What a server says to Prometheus, as Prometheus' own parser reads it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import httpx2
import pytest
import trio
from prometheus_client.parser import text_string_to_metric_families
from trio.testing import MockClock

import trimcp
import trimcp.testing
from trimcp.transports.http.interfaces import Head
from trimcp.watch import Metrics
from trimcp.watch.metrics import BUCKETS


def make_server(**options: Any) -> tuple[trimcp.Server[None], Metrics]:
    server: trimcp.Server[None] = trimcp.Server('my "index"\\\n', version="3")

    @server.tool
    async def build(seconds: float) -> str:
        await trio.sleep(seconds)
        if seconds > 100:
            raise trimcp.ToolError("too long")
        return "built"

    @server.resource("notes://{name}")
    async def note(name: str) -> str:
        return name

    return server, Metrics(server, **options)


def heavy() -> str:
    """For a worker process, which finds it by its name."""
    return "done"


def read(text: str) -> dict[tuple[str, frozenset[tuple[str, str]]], float]:
    families = list(text_string_to_metric_families(text))
    assert all(family.type != "unknown" and family.documentation for family in families)
    return {(one.name, frozenset(one.labels.items())): one.value for family in families for one in family.samples}


def key(name: str, /, **labels: str) -> tuple[str, frozenset[tuple[str, str]]]:
    return f"trimcp_{name}", frozenset(labels.items())


async def test_a_request_that_is_refused_took_no_time(autojump_clock: MockClock) -> None:
    """Trio's clock begins anywhere, so an age since its zero is any number."""
    server, metrics = make_server()
    autojump_clock.jump(1_000)
    async with trimcp.testing.connected(server) as session:
        await session.call_tool("build", {"seconds": 5})
        session.peer.draining.set()
        with pytest.raises(trimcp.RemoteError):
            await session.call_tool("build", {"seconds": 5})
        found = read(metrics.text())
    tool = {"method": "tools/call", "target": "build"}
    assert found[key("requests_ended_total", **tool, outcome="error")] == 1
    assert found[key("request_seconds_sum", **tool)] == pytest.approx(5)


async def test_a_name_that_a_caller_makes_up_is_not_told_apart() -> None:
    server, metrics = make_server()
    async with trimcp.testing.connected(server) as session:
        for number in range(3):
            with pytest.raises(trimcp.RemoteError):
                await session.call_tool(f"madeup{number}")
    found = read(metrics.text())
    assert found[key("requests_ended_total", method="tools/call", target="(others)", outcome="error")] == 3
    assert "madeup" not in metrics.text()


async def test_calls_are_counted_by_outcome_and_their_time_by_tool(autojump_clock: MockClock) -> None:
    server, metrics = make_server()
    async with trimcp.testing.connected(server) as session:
        for seconds in (0.003, 0.003, 7, 101):
            await session.call_tool("build", {"seconds": seconds})
        with trio.move_on_after(1):
            await session.call_tool("build", {"seconds": 9})
        await session.read_resource("notes://one")
        await session.read_resource("notes://two")
        found = read(metrics.text())
        bound = server.statistics().memory.bound
    tool = {"method": "tools/call", "target": "build"}
    assert found[key("info", name='my "index"\\\n', version="3")] == 1
    assert found[key("requests_ended_total", **tool, outcome="ok")] == 3
    assert found[key("requests_ended_total", **tool, outcome="failed")] == 1
    assert found[key("requests_ended_total", **tool, outcome="cancelled")] == 1
    assert found[key("requests_ended_total", method="resources/read", target="", outcome="ok")] == 2
    assert found[key("request_seconds_bucket", **tool, le="0.005")] == 2
    assert found[key("request_seconds_bucket", **tool, le="10")] == 4
    assert found[key("request_seconds_bucket", **tool, le="+Inf")] == found[key("request_seconds_count", **tool)] == 5
    assert found[key("request_seconds_sum", **tool)] == pytest.approx(0.006 + 7 + 101 + 1)
    assert found[key("sessions")] == 1
    assert found[key("memory_bound_bytes")] == bound
    assert found[key("lane_dropped_total", lane="progress")] == 0


async def test_nothing_is_counted_of_a_server_without_metrics() -> None:
    server = trimcp.Server("plain")
    async with trimcp.testing.connected(server):
        assert not server.on_finished


async def test_names_that_clients_make_up_do_not_grow_it(monkeypatch: pytest.MonkeyPatch) -> None:
    server, metrics = make_server()
    monkeypatch.setattr("trimcp.watch.metrics._MOST_TARGETS", 3)
    async with trimcp.testing.connected(server) as session:
        for number in range(20):
            with pytest.raises(trimcp.RemoteError):
                await session.call_tool(f"made up {number}")
            await session.read_resource(f"notes://{number}")
        found = read(metrics.text())
    targets = {dict(labels)["target"] for name, labels in found if name == "trimcp_request_seconds_count"}
    assert len(targets) <= 5
    assert found[key("requests_ended_total", method="tools/call", target="(others)", outcome="error")] >= 17


async def test_it_is_a_route_with_a_scope_of_its_own() -> None:
    server, metrics = make_server(scope="metrics")
    known = {
        "Bearer one": trimcp.Principal("ops", scopes=frozenset({"metrics"})),
        "Bearer two": trimcp.Principal("agent"),
    }

    def who(head: Head) -> trimcp.Principal | trimcp.Refused:
        return known.get(head.headers.get("authorization", ""), trimcp.Refused(401))

    settings = trimcp.HttpSettings(routes={"/metrics": metrics}, authenticate=who)
    app = trimcp.asgi_app(server, settings=settings)
    web = httpx2.AsyncClient(transport=httpx2.ASGITransport(app=app), base_url="http://localhost")
    async with app.lifespan(), web:
        assert (await web.get("/metrics")).status_code == 401
        assert (await web.get("/metrics", headers={"Authorization": "Bearer two"})).status_code == 403
        told = await web.get("/metrics", headers={"Authorization": "Bearer one"})
        assert (await web.post("/metrics", headers={"Authorization": "Bearer one"})).status_code == 405
        page = {"Authorization": "Bearer one", "Origin": "https://evil.example"}
        assert (await web.get("/metrics", headers=page)).status_code == 403
        rebound = {"Authorization": "Bearer one", "Host": "evil.example"}
        assert (await web.get("/metrics", headers=rebound)).status_code == 403
    assert told.status_code == 200
    assert told.headers["content-type"] == "text/plain; version=0.0.4; charset=utf-8"
    found = read(told.text)
    assert found[key("hosts", what="connections")] >= 0
    assert found[key("loop_lag_seconds")] >= 0


async def test_the_dashboard_asks_for_what_there_is() -> None:
    """Each query of docs/howto/grafana.json names metrics and labels that a server has."""
    dashboard = json.loads((Path(__file__).parents[2] / "docs/howto/grafana.json").read_text())
    server, metrics = make_server()

    server.add_tool(heavy, run="process", max_concurrent=1)
    async with trimcp.asgi_app(server).lifespan(), trimcp.testing.connected(server) as session:
        await session.call_tool("build", {"seconds": 0})
        await session.call_tool("heavy")
        text = metrics.text()
    known = {"instance", *re.findall(r"(trimcp_\w+)", text), *re.findall(r'[{,](\w+)="', text)}
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    queries += [each["query"] for each in dashboard["templating"]["list"] if each["type"] == "query"]
    assert len(queries) > 16
    of_prometheus = {"sum", "by", "rate", "increase", "histogram_quantile", "topk", "max", "label_values"}
    for query in queries:
        names = re.sub(r'"[^"]*"|\[\w+\]|\b\d[\d.]*\b', "", query)
        asked = set(re.findall(r"[a-z_]\w*", names)) - of_prometheus
        assert asked <= known, query
        assert any(name.startswith("trimcp_") for name in asked)


def test_buckets_rise() -> None:
    assert list(BUCKETS) == sorted(set(BUCKETS))
