"""How the runner of the conformance suite judges, without the suite."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.conformance.run import (
    Case,
    Outcome,
    Reason,
    describe,
    judge,
    read_folder,
    read_list,
    read_results,
    read_words,
    summary,
)

CASE = Case("server", "tools-list", "2025-11-25", "own")


def check(status: str, id: str = "a-check", **more: Any) -> dict[str, Any]:
    return {"id": id, "status": status, "description": "it works", **more}


def judged(*checks: dict[str, Any], complaint: str | None = None, reasons: Sequence[Reason] = ()) -> Outcome:
    return judge(CASE, checks, complaint, 1.0, reasons)


def test_success() -> None:
    outcome = judged(check("SUCCESS"), check("INFO"), check("SUCCESS", "wire-schema-valid"))
    assert (outcome.passed, outcome.problems, outcome.forgiven) == (2, [], [])
    assert describe(outcome).startswith("ok ")


def test_whatever_is_not_success_is_a_problem() -> None:
    for status in ("FAILURE", "WARNING", "SKIPPED", "something new"):
        outcome = judged(check("SUCCESS"), check(status, errorMessage="because"))
        assert outcome.problems == [f"{status} a-check: because"]
        assert describe(outcome).startswith("FAIL")
    assert judged(check("FAILURE", details={"message": "because"})).problems == ["FAILURE a-check: because"]
    assert judged(check("FAILURE")).problems == ["FAILURE a-check: it works"]


def test_a_reason_forgives_all_but_a_failure() -> None:
    good = check("SUCCESS", "another")
    bad = check("SKIPPED", errorMessage="no such method here")
    outcome = judged(good, bad, reasons=[Reason("tools-list", "a-check", "no such method", "it never had one")])
    assert (outcome.problems, outcome.forgiven) == ([], ["SKIPPED a-check: it never had one"])
    for others in (("ping", "a-check", ""), ("tools-list", "b-check", ""), ("tools-list", "a-check", "no such tool")):
        assert judged(good, bad, reasons=[Reason(*others, "another's reason")]).problems
    failed = check("FAILURE", errorMessage="no such method here")
    assert judged(good, failed, reasons=[Reason("tools-list", "a-check", "", "no")]).problems


def test_what_checks_nothing_has_failed() -> None:
    assert judged().problems
    assert judged(check("INFO"), check("SUCCESS", "wire-schema-valid")).problems


def test_a_complaint_is_a_problem() -> None:
    assert judged(check("SUCCESS"), complaint="it hung").problems == ["it hung"]


def test_reading_the_list() -> None:
    text = (
        "Server scenarios (test against a server):\n  - ping [2025-06-18]\n\n"
        "Client scenarios (test against a client):\n  - tools_call [2025-06-18,2025-11-25]\n  - auth/x [2025-11-25]\n"
        "  - auth/more [extension]\n\n"
        "Authorization server scenarios (test against an authorization server):\n  - metadata [2025-11-25]\n"
    )
    assert read_list(text) == {
        "server": {"2025-06-18": ["ping"]},
        "client": {"2025-06-18": ["tools_call"], "2025-11-25": ["tools_call", "auth/x"], "extension": ["auth/more"]},
    }


def test_reading_what_was_said_and_written_of_several(tmp_path: Path) -> None:
    said = read_words(
        "Running\n\n=== Running scenario: ping ===\nwell\n\n=== Running scenario: ping-2 ===\nnot so well\n"
    )
    assert {name: text.strip() for name, text in said.items()} == {"ping": "well", "ping-2": "not so well"}
    for name, status in (("ping", "SUCCESS"), ("ping-2", "FAILURE")):
        folder = tmp_path / f"server-{name}-2026-11-29T09-12-29-400Z"
        folder.mkdir()
        (folder / "checks.json").write_text(json.dumps([check(status)]))
        ended = datetime(2026, 11, 29, 9, 12, 31, tzinfo=UTC).timestamp()
        os.utime(folder / "checks.json", (ended, ended))
        found, seconds = read_folder(tmp_path, name)
        assert read_results(found, "") == ([check(status)], None)
        assert round(seconds, 3) == 1.6
    for missing in ("pin", "tools-list"):
        assert read_results(read_folder(tmp_path, missing)[0], "it broke") == (
            [],
            "the suite checked nothing: it broke",
        )


def test_reading_results(tmp_path: Path) -> None:
    assert read_results(tmp_path, "SKIPPED: scenario is not applicable")[0] == []
    assert "not applicable" in (read_results(tmp_path, "SKIPPED: scenario is not applicable")[1] or "")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "checks.json").write_text(json.dumps([check("SUCCESS")]))
    (tmp_path / "run" / "stderr.txt").write_text("Traceback\nKeyError: 'x'\n")
    assert read_results(tmp_path, "all is well") == ([check("SUCCESS")], None)
    for words in ("Client exited with code 1", "Client timed out after 30000ms"):
        checks, complaint = read_results(tmp_path, f"Starting\n\n{words}\n\nStderr: ...")
        assert checks == [check("SUCCESS")]
        assert words.split(" after")[0] in str(complaint)
        assert "KeyError: 'x'" in str(complaint)


def test_summary() -> None:
    text = summary([judged(check("SUCCESS")), judged(check("FAILURE"))], 3.4)
    assert " 1 of  2 scenarios" in text
    assert text.endswith("2 scenarios, 1 checks passed, 0 forgiven, 3 s")
