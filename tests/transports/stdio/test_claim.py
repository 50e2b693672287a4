"""A real process claims its standard input and output, whatever they are, and spoils them for nobody.

The child answers every request with its id and prints where it should not; the tests watch from outside.
"""

from __future__ import annotations

import os
import pty
import select
import signal
import socket
import subprocess
import sys
import termios
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

import orjson
import pytest

import trimcp

ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(trimcp.__file__).parent.parent)}
ENVIRONMENT.pop("PYTHONUNBUFFERED", None)

SERVER = """
import os, subprocess, sys, trio
print("printed before")
from trimcp.channel import Kind, Outgoing
from trimcp.transports.stdio.server import claim_stdio
from trimcp.wire.jsonrpc import Request, encode_result

def answer(message):
    kind = type(message).__name__
    if not isinstance(message, Request):
        return Outgoing(encode_result(0, {"kind": kind}), Kind.REPLY, 0)
    if message.method == "print":
        print("printed by Python")
        subprocess.run([sys.executable, "-c", "import sys; print('printed by a child:', repr(sys.stdin.read()))"])
        os.write(1, b"written to 1" + os.linesep.encode())
    if message.method == "modes":
        return Outgoing(encode_result(message.id, {"input": type(claim.receiver).__name__,
            "output": type(claim.sender).__name__}), Kind.REPLY, message.id)
    return Outgoing(encode_result(message.id, {"kind": kind}), Kind.REPLY, message.id)

import trimcp.transports.stdio.server as stdio
original = stdio.claim
def remember():
    global claim
    claim = original()
    return claim
stdio.claim = remember

async def main():
    try:
        async with claim_stdio() as channel:
            while True:
                batch = await channel.receive()
                await channel.send([answer(each.message) for each in batch])
    except trio.EndOfChannel:
        pass
    except trio.BrokenResourceError:
        print("broken", file=sys.stderr)

trio.run(main)
print("printed after")
"""


NO_REOPENING = (
    "import trimcp.transports.stdio.server\ntrimcp.transports.stdio.server._reopen = lambda fd, flags: None\n"
)


@contextmanager
def server(prelude: str = "", **streams: Any) -> Iterator[subprocess.Popen[bytes]]:
    process = subprocess.Popen([sys.executable, "-c", prelude + SERVER], env=ENVIRONMENT, **streams)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def request(id: int, method: str = "echo") -> bytes:
    return orjson.dumps({"jsonrpc": "2.0", "id": id, "method": method}) + b"\n"


def replies(text: bytes) -> list[Any]:
    return [orjson.loads(line) for line in text.splitlines()]


def line_from(stream: IO[bytes] | None) -> Any:
    assert stream is not None
    return orjson.loads(stream.readline())


def test_pipes_carry_messages_and_nothing_else() -> None:
    with server(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        out, err = process.communicate(request(1, "print") + request(2, "modes") + request(3)[:-1], timeout=60)
    assert process.returncode == 0
    *answers, after = out.splitlines()
    assert [orjson.loads(line) for line in answers] == [
        {"jsonrpc": "2.0", "id": 1, "result": {"kind": "Request"}},
        {"jsonrpc": "2.0", "id": 2, "result": {"input": "FdReceiver", "output": "FdSender"}},
        {"jsonrpc": "2.0", "id": 3, "result": {"kind": "Request"}},  # the last line came without a newline
    ]
    assert after == b"printed after", "descriptor 1 is given back at the end"
    assert err.splitlines() == [
        b"printed before",  # it was still in the buffer
        b"printed by Python",
        b"printed by a child: ''",
        b"written to 1",
    ]


def test_what_a_handler_starts_cannot_read_our_messages() -> None:
    with server(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(request(1, "print"))
        process.stdin.flush()
        # The handler's child reads to the end of its input, while ours stays open.
        assert select.select([process.stdout], [], [], 20)[0], "the child waits for our input"
        assert line_from(process.stdout)["id"] == 1


@pytest.mark.parametrize("kill", [False, True])
def test_the_parents_flags_never_change(kill: bool) -> None:
    """The parent keeps copies of the very descriptors it gave away, as shells do."""
    child_in, our_out = os.pipe()
    our_in, child_out = os.pipe()
    with server(stdin=child_in, stdout=child_out, stderr=subprocess.DEVNULL) as process:
        os.write(our_out, request(1))
        assert replies(os.read(our_in, 1000))[0]["id"] == 1
        assert os.get_blocking(child_in)
        assert os.get_blocking(child_out)
        if kill:
            process.send_signal(signal.SIGKILL)
        os.close(our_out)
        if not kill:
            os.close(child_in)
        process.wait(60)
        for fd in (child_out, *([child_in] if kill else [])):
            assert os.get_blocking(fd)
            os.close(fd)
    os.close(our_in)


def test_standard_error_on_the_same_pipe_keeps_blocking() -> None:
    with server(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(request(1, "modes"))
        process.stdin.flush()
        assert process.stdout.readline() == b"printed before\n"
        assert line_from(process.stdout)["result"]["output"] == "FdSender"
        assert not int(flags_of(process.pid, 2), 8) & os.O_NONBLOCK


def flags_of(pid: int, fd: int) -> str:
    if sys.platform != "linux":
        pytest.skip("no way to see another process's flags")
    text = Path(f"/proc/{pid}/fdinfo/{fd}").read_text()
    return next(line.split()[1] for line in text.splitlines() if line.startswith("flags:"))


@pytest.mark.parametrize(("prelude", "kind"), [("", "Fd"), (NO_REOPENING, "Thread")])
def test_a_terminal_keeps_blocking_even_after_a_kill(prelude: str, kind: str) -> None:
    controller, terminal = pty.openpty()
    modes = termios.tcgetattr(terminal)
    modes[1] &= ~termios.OPOST
    modes[3] &= ~termios.ECHO
    termios.tcsetattr(terminal, termios.TCSANOW, modes)
    with server(prelude, stdin=terminal, stdout=terminal, stderr=subprocess.PIPE) as process:
        os.write(controller, request(1, "modes"))
        with open(controller, "rb", buffering=0) as lines:
            assert lines.readline() == b"printed before\n"
            reply = line_from(lines)
            assert reply["result"] == {"input": f"{kind}Receiver", "output": f"{kind}Sender"}
            assert os.get_blocking(terminal)
            process.kill()
            process.wait(60)
            assert os.get_blocking(terminal)
    os.close(terminal)


def test_a_socket_pair_keeps_blocking() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs, server(stdin=theirs, stdout=theirs, stderr=subprocess.DEVNULL) as process:
        ours.settimeout(20)
        ours.sendall(request(1, "modes"))
        reply = orjson.loads(ours.recv(1000))
        assert reply["result"] == {"input": "FdReceiver", "output": "FdSender"}
        assert os.get_blocking(theirs.fileno())
        ours.shutdown(socket.SHUT_WR)
        assert process.wait(60) == 0


def test_regular_files(tmp_path: Path) -> None:
    (tmp_path / "in").write_bytes(request(1) + request(2, "modes"))
    with (
        (tmp_path / "in").open("rb") as source,
        (tmp_path / "out").open("wb") as target,
        server(stdin=source, stdout=target, stderr=subprocess.DEVNULL) as process,
    ):
        assert process.wait(60) == 0
    *answers, after = (tmp_path / "out").read_bytes().splitlines()
    assert [orjson.loads(line)["id"] for line in answers] == [1, 2]
    assert orjson.loads(answers[1])["result"] == {"input": "ThreadReceiver", "output": "ThreadSender"}
    assert after == b"printed after"


def test_dev_null() -> None:
    with server(stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE) as process:
        _, err = process.communicate(timeout=60)
        assert (process.returncode, err) == (0, b"printed before\n")


def shell(redirections: str, text: bytes) -> subprocess.CompletedProcess[bytes]:
    return subprocess.run(
        ["/bin/sh", "-c", f'exec "$0" -c "$1" {redirections}', sys.executable, SERVER],
        env=ENVIRONMENT,
        input=text,
        capture_output=True,
        timeout=60,
        check=False,
    )


def test_closed_input_is_the_end() -> None:
    done = shell("<&-", b"")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"printed after\n", b"printed before\n")


def test_closed_output_is_a_peer_that_is_gone() -> None:
    done = shell(">&-", request(1))
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"broken\n")


def test_closed_standard_error() -> None:
    done = shell("2>&-", request(1, "print"))
    assert done.returncode == 0
    assert [orjson.loads(line)["id"] for line in done.stdout.splitlines()[:-1]] == [1]


def test_a_reader_that_leaves_breaks_the_channel() -> None:
    with server(stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(request(1))
        process.stdin.flush()
        line_from(process.stdout)
        process.stdout.close()
        process.stdin.write(request(2))
        process.stdin.flush()
        assert process.stderr is not None
        assert b"broken" in process.stderr.read()


def test_without_a_second_way_to_the_pipe_flags_are_set_and_restored() -> None:
    """Where pipes cannot be opened again, the child sets the flag on its parent's and takes it back."""
    child_in, our_out = os.pipe()
    our_in, child_out = os.pipe()
    with server(NO_REOPENING, stdin=child_in, stdout=child_out, stderr=subprocess.DEVNULL) as process:
        os.write(our_out, request(1))
        assert replies(os.read(our_in, 1000))[0]["id"] == 1
        assert not os.get_blocking(child_in)
        assert not os.get_blocking(child_out)
        os.close(our_out)
        assert process.wait(60) == 0
        assert os.get_blocking(child_in)
        assert os.get_blocking(child_out)
    for fd in (child_in, our_in, child_out):
        os.close(fd)


def test_in_that_case_a_pipe_shared_with_standard_error_gets_a_thread() -> None:
    with server(NO_REOPENING, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        out, _ = process.communicate(request(1, "modes"), timeout=60)
    assert orjson.loads(out.splitlines()[1])["result"] == {"input": "FdReceiver", "output": "ThreadSender"}
