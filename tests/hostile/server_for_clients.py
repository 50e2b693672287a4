"""A server that means harm to its clients, run as a program: the path of its URL says what it does to a `tools/call`.

It writes its port to standard output and ends with its standard input. Plain threads and blocking sockets: it may wait,
sleep and write as long as it likes. What it saw of its clients is told at `/seen`.
"""

from __future__ import annotations

import base64
import gzip
import hashlib
import json
import random
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

JSON = "Content-Type: application/json"
EVENTS = "Content-Type: text/event-stream"
PIECE = b"x" * 65536

seen: Counter[str] = Counter()


class Asked:
    """One request, and ways to answer it."""

    def __init__(self, sock: socket.socket, method: str, path: str, headers: dict[str, str], body: bytes) -> None:
        self.sock, self.method, self.path, self.headers, self.body = sock, method, path, headers, body
        self.message: dict[str, Any] = json.loads(body) if body else {}
        self.id = self.message.get("id")
        self.token = (self.message.get("params") or {}).get("_meta", {}).get("progressToken")

    def head(self, status: int, *lines: str) -> None:
        self.write("\r\n".join([f"HTTP/1.1 {status} X", *lines, "", ""]).encode())

    def write(self, data: bytes) -> None:
        self.sock.sendall(data)

    def reply(self, body: bytes, *lines: str, status: int = 200) -> None:
        self.head(status, *(lines or (JSON,)), f"Content-Length: {len(body)}")
        self.write(body)

    def result(self, result: Any = None, *lines: str) -> None:
        self.reply(self.answer(result), JSON, *lines)

    def answer(self, result: Any = None) -> bytes:
        return json.dumps({"jsonrpc": "2.0", "id": self.id, "result": result or {"content": []}}).encode()

    def chunked(self, *lines: str) -> None:
        self.head(200, *lines, "Transfer-Encoding: chunked")

    def chunk(self, data: bytes) -> None:
        self.write(b"%x\r\n%b\r\n" % (len(data), data))

    def event(self, data: bytes, *fields: bytes) -> None:
        self.chunk(b"".join(b"%b\n" % field for field in fields) + b"data: %b\n\n" % data)

    def forever(self, write: Callable[[bytes], None], data: bytes = PIECE) -> None:
        while True:
            write(data)


# What it does to a call


def endless_body(asked: Asked) -> None:
    asked.chunked(JSON)
    asked.chunk(b'{"jsonrpc":"2.0","id":%d,"result":{"content":[{"type":"text","text":"' % asked.id)
    asked.forever(asked.chunk)


def endless_event(asked: Asked) -> None:
    asked.chunked(EVENTS)
    asked.chunk(b'data: {"jsonrpc":"2.0","id":%d,"result":{"content":[{"type":"text","text":"' % asked.id)
    asked.forever(asked.chunk)


def endless_line(asked: Asked) -> None:
    asked.chunked(EVENTS)
    asked.forever(asked.chunk)


def endless_head(asked: Asked) -> None:
    asked.write(b"HTTP/1.1 200 X\r\n")
    asked.forever(asked.write, b"X: " + b"y" * 1000 + b"\r\n")


def endless_beginning(asked: Asked) -> None:
    asked.forever(asked.write, b"HTTP/1.1 100 Continue\r\n\r\n" * 100)


def endless_status(asked: Asked) -> None:
    asked.write(b"HTTP/1.1 200 ")
    asked.forever(asked.write)


def endless_trailers(asked: Asked) -> None:
    asked.chunked(JSON)
    asked.chunk(asked.answer())
    asked.write(b"0\r\n")
    asked.forever(asked.write, b"X: " + b"y" * 1000 + b"\r\n")


def endless_extension(asked: Asked) -> None:
    asked.chunked(JSON)
    asked.write(b"1;")
    asked.forever(asked.write)


def endless_extensions(asked: Asked) -> None:
    asked.chunked(JSON)
    asked.forever(asked.write, b"1;" + b"x" * 1000 + b"\r\n \r\n")


def many_headers(asked: Asked) -> None:
    asked.result(None, *(f"X-{n}: {'v' * 20}" for n in range(10_000)))


def tiny_chunks(asked: Asked) -> None:
    """The answer, of a megabyte, in chunks of one byte."""
    asked.chunked(JSON)
    text = asked.answer({"content": [{"type": "text", "text": "x" * 1024 * 1024}]})
    asked.write(b"".join(b"1\r\n%c\r\n" % byte for byte in text) + b"0\r\n\r\n")


def endless_tiny_chunks(asked: Asked) -> None:
    asked.chunked(JSON)
    asked.forever(asked.write, b"1\r\n \r\n" * 10_000)


def bomb(asked: Asked) -> None:
    packed = gzip.compress(b" " * (256 * 1024 * 1024), 1)
    asked.reply(packed, JSON, "Content-Encoding: gzip")


def bomb_of_bombs(asked: Asked) -> None:
    packed = gzip.compress(gzip.compress(b" " * (256 * 1024 * 1024), 1))
    asked.reply(packed, JSON, "Content-Encoding: gzip, gzip")


def bomb_of_events(asked: Asked) -> None:
    packed = gzip.compress(b"data: " + b"x" * (256 * 1024 * 1024) + b"\n\n", 1)
    asked.reply(packed, EVENTS, "Content-Encoding: gzip")


def huge_length(asked: Asked) -> None:
    asked.head(200, JSON, "Content-Length: 999999999999")
    asked.forever(asked.write)


def elsewhere(asked: Asked) -> None:
    asked.head(307, f"Location: http://127.0.0.2:{asked.headers['x-port']}/away", "Content-Length: 0")


def around(asked: Asked) -> None:
    asked.head(308, f"Location: {asked.path}?{seen['tools/call']}", "Content-Length: 0")


def page(asked: Asked) -> None:
    asked.reply(b"<html>" + b"x" * 100_000, "Content-Type: text/html")


def garbage(asked: Asked) -> None:
    asked.reply(b'{"jsonrpc":"2.0","id":%d,"result":{"content":[{"text":"\xff\xfe' % asked.id)


def other_id(asked: Asked) -> None:
    asked.reply(b'{"jsonrpc":"2.0","id":987654,"result":{"content":[]}}')


def nothing(asked: Asked) -> None:
    asked.reply(b"")


def drip(asked: Asked) -> None:
    asked.chunked(JSON)
    while True:
        asked.chunk(b" ")
        time.sleep(0.2)


def not_found(asked: Asked) -> None:
    asked.reply(b"", status=404)


def later(asked: Asked) -> None:
    asked.reply(b"", "Retry-After: 1e9", status=503)


def much_later(asked: Asked) -> None:
    asked.reply(b"", "Retry-After: 1000000000", status=429)


def cookies(asked: Asked) -> None:
    if len(asked.headers.get("cookie", "")) > 16_000:
        seen["too many cookies"] += 1
    many = (f"Set-Cookie: n{seen['tools/call']}-{n}={'c' * 1000}; Max-Age=9999" for n in range(50))
    asked.result(None, *many)


def no_end(asked: Asked) -> None:
    asked.chunked(EVENTS)
    asked.event(asked.answer())
    asked.forever(asked.chunk, b": still here\n\n")


def cut(asked: Asked) -> None:
    asked.chunked(EVENTS)
    asked.chunk(b"id: 1\nretry: 1\ndata: {")


def again_and_again(asked: Asked) -> None:
    seen["streams"] += 1
    asked.chunked(EVENTS)
    asked.event(b"", b"id: %d" % seen["streams"], b"retry: 0")
    asked.chunk(b"")


def pings(asked: Asked) -> None:
    asked.chunked(EVENTS)
    for n in range(100_000):
        asked.event(b'{"jsonrpc":"2.0","id":"p%d","method":"ping"}' % n)
    asked.event(asked.answer())


def mutations(asked: Asked) -> None:
    from tests.hostile.mutations import from_a_server

    asked.chunked(EVENTS)
    for text in from_a_server(asked.token, 20_000):
        asked.event(text)
    asked.event(asked.answer())
    asked.chunk(b"")


def mutated_reply(asked: Asked) -> None:
    """An answer, plain or as events, with something wrong in its head or its body; nothing follows it."""
    from tests.hostile.mutations import changed, from_a_server

    seen["mutated"] += 1
    rng = random.Random(seen["mutated"])
    if rng.random() < 0.5:
        body, lines = asked.answer(), [JSON]
    else:
        told = *from_a_server(asked.token, 2), asked.answer()
        body, lines = b"".join(b"data: %b\n\n" % each for each in told), [EVENTS]
    if rng.random() < 0.3:
        body, lines = gzip.compress(body, 1), [*lines, "Content-Encoding: gzip"]
    lines = [f"HTTP/1.1 {rng.choice([200, 200, 200, 404, 500])} X", *lines, f"Content-Length: {len(body)}"]
    head = "\r\n".join([*lines, "", ""]).encode()
    said = changed(rng, head + body, len(head))
    asked.write(said.replace(b"Location", b"L"))
    raise OSError


# The rest of a server


def serve(sock: socket.socket) -> None:
    try:
        with sock, sock.makefile("rb") as file:
            while line := file.readline():
                method, target, _ = line.decode("latin-1").split(" ")
                headers = {}
                while (line := file.readline()) not in (b"\r\n", b""):
                    name, _, value = line.decode("latin-1").partition(":")
                    headers[name.lower()] = value.strip()
                body = file.read(int(headers.get("content-length", 0)))
                answer(Asked(sock, method, target, headers, body))
    except (OSError, ValueError):
        pass


def answer(asked: Asked) -> None:
    path = asked.path.partition("?")[0]
    said = asked.message.get("method", asked.method)
    seen[said] += 1
    if path == "/seen":
        asked.reply(json.dumps(seen).encode())
    elif path == "/away":
        seen["away"] += 1
        asked.head(200, "Content-Length: 0")
    elif path.startswith("/ws"):
        websocket(asked, path)
    elif path.startswith("/sse"):
        legacy_stream(asked, path)
    elif asked.method == "GET" and path in ("/again_and_again", "/mutations"):
        again_and_again(asked) if path == "/again_and_again" else asked.head(405, "Content-Length: 0")
        raise OSError
    elif asked.method != "POST":
        asked.head(405, "Content-Length: 0")
    elif said == "server/discover":
        asked.reply(b"", status=400)
    elif said == "initialize":
        revision = "2025-11-25"
        info = {"name": "h", "version": "1"}
        hello = {"protocolVersion": revision, "capabilities": {"tools": {}, "logging": {}}, "serverInfo": info}
        asked.result(hello, f"Mcp-Session-Id: s{seen['initialize']}")
    elif said == "tools/call" and asked.message["params"]["name"] == "harm":
        globals()[path[1:]](asked)
        if path[1:] in ("cut", "again_and_again"):
            raise OSError
    elif asked.id is None or "method" not in asked.message:
        asked.head(202, "Content-Length: 0")
    else:
        asked.result()


def legacy_stream(asked: Asked, path: str) -> None:
    """HTTP+SSE that goes wrong before it has begun."""
    if asked.method == "POST":
        return asked.head(405, "Content-Length: 0")
    asked.chunked(EVENTS)
    if path == "/sse_elsewhere":
        asked.event(f"http://127.0.0.2:{asked.headers['x-port']}/away".encode(), b"event: endpoint")
    elif path == "/sse_endless":
        asked.chunk(b"event: endpoint\ndata: /")
        asked.forever(asked.chunk)
    elif path == "/sse_comments":
        while True:
            asked.chunk(b": wait for it\n\n")
            time.sleep(0.05)
    time.sleep(60)
    return None


def websocket(asked: Asked, path: str) -> None:
    """WebSocket: a handshake, and then what hurts."""
    key = asked.headers["sec-websocket-key"] + "258EAFA5-E914-47DA-95CA-C5AB0DC85B11"
    accept = base64.b64encode(hashlib.sha1(key.encode()).digest()).decode()
    lines = ["Upgrade: websocket", "Connection: Upgrade", f"Sec-WebSocket-Accept: {accept}"]
    asked.head(101, *lines, "Sec-WebSocket-Protocol: mcp")
    if path == "/ws_endless":
        asked.write(b"\x01\x7f" + (1 << 40).to_bytes(8, "big"))
        asked.forever(asked.write)
    elif path == "/ws_fragments":
        asked.write(b"\x01\x01[")
        asked.forever(asked.write, b"\x00\x01[" * 10_000)
    elif path == "/ws_pings":
        asked.forever(asked.write, b"\x89\x7dp" + b"p" * 124)
    elif path in ("/ws_mutations", "/ws_frames"):
        websocket_mutations(asked, framed=path == "/ws_mutations")
    elif path == "/ws_garbage":
        asked.forever(asked.write, b"\x81\x04{]\\u")


def websocket_mutations(asked: Asked, *, framed: bool) -> None:
    """Answer a call after as many wrong messages as the query says, or with frames that are wrong themselves."""
    from tests.hostile.mutations import changed, from_a_server
    from tests.peers.websockets import FIN, PING, TEXT, frame

    def say(text: bytes) -> None:
        asked.write(frame(FIN | TEXT, text, masked=False))

    seen["websockets"] += 1
    many = int(asked.path.partition("?")[2] or 0)
    rng = random.Random(seen["websockets"])
    file = asked.sock.makefile("rb")
    while head := file.read(2):
        size = head[1] & 0x7F
        size = int.from_bytes(file.read(2), "big") if size == 126 else size
        key = file.read(4)
        text = bytes(byte ^ key[n % 4] for n, byte in enumerate(file.read(size)))
        if head[0] != FIN | TEXT:
            continue
        asked.message = json.loads(text)
        asked.id = asked.message.get("id")
        method, params = asked.message.get("method"), asked.message.get("params") or {}
        if method == "initialize":
            info = {"name": "h", "version": "1"}
            say(asked.answer({"protocolVersion": "2025-11-25", "capabilities": {"tools": {}}, "serverInfo": info}))
        elif asked.id is None or method is None:
            continue
        elif params.get("name") != "harm":
            say(asked.answer())
        elif framed:
            for each in from_a_server(params.get("_meta", {}).get("progressToken"), many):
                say(each.decode(errors="replace").encode())  # else it is the frame that is wrong
            say(asked.answer())
        else:
            right = [frame(FIN | TEXT, each, masked=False) for each in (*from_a_server(1, 3), asked.answer())]
            right.insert(rng.randrange(4), frame(FIN | PING, b"p", masked=False))
            asked.write(changed(rng, b"".join(right)))
            raise OSError


def main() -> None:
    listening = socket.create_server(("127.0.0.1", 0))
    port = listening.getsockname()[1]
    away = socket.create_server(("127.0.0.2", port))
    for server in (listening, away):
        threading.Thread(target=accept, args=(server,), daemon=True).start()
    print(port, flush=True)
    sys.stdin.read()


def accept(server: socket.socket) -> None:
    while True:
        sock, _ = server.accept()
        threading.Thread(target=serve, args=(sock,), daemon=True).start()


if __name__ == "__main__":
    main()
