"""`grpc.reflection.v1.ServerReflection`: tells tools such as grpcurl which services there are, and their messages.

Its own messages are read and written here by hand: code generated for them would clash, in the process's one pool of
descriptors, with that of a program that has it too.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import struct_pb2

from trimcp.agent_tools.rpc_messages import PB
from trimcp.framing.grpc import GrpcDecoder, GrpcStatus, text_field, texts_of
from trimcp.transports.grpc.server import GrpcApp, GrpcFace, answer_each, end_call
from trimcp.transports.http.asgi.request import Receive, Scope, Send
from trimcp.transports.http.seams import Head

PATHS: Final = ("/grpc.reflection.v1.ServerReflection/", "/grpc.reflection.v1alpha.ServerReflection/")

_FILES: Final = {file.name: file for file in (PB.DESCRIPTOR, struct_pb2.DESCRIPTOR)}
_SERVICES: Final = sorted(f"{PB.DESCRIPTOR.package}.{name}" for name in PB.DESCRIPTOR.services_by_name)
_MOST: Final = 4_096  # bytes of a request: it is a name

# Fields of the request and of the response.
_BY_NAME, _BY_SYMBOL, _LIST = 3, 4, 7
_ORIGINAL, _FOUND, _LISTED, _FAILED = 2, 4, 6, 7


async def reflect(app: GrpcApp, face: GrpcFace, head: Head, scope: Scope, receive: Receive, send: Send) -> None:
    """Answer `ServerReflectionInfo`, each request of its stream. A `GrpcService`."""
    if head.path.endswith("/ServerReflectionInfo"):
        await answer_each(app, face, head, receive, send, GrpcDecoder(_MOST), answer_to)
    else:
        await end_call(send, GrpcStatus.UNIMPLEMENTED, "there is no such method")
        face.done(head, 404, 0)


def answer_to(request: bytes) -> bytes:
    """Return the ServerReflectionResponse to a ServerReflectionRequest."""
    fields = texts_of(request) or []
    kind, name = next(
        ((number, value) for number, value in fields if number in (_BY_NAME, _BY_SYMBOL, _LIST)), (0, b"")
    )
    text = name.decode("utf-8", "replace")
    if kind == _LIST:
        services = b"".join(text_field(1, text_field(1, service.encode())) for service in _SERVICES)
        answer = text_field(_LISTED, services)
    elif kind == _BY_NAME:
        answer = _files([text] if text in _FILES else [])
    elif kind == _BY_SYMBOL:
        answer = _files([file for file, descriptor in _FILES.items() if _defines(descriptor, text)])
    else:
        answer = _failure(GrpcStatus.UNIMPLEMENTED, "this is not answered")
    return text_field(_ORIGINAL, request) + answer


def _defines(file: Any, symbol: str) -> bool:
    """Whether a file defines a message, a service or one of their members."""
    package = file.package
    first = symbol.removeprefix(f"{package}.").partition(".")[0]
    known = {*file.message_types_by_name, *file.services_by_name, *file.enum_types_by_name}
    return symbol.startswith(f"{package}.") and first in known


def _files(names: list[str]) -> bytes:
    """Return the files and those that they import."""
    if not names:
        return _failure(GrpcStatus.NOT_FOUND, "there is no such file or symbol")
    wanted = [PB.DESCRIPTOR.name, struct_pb2.DESCRIPTOR.name] if PB.DESCRIPTOR.name in names else names
    return text_field(_FOUND, b"".join(text_field(1, _FILES[name].serialized_pb) for name in wanted))


def _failure(status: GrpcStatus, message: str) -> bytes:
    return text_field(_FAILED, bytes((0x08, status)) + text_field(2, message.encode()))
