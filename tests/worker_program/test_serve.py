"""Inside a worker: what earlier calls left running is not heard, and how functions are found."""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from queue import SimpleQueue

import orjson
import pytest

import trimcp
from tests.workers import heavy_tools
from tests.workers.test_pool import offering
from trimcp.testing import connected
from trimcp.worker_program import serve as worker
from trimcp.workers.packing import pack


@pytest.mark.slow
async def test_a_thread_that_outlives_its_call_is_told_so() -> None:
    async with connected(offering(heavy_tools.leave_a_thread, heavy_tools.hear_of_the_thread, most=1)) as session:
        async with session.calling("leave_a_thread") as call:
            assert (await call.result()).content == [trimcp.Text("left")]
        result = await session.call_tool("hear_of_the_thread")
    assert result.structured_content == {"result": ["the request is over; its context can no longer be used"]}


def test_a_question_waits_for_its_own_answer() -> None:
    """Answers may come in another order than the questions of several threads."""
    ours, theirs = socket.socketpair()
    with ours, theirs:
        link = worker.ParentConnection(theirs)
        call = "1"
        link.begin(call)
        answers: SimpleQueue[object] = SimpleQueue()

        def ask(name: str) -> None:
            try:
                answers.put((name, link.ask(call, {"method": name})))
            except trimcp.CannotAsk as error:
                answers.put((name, str(error)))

        threads = [threading.Thread(target=ask, args=(name,)) for name in ("a", "b")]
        incoming = ours.makefile("rb")
        asked = {}
        for thread in threads:
            thread.start()
            said = orjson.loads(incoming.readline())
            asked[said["method"]] = said["id"]
        for line in (
            {"do": "answer", "id": asked["b"], "value": 2},
            {"do": "answer", "id": asked["a"], "error": pack(trimcp.CannotAsk("no"))},
        ):
            link._waiting[line["id"]].put(line)
        found = {answers.get(), answers.get()}
        for thread in threads:
            thread.join()
    assert found == {("a", "no"), ("b", 2)}
    assert link._waiting == {}


def recipe(path: Path, *, found_as: str) -> dict[str, object]:
    return {"name": "f", "module": found_as, "found_as": found_as, "file": str(path), "qualname": "f", "options": {}}


@pytest.fixture
def own_modules() -> Iterator[None]:
    """Forget these modules. Others stay: what is imported twice has two classes of each name."""
    yield
    for name in [name for name in sys.modules if name.startswith("trimcp_same_name")]:
        del sys.modules[name]


def test_a_module_that_its_name_does_not_lead_to_is_loaded_from_its_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_modules: None
) -> None:
    """As `trimcp run` loads one, and where another of the name is found first."""
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
        (folder / "trimcp_same_name.py").write_text(f"def f() -> str:\n    return {folder.name!r}\n")
    monkeypatch.syspath_prepend(str(first))
    tool = worker._build(recipe(second / "trimcp_same_name.py", found_as="trimcp_same_name"))
    assert tool.prepared.function() == "second"
    tool = worker._build(recipe(second / "trimcp_same_name.py", found_as="trimcp_same_name__server"))
    assert tool.prepared.function() == "second"
    assert not worker.loading


def test_a_module_that_fails_to_load_is_tried_anew(tmp_path: Path) -> None:
    file = tmp_path / "trimcp_broken.py"
    file.write_text("raise RuntimeError('not yet')\n")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="not yet"):
            worker._build(recipe(file, found_as="trimcp_broken"))
    assert "trimcp_broken" not in sys.modules


def test_serving_is_refused_while_a_module_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    import trio

    monkeypatch.setattr(worker, "loading", True)
    with pytest.raises(trimcp.LocalError, match="must not serve it"):
        trio.run(trimcp.Server("s").serve, None)


def test_its_group_ends_when_the_parent_is_gone() -> None:
    """In a process of its own that leads its group; `listen` does not come back."""
    import subprocess

    program = """
import io, socket, subprocess, sys
from trimcp.worker_program.serve import ParentConnection
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print(child.pid, flush=True)
ParentConnection(socket.socketpair()[0]).listen(io.BytesIO(b""))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, process_group=0, timeout=60)
    assert done.returncode == -9, done.stderr
    give_up = time.monotonic() + 30
    while _runs(int(done.stdout)) and time.monotonic() < give_up:
        time.sleep(0.01)  # both were killed, each ends on its own
    assert not _runs(int(done.stdout))
    assert os.getpgrp() != int(done.stdout)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False
