"""The site has a folder for each version, between which its readers choose."""

from __future__ import annotations

import json
import re
import runpy
from pathlib import Path

from tests.pages import ROOT

WRITE = runpy.run_path(str(ROOT / "docs" / "versions.py"), run_name="versions")["write"]


def test_versions_are_listed_as_the_theme_reads_them_and_the_first_is_shown_first(tmp_path: Path) -> None:
    WRITE(tmp_path, ["0.3.0", "0.2.0", "dev"])
    listed = json.loads((tmp_path / "versions.json").read_text("utf-8"))
    assert [each["version"] for each in listed] == ["0.3.0", "0.2.0", "dev"]
    assert all(each.keys() == {"version", "title", "aliases"} for each in listed)
    page = (tmp_path / "index.html").read_text("utf-8")
    assert re.findall(r'(?:url=|href=")([^"]+)"', page) == ["0.3.0/", "0.3.0/"]


def test_every_page_asks_for_the_list_of_versions() -> None:
    assert "\nextra:\n  version:\n    provider: mike " in (ROOT / "mkdocs.yml").read_text("utf-8")
