"""Tools in worker processes, as clients and authors see them: results, questions, crashes of every kind, bounds."""

from __future__ import annotations

import functools
import logging
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

import trimcp
from tests.workers import heavy_tools
from trimcp.channel import MessageChannel
from trimcp.testing import SlowChannel, connected
from trimcp.wire.revisions import V2025_06_18
from trimcp.wire.tools import CallToolResult

pytestmark = pytest.mark.slow

can_ask = pytest.mark.parametrize(
    "revision",
    [revision for revision in trimcp.REVISIONS if revision >= V2025_06_18],
    ids=lambda revision: revision.name,
)


def offering(*functions: Callable[..., object], **options: object) -> trimcp.Server:
    server = trimcp.Server("heavy", max_processes=1)
    for function in functions:
        server.add_tool(function, run="process", **options)
    return server


def inline(*functions: Callable[..., object]) -> trimcp.Server:
    server = trimcp.Server("heavy")
    for function in functions:
        server.add_tool(function, run="thread")
    return server


ALIKE = [
    (heavy_tools.move, {"point": {"x": 1, "when": "2026-01-31"}, "by": 2}),
    (heavy_tools.move, {"point": {"x": 1, "when": "2026-02-30"}}),  # fits its schema, and is no date
    (heavy_tools.move, {"point": {"x": "1", "when": "2026-01-31"}}),
    (heavy_tools.picture, {}),
    (heavy_tools.finished, {}),
    (heavy_tools.refuse, {}),
    (heavy_tools.big, {"size": 3_000_000}),
]


async def test_results_are_what_they_are_in_a_thread() -> None:
    functions = dict.fromkeys(function for function, _ in ALIKE)
    async with connected(inline(*functions)) as there, connected(offering(*functions)) as here:
        assert (await there.list_tools()) == (await here.list_tools())
        for function, arguments in ALIKE:
            wanted = await there.call_tool(function.__name__, arguments)
            assert await here.call_tool(function.__name__, arguments) == wanted
        assert wanted.content == [trimcp.Text("x" * 3_000_000)]


async def test_schemas_given_by_hand_hold_there_too() -> None:
    schema = {"type": "object", "properties": {"argument": {"type": "integer"}}}
    output = {"type": "object", "properties": {"result": {"type": "string"}}, "required": ["result"]}
    server = offering(heavy_tools.whole, input_schema=schema)
    server.add_tool(heavy_tools.whole, name="promised", run="process", input_schema=schema, output_schema=output)
    async with connected(server) as session:
        assert (await session.call_tool("whole", {"argument": 3})).structured_content == {"argument": 3}
        with pytest.raises(trimcp.RemoteError, match="internal error"):
            await session.call_tool("promised", {"argument": 3})


async def test_progress_and_logs_come_in_order_and_before_the_result() -> None:
    server, client = offering(heavy_tools.report), trimcp.Client("c")
    heard: list[object] = []

    @client.logging
    async def hear(params: trimcp.LogMessage) -> None:
        heard.append(params.data)

    async with connected(server, client, revision=trimcp.LATEST_LEGACY) as session:
        await session.set_log_level("debug")
        async with session.calling("report", {"steps": 500}) as call:
            steps = [(step.progress, step.total, step.message) async for step in call.progress]
            result = await call.result()
        assert steps == [(step, 500, f"step {step}") for step in range(1, 501)]
        assert result.content == [trimcp.Text("reported")]
        await trio.testing.wait_all_tasks_blocked()
        assert heard == [{"step": step} for step in range(1, 501)]


async def test_a_tool_there_knows_whether_progress_is_wanted() -> None:
    async with connected(offering(heavy_tools.progress_is_wanted)) as session:
        assert (await session.call_tool("progress_is_wanted")).structured_content == {"result": False}
        async with session.calling("progress_is_wanted") as call:
            assert (await call.result()).structured_content == {"result": True}


async def test_a_slow_client_slows_the_worker_down_and_loses_nothing(tmp_path: Path) -> None:
    count, file = 600, tmp_path / "said"  # 6 MB
    wires: list[SlowChannel] = []

    def slowly(channel: MessageChannel) -> MessageChannel:
        wires.append(SlowChannel(channel))
        return wires[0]

    def said() -> int:
        return file.stat().st_size

    client = trimcp.Client("c", limits=trimcp.Limits(progress_kept=count, kept_bytes=2**30))
    server, arguments = offering(heavy_tools.chatter), {"file": str(file), "count": count}
    async with (
        connected(server, client, framed=True, wrap=slowly) as session,
        session.calling("chatter", arguments) as call,
    ):
        first = await call.progress.receive()
        wires[0].stop_reading()
        before = 0
        while said() != before:  # nothing tells that a process waits but that it does not go on
            before = said()
            await trio.sleep(0.3)
        assert first.progress <= said() < count
        wires[0].resume()
        assert [step.progress async for step in call.progress] == list(range(2, count + 1))
        assert (await call.result()).content == [trimcp.Text("said")]


async def test_the_facts_of_the_request_travel() -> None:
    async with connected(offering(heavy_tools.facts, timeout=100), trimcp.Client("process-test")) as session:
        result = await session.call_tool("facts", meta={"example/key": 7, "traceparent": "00-1-2-01"})
    left = result.structured_content.pop("left")
    assert 60 < left <= 100
    assert result.structured_content == {
        "id": True,
        "method": "tools/call",
        "revision": trimcp.LATEST.name,
        "peer": "process-test",
        "capabilities": "ClientCapabilities",
        "principal": None,
        "meta": 7,
        "trace": {"traceparent": "00-1-2-01"},
        "headers": {},
        "cancelled": [None, None],
        "state": 'the state of the lifespan is not here: run="process" gives a tool a process of its own',
    }


@can_ask
async def test_a_process_asks_the_user(revision: trimcp.Revision) -> None:
    server, client = offering(heavy_tools.greet, heavy_tools.declared, heavy_tools.declared_whole), trimcp.Client("c")

    @client.elicitation
    async def ask(params: trimcp.ElicitParams) -> trimcp.ElicitResult:
        return trimcp.ElicitResult("accept", {"name": "Ada"})

    async with connected(server, client, revision=revision) as session:
        assert (await session.call_tool("greet")).content == [trimcp.Text("accept Ada")]
        assert (await session.call_tool("declared")).content == [trimcp.Text("Hello Ada")]
        assert (await session.call_tool("declared_whole")).content == [trimcp.Text("Hello accept")]


async def test_a_client_that_cannot_be_asked_is_an_error_the_tool_can_catch() -> None:
    async with connected(offering(heavy_tools.try_to_ask), revision=trimcp.LATEST_LEGACY) as session:
        (said,) = (await session.call_tool("try_to_ask")).content
    assert said.text.startswith("CannotAsk: ")


CRASHES = [
    (heavy_tools.leave, {"code": 3}, {}, "leave failed: its process ended with exit code 3"),
    (heavy_tools.crash, {"number": 15}, {}, "crash failed: its process was ended by SIGTERM"),
    (
        heavy_tools.crash,
        {"number": 9},
        {},
        "crash failed: its process was ended by SIGKILL; perhaps the system ran out of memory",
    ),
    (heavy_tools.segfault, {}, {}, "segfault failed: its process was ended by SIGSEGV"),
    (heavy_tools.leave_a_fork, {}, {}, "leave_a_fork failed: its process ended with exit code 5"),
    (heavy_tools.eat, {}, {"memory": 512 * 2**20}, "eat failed: its process needed more than 512 MiB of memory"),
    (heavy_tools.burn, {}, {"cpu_time": 0.5}, "burn failed: its process used more than 1 s of processor time"),
]


@pytest.mark.parametrize(
    ("function", "arguments", "options", "told"), CRASHES, ids=[f"{each[0].__name__}-{each[1]}" for each in CRASHES]
)
async def test_the_end_of_a_worker_is_a_tool_error_that_says_how(
    function: Callable[..., object],
    arguments: dict[str, object],
    options: dict[str, object],
    told: str,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("PYTHONUNBUFFERED", raising=False)  # what it printed is there all the same
    server = offering(function, **options)
    server.add_tool(heavy_tools.pid, run="process", **options)
    async with connected(server) as session:
        begun = time.perf_counter()
        result = await session.call_tool(function.__name__, arguments)
        print(f"{function.__name__}: {time.perf_counter() - begun:.2f} s")
        assert result.is_error
        assert result.content == [trimcp.Text(told)]
        assert (await session.call_tool("pid")).is_error is not True, "the next one has another process"
        (running,) = server.runs
        statistics = running.pools.use_processes().statistics()
        assert (statistics.started, statistics.crashed, statistics.killed) == (2, 1, 0)
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.levelno == logging.ERROR
    how = told.split("its process ")[1]
    assert f"of the tool {function.__name__} {how}" in record.getMessage()
    words = {"leave": "these were my last words", "segfault": "Fatal Python error", "eat": "MemoryError"}
    assert words.get(function.__name__, "") in record.getMessage()
    if function is heavy_tools.eat:
        had = re.search(r"^    \| had (\d+) MiB$", record.getMessage(), re.MULTILINE)
        assert had is not None
        assert 10 < int(had[1]) < 512


async def test_what_a_function_raises_is_logged_whole_and_told_to_nobody(caplog: pytest.LogCaptureFixture) -> None:
    async with connected(offering(heavy_tools.fail, heavy_tools.pid)) as session:
        first = (await session.call_tool("pid")).structured_content
        with pytest.raises(trimcp.RemoteError) as caught:
            await session.call_tool("fail")
        assert (caught.value.message, caught.value.data) == ("internal error", None)
        assert (await session.call_tool("pid")).structured_content == first, "the process is none the worse for it"
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert record.exc_info is not None
    text = logging.Formatter().formatException(record.exc_info)
    assert 'raise ValueError("with a secret")' in text
    assert "heavy_tools.py" in text
    assert "ValueError: with a secret" in text
    assert "trimcp/worker_program/serve.py" not in caplog.text


async def test_an_exit_in_a_function_is_a_crash_of_its_call_and_the_process_goes_on(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connected(offering(heavy_tools.leave_by_exit, heavy_tools.pid)) as session:
        first = (await session.call_tool("pid")).structured_content
        with pytest.raises(trimcp.RemoteError, match="internal error"):
            await session.call_tool("leave_by_exit")
        assert (await session.call_tool("pid")).structured_content == first
    (record,) = [record for record in caplog.records if record.levelno >= logging.WARNING]
    assert "'leave_by_exit'" in record.getMessage()
    assert "heavy_tools.py" in caplog.text
    assert "SystemExit: 4" in caplog.text


async def test_errors_of_the_protocol_stay_themselves() -> None:
    functions = (heavy_tools.reply_error, heavy_tools.report_twice, heavy_tools.nothing_json_can_carry)
    async with connected(offering(*functions)) as session:
        with pytest.raises(trimcp.RemoteError) as caught:
            await session.call_tool("reply_error")
        assert (caught.value.code, caught.value.message, caught.value.data) == (7, "my own", {"why": [1]})
        await session.call_tool("report_twice")  # progress that does not grow is dropped
        with pytest.raises(trimcp.RemoteError, match="internal error"):
            await session.call_tool("nothing_json_can_carry")


async def test_a_bound_on_processor_time_is_that_of_each_call() -> None:
    """A process that is used again has used some before."""
    server = offering(heavy_tools.busy_for, cpu_time=1.0)
    async with connected(server) as session:
        for _ in range(5):
            result = await session.call_tool("busy_for", {"seconds": 0.4})
            assert result.content == [trimcp.Text("done")], result


# What is refused when the tool is added


def test_what_a_worker_could_not_find_is_refused_with_what_to_do() -> None:
    def nested() -> None: ...

    hint = "needs a function at the top level of a module"
    for function in (nested, lambda: None, heavy_tools.Point(1, None).__eq__):
        with pytest.raises(TypeError, match=hint):
            offering(function, name="x")
    with pytest.raises(TypeError, match=hint):
        offering(functools.partial(heavy_tools.big, 3), name="x")


def test_an_async_function_is_refused() -> None:
    async def work() -> None: ...

    with pytest.raises(TypeError, match='run="process" is for sync functions'):
        offering(work)


def test_bounds_are_positive_and_only_for_processes() -> None:
    with pytest.raises(ValueError, match="memory is a number greater than 0 or None, not 0"):
        offering(heavy_tools.pid, memory=0)
    with pytest.raises(ValueError, match="cpu_time is a number greater than 0 or None, not -1"):
        offering(heavy_tools.pid, cpu_time=-1)
    with pytest.raises(TypeError, match="memory and cpu_time bound a process of its own"):
        trimcp.Server("s").add_tool(heavy_tools.pid, memory=2**30)
    with pytest.raises(TypeError, match="run must be 'inline' or 'thread', not 'process'"):
        trimcp.Server("s").resource("x:///y", run="process")(heavy_tools.pid)


async def test_a_name_that_stands_for_something_else_is_found_at_the_first_call(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async with connected(offering(heavy_tools.not_what_it_seems)) as session:
        with pytest.raises(trimcp.RemoteError, match="internal error"):
            await session.call_tool("thread_count", {"argument": 1})
    assert "is not the function of the tool thread_count" in caplog.text


def test_a_server_without_such_tools_loads_nothing_of_it() -> None:
    import subprocess

    program = """
import sys, trio, trimcp
from trimcp.channel import MessageChannel
from trimcp.testing import SlowChannel, connected
server = trimcp.Server("s")
@server.tool
def echo() -> str:
    return "x"
async def main():
    async with connected(server) as session:
        await session.call_tool("echo")
trio.run(main)
print([name for name in sys.modules if name.startswith(("trimcp.workers.", "trimcp.worker_program."))])
"""
    root = Path(trimcp.__file__).parent.parent
    done = subprocess.run([sys.executable, "-c", program], cwd=root, capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_both_results_have_a_name() -> None:
    from trimcp.workers.remote import RESULTS

    assert RESULTS["CallToolResult"] is CallToolResult
