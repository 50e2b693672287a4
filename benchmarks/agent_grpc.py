"""What gRPC costs: CPU of a server for a call of agent tools, and of a client, beside grpcio (asyncio) and grpc-go.

Run by itself: `python benchmarks/agent_grpc.py [--rounds N] [--calls N] [--check]`; with `--check` it ends with
status 1 where a bar of `bars.py` is missed. The same service is written on each. Every reply is checked; who calls the
servers is our client, and what the clients call is grpcio's server. grpc-go is left out where there is no Go.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

import attrs
import orjson
import trio
from names import GRPC_GO, GRPCIO, OURS
from processes import LOAD_CORE, SERVER_CORE, on_core

if TYPE_CHECKING:
    from bars import Bar

__all__ = ["Program", "measure", "running", "tell"]

HERE = Path(__file__).parent
SERVICE = "/trimcp.v1.AgentTools/"
REPORTS = 1_000
CLIENT = "grpc-client"
CELLS = {"grpc-1": 1, "grpc-64": 64, "grpc-stream": 0, CLIENT: 64}
"""The cells, with how many calls are under way; 0 for a stream of progress."""


# Programs


async def serve() -> None:
    """Serve ours until killed."""
    from check_cells import make_server

    import trimcp
    from trimcp.agent_tools import AgentTools

    server = make_server()
    async with trio.open_nursery() as nursery:
        tools = AgentTools(server)
        urls = await nursery.start(partial(trimcp.serve_grpc, server, port=0, agent_tools=tools))
        print(urls[0].removeprefix("grpc://"), flush=True)


async def load(address: str) -> None:
    """Do as much as each line of standard input says, and say what it took of CPU; every reply is checked."""
    from trimcp.agent_tools.proto import agent_tools_pb2
    from trimcp.framing.grpc import GrpcDecoder, message_frame
    from trimcp.transports.grpc.client import GrpcServer

    pb: Any = agent_tools_pb2
    texts = iter(range(1 << 60))
    async with GrpcServer(f"grpc://{address}").open() as connection:

        async def caller(calls: int) -> None:
            for _ in range(calls):
                text = f"hello {next(texts)}"
                request = pb.ToolRequest(tool_name="echo", arguments_json=orjson.dumps({"text": text}), request_id="r")
                answer = await connection.unary(f"{SERVICE}Call", request.SerializeToString())
                assert orjson.loads(pb.ToolResponse.FromString(answer).result_json) == text

        async def streamed(reports: int) -> None:
            arguments = orjson.dumps({"n": reports})
            request = pb.ToolRequest(tool_name="stream", arguments_json=arguments, request_id="r")
            decoder, seen = GrpcDecoder(1 << 20), 0
            async with connection.call(f"{SERVICE}CallStream") as call:
                await call.send(message_frame(request.SerializeToString()), end=True)
                while (message := await call.next_message(decoder)) is not None:
                    event = pb.CallEvent.FromString(message)
                    if event.HasField("progress"):
                        seen += 1
                        assert event.progress.progress == seen
                    else:
                        assert event.response.result_json == b'"done"'
            assert seen == reports

        for line in sys.stdin:
            number, under_way = json.loads(line)
            began = time.process_time()
            async with trio.open_nursery() as nursery:
                for _ in range(under_way):
                    nursery.start_soon(caller, number // under_way)
                if not under_way:
                    nursery.start_soon(streamed, number)
            print((time.process_time() - began) / number * 1e6, flush=True)


# Measuring


@attrs.define
class Program:
    """A process that is measured or measures, with its first line of output."""

    process: subprocess.Popen[str]
    said: str

    @property
    def cpu(self) -> float:
        """Seconds of CPU so far, of all its threads."""
        threads = Path(f"/proc/{self.process.pid}/task").glob("*/schedstat")
        return sum(int(thread.read_text().split()[0]) for thread in threads) / 1e9

    def turn(self, number: int, under_way: int) -> float:
        """Let it make calls; return the microseconds of its own CPU that each took."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"[{number},{under_way}]\n")
        self.process.stdin.flush()
        return float(self.process.stdout.readline())


@contextmanager
def running(core: int, *command: str, says: bool = False) -> Iterator[Program]:
    """Run a program as long as the block does."""
    process = subprocess.Popen(
        [*on_core(core), *command], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
    )
    try:
        assert process.stdout is not None
        yield Program(process, process.stdout.readline().strip() if says else "")
    finally:
        process.kill()
        process.communicate()


def built(python: str) -> str | None:
    """Return the server on grpc-go, built if it has changed; None where there is no Go."""
    go = shutil.which("go")
    if go is None:
        return None
    proto, source = "trimcp/agent_tools/proto/agent_tools.proto", HERE / "peers" / "grpc_go"
    texts = [(HERE.parent / proto).read_bytes(), *(path.read_bytes() for path in sorted(source.iterdir()))]
    cache = Path(os.environ.get("BENCH_PEERS", HERE.parent / ".nox" / ".cache" / "bench-peers"))
    folder = cache / f"grpc-go-{hashlib.sha256(b''.join(texts)).hexdigest()[:12]}"
    program = folder / "server"
    if not program.exists():
        shutil.copytree(source, folder, dirs_exist_ok=True)
        (folder / "pb").mkdir(exist_ok=True)
        environment = {**os.environ, "GOBIN": str(folder), "GOFLAGS": "-mod=mod"}
        do = partial(subprocess.run, check=True, cwd=folder, env=environment)
        do([go, "install", "google.golang.org/protobuf/cmd/protoc-gen-go"])
        subprocess.run(
            [
                *(python, "-m", "grpc_tools.protoc", "-I", str(HERE.parent), f"--go_out={folder}"),
                f"--plugin=protoc-gen-go={folder}/protoc-gen-go",
                *("--go_opt=module=bench", f"--go_opt=M{proto}=bench/pb", proto),
            ],
            check=True,
            cwd=HERE.parent,
        )
        do([go, "build", "-o", str(program), "."])
    return str(program)


def servers(python: str) -> dict[str, tuple[str, ...]]:
    """Return what starts each server."""
    found = {
        OURS: (python, __file__, "--serve"),
        GRPCIO: (python, str(HERE / "peers" / "grpcio_peer.py"), "serve"),
    }
    if (program := built(python)) is not None:
        found[GRPC_GO] = (program,)
    return found


def measure(
    peers: Sequence[Any] = (),
    *,
    rounds: int,
    quick: bool = False,
    cells: Sequence[str] = tuple(CELLS),
    calls: int = 4_096,
) -> list[dict[str, Any]]:
    """Return the CPU per call, or per message of a stream, of each round: a record for each peer and cell."""
    calls = calls // 4 if quick else calls
    python = peers[0].program[0] if peers else sys.executable
    taken: dict[tuple[str, str], list[float]] = {}
    with ExitStack() as stack:
        started = {
            peer: stack.enter_context(running(SERVER_CORE, *command, says=True))
            for peer, command in servers(python).items()
        }
        loads = {
            peer: stack.enter_context(running(LOAD_CORE, python, __file__, "--load", server.said))
            for peer, server in started.items()
        }
        clients = {OURS: loads[GRPCIO]}
        if CLIENT in cells:
            other = (python, str(HERE / "peers" / "grpcio_peer.py"), "client", started[GRPCIO].said)
            clients[GRPCIO] = stack.enter_context(running(LOAD_CORE, *other))
        for number in range(rounds + 1):
            for cell in cells:
                under_way = CELLS[cell]
                who = clients if cell == CLIENT else loads
                for peer in list(who)[:: 1 if number % 2 else -1]:
                    server = None if cell == CLIENT else started[peer]
                    spent = 0.0 if server is None else server.cpu
                    many = calls if under_way != 1 else calls // 2
                    own = who[peer].turn(many, under_way)
                    cost = own if server is None else (server.cpu - spent) / many * 1e6
                    if number:  # the first calls are slow everywhere
                        taken.setdefault((cell, peer), []).append(cost)
    return [
        {"cell": cell, "figure": "cpu", "peer": peer, "unit": "µs", "values": values}
        for (cell, peer), values in taken.items()
    ]


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="turns of each")
    parser.add_argument("--calls", type=int, default=4_096, help="calls in a turn")
    parser.add_argument("--cell", action="append", choices=CELLS, help="only this one; again for more")
    parser.add_argument("--check", action="store_true", help="fail where a bar is missed")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--load", help=argparse.SUPPRESS)
    options = parser.parse_args()
    with suppress(KeyboardInterrupt):
        if options.serve:
            return trio.run(serve)
        if options.load:
            return trio.run(load, options.load)
    found = measure(rounds=options.rounds, cells=options.cell or tuple(CELLS), calls=options.calls)
    from bars import GRPC_BARS

    return tell(found, GRPC_BARS if options.check else ())


def tell(found: Sequence[dict[str, Any]], bars: Sequence[Bar]) -> None:
    """Print what was measured, and end the program where it misses a bar."""
    cost = {(one["cell"], one["peer"]): median(one["values"]) for one in found}
    print(f"{'':<20}{'peer':<24}{'median':>10}{'least':>10}{'ours to it':>12}")
    for one in found:
        ratio = cost[one["cell"], OURS] / cost[one["cell"], one["peer"]]
        name = f"{one['cell']}, {one['unit']}"
        print(f"{name:<24}{one['peer']:<24}{median(one['values']):>10.1f}{min(one['values']):>10.1f}{ratio:>12.2f}")
    ratios = [
        (bar, peer, cost[bar.cell, OURS] / cost[bar.cell, peer])
        for bar in bars
        for peer in bar.against
        if (bar.cell, peer) in cost
    ]
    missed = [f"{bar.what}: {at:.2f} of {peer}, not {bar.limit:g}" for bar, peer, at in ratios if not bar.holds(at)]
    if missed:
        sys.exit("\n".join(missed))


if __name__ == "__main__":
    main()
