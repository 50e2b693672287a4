"""The command `trimcp`. Importing this loads neither click nor rich: they come with the extra `trimcp[cli]`."""

from __future__ import annotations

import sys

__all__ = ["main"]


def main() -> None:
    """Run the command with this process's arguments, and exit."""
    try:
        from trimcp.cli.app import app
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in ("click", "rich"):
            raise
        print(f'The command needs {error.name}, which is not installed: pip install "trimcp[cli]"', file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)  # 128 + SIGINT, as shells have it
    app(prog_name="trimcp")
