"""Lets mypy and pyright read a project of `trimcp new`, by its own settings: `nox -s types` runs it."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path


def main() -> int:
    """Return 0 if both checkers are content."""
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder, "weather")
        subprocess.run([sys.executable, "-m", "trimcp.cli", "new", "weather", "--directory", project], check=True)
        checkers = (["mypy"], ["pyright", "--pythonpath", sys.executable])
        return max(subprocess.run([sys.executable, "-m", *words], cwd=project).returncode for words in checkers)


if __name__ == "__main__":
    sys.exit(main())
