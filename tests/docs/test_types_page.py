"""The page on types says what the code does: our columns are measured again, those of others are kept beside it."""

from __future__ import annotations

import json
import runpy

from tests.pages import ROOT


def test_the_page_on_types_is_current() -> None:
    script = runpy.run_path(str(ROOT / "docs" / "types_page.py"))
    theirs = json.loads(script["THEIRS"].read_text("utf-8"))
    assert script["page"](script["measure_ours"](), theirs) == script["PAGE"].read_text("utf-8"), (
        "write it anew: python docs/types_page.py"
    )
