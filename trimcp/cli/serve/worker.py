"""The command `trimcp worker`: a process that carries out tasks, and serves nobody."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import attrs
import click
import trio

from trimcp.cli.exits import WORKER_EXIT_CODES, Failure, say
from trimcp.cli.loading import NO_TASKS, become_program, load_to_run
from trimcp.cli.options import SERVER, ProcessOptions, Subcommand, option, with_options
from trimcp.cli.text import theirs
from trimcp.run import signals, watched
from trimcp.server.server import Server

_SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "Tasks": ("store", "running"),
    "How it runs": ("grace", "admin", "gc_threshold", "watchdog"),
}


@attrs.frozen(kw_only=True)
class WorkerOptions(ProcessOptions):
    """How a process carries out tasks."""

    store: str | None = option(
        metavar="URL", help="Where they are kept: sqlite:///path, redis://host.  [default: as the server says]"
    )
    running: int | None = option(
        metavar="N", type=click.IntRange(1), help="How many at once.  [default: as the server says]"
    )


@click.command(cls=Subcommand, sections=_SECTIONS, epilog=WORKER_EXIT_CODES)
@click.argument("server", type=SERVER)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@with_options(WorkerOptions)
def worker(server: str, arguments: tuple[str, ...], options: WorkerOptions) -> None:
    """Carry out the tasks of SERVER, a FILE.py or package.module with a trimcp.Server, and serve nobody.

    Processes that serve it leave tasks in the store (`trimcp run --tasks`, or `server.tasks(workers=True)`); any number
    of workers takes them from there, and whoever asked for them takes turns. On Ctrl-C or SIGTERM it begins no more,
    lets those under way end, and leaves the rest to others; a second one ends it at once. What follows `--` becomes
    the program's own arguments.

    \b
    Examples:
      trimcp worker long_job.py --store sqlite:///var/lib/jobs.db
      trimcp worker package.module:server --store redis://cache.example:6379/0 --running 4
      trimcp worker long_job.py --store unix:///run/redis/redis.sock --grace 60 --admin
    """
    become_program(server, arguments)
    loaded = load_to_run(server, options).server
    bounds = {} if options.running is None else {"running": options.running}
    served = loaded.move_tasks(options.store, workers=False, grace=options.grace, **bounds)
    if served is None:
        raise Failure(NO_TASKS.format(name=server))
    if not served.store.durable:
        raise Failure("--store says where tasks are kept that other processes leave: sqlite:///path, redis://host")
    trio.run(_work, loaded, options)


async def _work(server: Server[Any], options: WorkerOptions) -> None:
    with signals() as stop, watched(server, options.watchdog):
        async with server.running():
            say(f"carrying out tasks of {theirs(server.info.name, 60)}; Ctrl-C ends it")
            await stop.wait()
            if count := server.statistics().running:
                tasks = "1 task under way has" if count == 1 else f"{count} tasks under way have"
                say(f"{tasks} up to {options.grace:g} s to end; Ctrl-C again ends at once")
