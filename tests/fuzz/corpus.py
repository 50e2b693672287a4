"""What the targets start from: a few right inputs of each kind, and some that were wrong once.

python -m tests.fuzz.corpus FOLDER     writes them as files, a folder for each target, as atheris takes them
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from tests.peers.websockets import CONTINUATION, FIN, PING, TEXT, close, frame, message

__all__ = ["SEEDS", "write"]

_REQUEST: Final = b'{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{"name":"x","arguments":{"a":[1,{"id":2}]}}}'
_MESSAGES: Final = [
    _REQUEST,
    b'{"jsonrpc":"2.0","method":"notifications/cancelled","params":{"requestId":"1"}}',
    b'{"result":{},"jsonrpc":"2.0","id":"a\\u0062"}',
    b'{"jsonrpc":"2.0","id":7,"error":{"code":-32600,"message":"m","data":null}}',
    b'[{"jsonrpc":"2.0","id":1,"method":"ping"},5]',
    b'{"jsonrpc":"2.0","method":"m","params":[],"\\u0069d":18446744073709551616}',
    b'{"id":1,"id":2,"x":"\\ud800"}',
    b'{"params":' + b"[" * 130 + b"]" * 130 + b',"id":3}',
]
_POST: Final = b"POST /mcp HTTP/1.1\r\nHost: a\r\n"
_OK: Final = b"HTTP/1.1 200 OK\r\n"
_GET: Final = b"GET http://b/ HTTP/1.0\r\n\r\n"

SEEDS: Final[dict[str, list[bytes]]] = {
    "decode_lines": [
        b"\x02\x05" + b"\n".join(_MESSAGES) + b"\n",
        b"\x00\x01" + _REQUEST + b"\r\n\r\n{}\n",
        b"\x01\x03{}",
    ],
    "parse_message": _MESSAGES,
    "decode_events": [
        b"\x03\x02\xef\xbb\xbfid: 1\nevent: message\ndata: {\ndata:}\n\n: comment\r\nretry: 10\rdata\r\r",
        b"\x00\x01data: " + _REQUEST + b"\n\ndata: x\n\nid: \0\n\n",
    ],
    "gate_frames": [
        b"\x01\x04" + message(b"{}") + frame(TEXT, b"a") + frame(FIN | PING, b"p") + frame(FIN | CONTINUATION, b"b"),
        b"\x00\x01" + message(_REQUEST) + close(1000),
        b"\x00\x02" + frame(FIN | TEXT, _REQUEST, masked=False) + frame(FIN | TEXT, b"1", masked=False),
        b"\x00\x00" + frame(FIN | TEXT, b"", size=1 << 20),
    ],
    "parse_requests": [
        b"\x00\x03" + _POST + b"Content-Length: 2\r\n\r\n{}GET /a%20b?c=d HTTP/1.1\r\nhost: [::1]:80\r\n\r\n",
        b"\x00\x01"
        + _POST
        + b"Transfer-Encoding: chunked\r\n\r\n2;x=y\r\n{}\r\n0\r\nA: b\r\n\r\n\r\nGET http://b/ HTTP/1.0\r\n\r\n",
        b"\x00\x02"
        + _POST
        + b"Connection: upgrade\r\nUpgrade: websocket\r\nExpect: 100-continue\r\nX: a\r\n b\r\n\r\n",
    ],
    "parse_replies": [
        b"\x00\x03" + _OK + b"Content-Length: 2\r\nSet-Cookie: a=b\r\nSet-Cookie: c=d\r\n\r\n{}",
        b"\x00\x01HTTP/1.1 103 E\r\nLink: a\r\n\r\n" + _OK + b"Content-Length: 2\r\nConnection: close\r\n\r\n{}",
        b"\x00\x02" + _OK + b"Transfer-Encoding: chunked\r\n\r\n2;x=y\r\n{}\r\n00\r\nA: b\r\n\r\n" + _OK,
        b"\x00\x04" + _OK + b"X: a\r\n b\r\n\r\nuntil the end",
        b"\x00\x05HTTP/1.0 200 OK\r\nContent-Length: 4\r\nConnection: Keep-Alive\r\n\r\nbody",
        b"\x00\x01HTTP/1.1 204 No\r\nContent-Length: 5\r\n\r\n" + _OK + b"\r\n",
        b"\x00\x06HTTP/1.1 101 S\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n\x00\x01",
        b"\x00\x02HTTP/1.1 099 X\r\nContent-Length: 0\r\n\r\n",
        b"\x00\x02" + _OK + b"Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    ],
    "carry_headers": [b"plain", b" padded ", "=?base64?ä?=".encode(), b"=?base64?aGk=?=", b"=?base64??=", b"\0\x7f"],
    "gather_batches": [bytes([0x10, 0x06, 0x0D, 0x22, 0x0C, 0x02, 0x01]), bytes(range(0, 256, 7))],
    "match_uris": [
        b"file:///{+path}{?lines,q*}\0file:///a/b%2e%2e?lines=3&q=1",
        b"a://{x:3}{/y*}{.z}{x}\0a://abc/d/e.fabcd",
        b"{;k,v}{#f}\0;k=1;v#../x",
        b"n://{a}{b}\0n://%C3%A4%00",
        b"f://{+p}\0f://a%5C..%5Cb",
        b"f://{+p}\0f:///etc/%252e%252e/x",
    ],
    "judge_schemas": [
        b'{"type":"object","properties":{"a":{"type":"integer","x-mcp-header":"A"}},"required":["a"]}\0{"a":"x"}',
        b'{"$defs":{"n":{"anyOf":[{"type":"null"},{"properties":{"next":{"$ref":"#/$defs/n"}}}]}},"$ref":"#/$defs/n"}\0{"next":{"next":null}}',
        b'{"pattern":"^(a+)+$"}\0"aaaaaaaaaaaaaaaaaaaaaaaaaaaaa!"',
        b'{"$ref":"http://localhost/x"}\0{}',
        b'{"allOf":[{"$ref":"#"}]}\0[]',
        b'{"not":{"enum":[1,2]},"items":{"oneOf":[{"const":1},{"minimum":0}]}}\0[1,-1]',
    ],
}


def write(folder: Path) -> None:
    """Write the corpus as files."""
    for name, inputs in SEEDS.items():
        (folder / name).mkdir(parents=True, exist_ok=True)
        for number, data in enumerate(inputs):
            (folder / name / f"seed-{number}").write_bytes(data)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
