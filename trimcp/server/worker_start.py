"""The first steps of a worker process, before anything of trimcp can be found. It is run as a file, not imported.

It knows two descriptors: the connection to the parent, and the leash, a pipe on which nothing is ever written. The
first line on the connection says where modules are found, as the parent finds them.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys


def hold_on_leash(leash: int) -> None:
    """Let the kernel kill this process's group once the parent is gone, whoever holds the interpreter lock then."""
    if sys.platform != "linux":
        return  # there the end of the connection tells, as soon as Python code runs
    import fcntl

    try:
        fcntl.fcntl(leash, fcntl.F_SETOWN, -os.getpid())  # negative: its whole group
        fcntl.fcntl(leash, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(leash, fcntl.F_SETFL, fcntl.fcntl(leash, fcntl.F_GETFL) | fcntl.FASYNC)
    except OSError:  # a kernel that cannot: as on other systems
        return
    if os.getppid() == 1:  # it was gone before
        os.killpg(0, signal.SIGKILL)


def main() -> None:
    """Read what this worker is to be, and be it."""
    descriptor, leash = map(int, sys.argv[1:3])
    for each in (descriptor, leash):
        os.set_inheritable(each, False)  # what the tools start has no business with them
    hold_on_leash(leash)
    connection = socket.socket(fileno=descriptor)
    incoming = connection.makefile("rb")
    line = incoming.readline()
    if not line:
        return
    setup = json.loads(line)
    sys.path[:] = setup["path"]
    sys.argv[:] = setup["argv"]
    from trimcp.server.worker import serve

    serve(connection, incoming, setup["memory"])


if __name__ == "__main__":
    main()
