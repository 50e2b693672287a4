"""The start of a worker process, before trimcp can be imported. It is run as a file.

Its arguments are two descriptors: the connection to the parent, and a pipe that the parent holds open and never writes
to. The first line on the connection lists the directories in which to find modules.
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys


def die_with_parent(parent_pipe: int) -> None:
    """Let the kernel kill this process's group when the parent ends, even while C code holds the interpreter's lock."""
    if sys.platform != "linux":
        return  # other systems: the end of the connection is noticed as soon as Python code runs
    import fcntl

    try:
        fcntl.fcntl(parent_pipe, fcntl.F_SETOWN, -os.getpid())  # negative: its whole group
        fcntl.fcntl(parent_pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(parent_pipe, fcntl.F_SETFL, fcntl.fcntl(parent_pipe, fcntl.F_GETFL) | fcntl.FASYNC)
    except OSError:  # the kernel does not support it: as on other systems
        return
    poll = select.poll()
    poll.register(parent_pipe, select.POLLHUP)
    if poll.poll(0):  # the parent has ended already
        os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Read the setup and serve."""
    descriptor, parent_pipe = map(int, sys.argv[1:3])
    for each in (descriptor, parent_pipe):
        os.set_inheritable(each, False)  # processes that tools start must not inherit them
    die_with_parent(parent_pipe)
    connection = socket.socket(fileno=descriptor)
    incoming = connection.makefile("rb")
    line = incoming.readline()
    if not line:
        return
    setup = json.loads(line)
    sys.path[:] = setup["path"]
    sys.argv[:] = setup["argv"]
    from trimcp.worker_program.serve import serve

    serve(connection, incoming, setup["memory"])


if __name__ == "__main__":
    main()
