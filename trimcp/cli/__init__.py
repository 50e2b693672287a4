"""The command `trimcp`. Importing this loads neither click nor rich: they come with the extra `trimcp[cli]`."""

from __future__ import annotations

import gc
import sys

__all__ = ["main"]


def main() -> None:
    """Run the command with this process's arguments, and exit."""
    # What is loaded now lives as long as the process, so nobody need look through it for garbage: neither while it is
    # loaded (a twentieth of the time), nor at the end, where that takes most of the time from the last word to the exit
    # (0.17 of 0.2 s). A server's own module is loaded after this and torn down as ever: files it left open are written.
    collecting = gc.isenabled()
    gc.disable()
    try:
        from trimcp.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("click", "rich"):
            raise
        print(f'The command needs {error.name}, which is not installed: pip install "trimcp[cli]"', file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT, as shells have it
    finally:
        gc.freeze()
        if collecting:
            gc.enable()
    app(prog_name="trimcp")
