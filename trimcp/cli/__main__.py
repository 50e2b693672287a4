"""`python -m trimcp.cli`: the command, where its script is not on PATH."""

from __future__ import annotations

from trimcp.cli import main

main()
