"""A browser, and the person before it: goes to a page, says who it is, and follows where that leads."""

from __future__ import annotations

import sys
import urllib.request

with urllib.request.urlopen(sys.argv[1], data=b"user=ann", timeout=30) as end:
    assert b"You can close this window" in end.read()
