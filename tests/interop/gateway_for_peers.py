"""A gateway over HTTP before the servers of a file. Prints where it is."""

from __future__ import annotations

import sys

import trimcp
from trimcp.compose.gateway import gateway
from trimcp.run import target_of

if __name__ == "__main__":
    made = gateway(sys.argv[1], prepare=target_of)
    trimcp.run_http(made, port=0, ready=lambda urls: print(*urls, flush=True))
