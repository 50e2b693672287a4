"""`grpc.reflection.v1.ServerReflection`: tells tools such as grpcurl which services there are, and their messages.

Its own messages are read and written here by hand: code generated for them would clash, in the process's one pool of
descriptors, with that of a program that has it too.
"""

from __future__ import annotations

from typing import Any, Final

from google.protobuf import descriptor_pb2

from trimcp.framing.grpc import GrpcStatus, text_field, texts_of
from trimcp.transports.grpc.server import GrpcRoutes, GrpcService, answer_each, status_response
from trimcp.transports.http.interfaces import Admitted, Head

PATHS: Final = ("/grpc.reflection.v1.ServerReflection/", "/grpc.reflection.v1alpha.ServerReflection/")

_MOST: Final = 4_096  # bytes of a request: it is a name

# Fields of the request and of the response.
_BY_NAME, _BY_SYMBOL, _LIST = 3, 4, 7
_ORIGINAL, _FOUND, _LISTED, _FAILED = 2, 4, 6, 7


class Reflection(GrpcService):
    """Answers what there is."""

    def __init__(self, *files: bytes) -> None:
        """`files` (descriptors) have the services that there are beside health checks, and what they import."""
        found = (descriptor_pb2.FileDescriptorProto.FromString(text) for text in files)
        self._files: dict[str, Any] = {file.name: file for file in (*found, _health())}

    def admit(self, routes: GrpcRoutes, head: Head) -> Admitted:
        """Return how to answer `ServerReflectionInfo`, each request of its stream."""
        if head.path.endswith("/ServerReflectionInfo"):
            return answer_each(self._answer, _MOST, head)
        return status_response(GrpcStatus.UNIMPLEMENTED, "there is no such method")

    def _answer(self, request: bytes) -> bytes:
        """Return the ServerReflectionResponse to a ServerReflectionRequest."""
        fields = texts_of(request) or []
        kind, name = next(
            ((number, value) for number, value in fields if number in (_BY_NAME, _BY_SYMBOL, _LIST)), (0, b"")
        )
        text, files = name.decode("utf-8", "replace"), self._files
        if kind == _LIST:
            services = sorted(f"{file.package}.{service.name}" for file in files.values() for service in file.service)
            answer = text_field(_LISTED, b"".join(text_field(1, text_field(1, each.encode())) for each in services))
        elif kind == _BY_NAME:
            answer = self._found(text if text in files else None)
        elif kind == _BY_SYMBOL:
            answer = self._found(next((name for name, file in files.items() if _defines(file, text)), None))
        else:
            answer = _failure(GrpcStatus.UNIMPLEMENTED, "this is not answered")
        return text_field(_ORIGINAL, request) + answer

    def _found(self, name: str | None) -> bytes:
        """Return a file and those that it imports."""
        if name is None:
            return _failure(GrpcStatus.NOT_FOUND, "there is no such file or symbol")
        names = (name, *self._files[name].dependency)
        return text_field(_FOUND, b"".join(text_field(1, self._files[each].SerializeToString()) for each in names))


def _health() -> Any:
    """Return the file of `grpc.health.v1.Health`, as others have it. It is in no pool."""
    file = descriptor_pb2.FileDescriptorProto(name="grpc/health/v1/health.proto", package="grpc.health.v1")
    file.syntax = "proto3"
    asked = file.message_type.add(name="HealthCheckRequest")
    asked.field.add(name="service", number=1, label="LABEL_OPTIONAL", type="TYPE_STRING", json_name="service")
    told = file.message_type.add(name="HealthCheckResponse")
    kind = told.enum_type.add(name="ServingStatus")
    for number, name in enumerate(("UNKNOWN", "SERVING", "NOT_SERVING", "SERVICE_UNKNOWN")):
        kind.value.add(name=name, number=number)
    status = told.field.add(name="status", number=1, label="LABEL_OPTIONAL", type="TYPE_ENUM", json_name="status")
    status.type_name = ".grpc.health.v1.HealthCheckResponse.ServingStatus"
    service = file.service.add(name="Health")
    for name, streams in (("Check", False), ("Watch", True)):
        method = service.method.add(name=name, server_streaming=streams)
        method.input_type = ".grpc.health.v1.HealthCheckRequest"
        method.output_type = ".grpc.health.v1.HealthCheckResponse"
    return file


def _defines(file: Any, symbol: str) -> bool:
    """Whether a file defines a message, a service or one of their members."""
    package = f"{file.package}."
    first = symbol.removeprefix(package).partition(".")[0]
    known = {each.name for each in (*file.message_type, *file.service, *file.enum_type)}
    return symbol.startswith(package) and first in known


def _failure(status: GrpcStatus, message: str) -> bytes:
    return text_field(_FAILED, bytes((0x08, status)) + text_field(2, message.encode()))
