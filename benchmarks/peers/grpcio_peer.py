"""Agent tools through gRPC, written on grpcio's asyncio server and client: what `agent_grpc.py` compares with.

`serve` prints its address; `client ADDRESS` makes as many calls as each line of standard input says, so many at a time.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import AsyncIterator
from typing import Any

import grpc
import grpc.aio
import orjson

from trimcp.agent_tools.proto import agent_tools_pb2

PB: Any = agent_tools_pb2
SERVICE = "trimcp.v1.AgentTools"


class Tools:
    """The two methods that are measured, with the checks that the tool's schema means."""

    async def call(self, request: Any, context: Any) -> Any:
        """Answer `Call`."""
        if request.tool_name != "echo":
            await context.abort(grpc.StatusCode.NOT_FOUND, "there is no such tool")
        arguments = orjson.loads(request.arguments_json)
        if type(arguments.get("text")) is not str:
            await context.abort(grpc.StatusCode.INVALID_ARGUMENT, "text must be a string")
        result = orjson.dumps(arguments["text"])
        return PB.ToolResponse(request_id=request.request_id, status="success", result_json=result)

    async def stream(self, request: Any, context: Any) -> AsyncIterator[Any]:
        """Answer `CallStream`."""
        number = orjson.loads(request.arguments_json)["n"]
        for each in range(1, number + 1):
            progress = PB.ToolProgress(request_id=request.request_id, progress=each, total=number)
            yield PB.CallEvent(progress=progress)
        response = PB.ToolResponse(request_id=request.request_id, status="success", result_json=b'"done"')
        yield PB.CallEvent(response=response)


async def serve() -> None:
    """Serve until killed."""
    tools, server = Tools(), grpc.aio.server()
    reading, writing = PB.ToolRequest.FromString, lambda message: message.SerializeToString()
    handlers = {
        "Call": grpc.unary_unary_rpc_method_handler(tools.call, reading, writing),
        "CallStream": grpc.unary_stream_rpc_method_handler(tools.stream, reading, writing),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


async def client(address: str) -> None:
    """Make calls, and say for each turn how much CPU they took."""
    async with grpc.aio.insecure_channel(address) as channel:
        call = channel.unary_unary(
            f"/{SERVICE}/Call",
            request_serializer=lambda message: message.SerializeToString(),
            response_deserializer=PB.ToolResponse.FromString,
        )
        texts = iter(range(1 << 60))

        async def caller(calls: int) -> None:
            for _ in range(calls):
                text = f"hello {next(texts)}"
                request = PB.ToolRequest(tool_name="echo", arguments_json=orjson.dumps({"text": text}), request_id="r")
                answer = await call(request)
                assert orjson.loads(answer.result_json) == text

        for line in sys.stdin:
            number, under_way = json.loads(line)
            began = time.process_time()
            await asyncio.gather(*(caller(number // under_way) for _ in range(under_way)))
            print((time.process_time() - began) / number * 1e6, flush=True)


if __name__ == "__main__":
    asyncio.run(serve() if sys.argv[1] == "serve" else client(sys.argv[2]))
