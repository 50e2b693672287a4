"""The command `trimcp`. Importing this loads neither click nor rich: they come with the extra `trimcp[cli]`."""

from __future__ import annotations

import gc
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command with this process's arguments, and exit."""
    # The modules imported here live as long as the process, so garbage collection over them is useless: it takes 5 % of
    # the import time, and at the exit 0.17 of 0.2 s. A server's own module is imported later and collected as usual, so
    # files that it left open are flushed.
    collecting = gc.isenabled()
    gc.disable()
    try:
        from trimcp.cli.app import app, find_command

        find_command(*sys.argv[1:2])
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("click", "rich"):
            raise
        print(f'The command needs {error.name}, which is not installed: pip install "trimcp[cli]"', file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT, as in shells
    finally:
        gc.freeze()
        if collecting:
            gc.enable()
    app(prog_name="trimcp")
