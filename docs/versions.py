"""Writes what lets readers of the site choose a version: `python docs/versions.py SITE NEWEST [OLDER...]`.

Each version is a folder of the site. The theme shows `versions.json` beside the title of every page.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path


def write(site: Path, versions: list[str]) -> None:
    """Write the list of versions, and a page at the site's own address that leads to the first of them."""
    listed = [{"version": version, "title": version, "aliases": []} for version in versions]
    (site / "versions.json").write_text(json.dumps(listed, indent=2), "utf-8")
    newest = versions[0]
    (site / "index.html").write_text(
        "<!doctype html>\n"
        '<html lang="en">\n'
        f'<title>trimcp</title>\n<meta charset="utf-8">\n<meta http-equiv="refresh" content="0; url={newest}/">\n'
        f'<a href="{newest}/">trimcp {newest}</a>\n'
        "</html>\n",
        "utf-8",
    )


if __name__ == "__main__":
    write(Path(sys.argv[1]), sys.argv[2:])
