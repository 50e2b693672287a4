"""The server of the interaction tests with what extensions of the protocol add: a page of an app, and skills."""

from __future__ import annotations

from tests.interaction import everything_server
from tests.interaction.everything_server import Journal
from trimcp.server.server import Server

PAGE = "ui://jobs/progress"
TEXT = "---\nname: git-workflow\ndescription: Our rules of git\n---\n# Git\n"


def make_server(journal: Journal) -> Server[Journal]:
    """A new server with everything on it, a page and a skill."""
    server = everything_server.make_server(journal)
    server.ui(PAGE, "<!DOCTYPE html><title>Jobs</title>", csp={"connectDomains": ["https://api.example.com"]})
    server.add_tool(lambda: "fresh", name="refresh", ui=PAGE, visibility=["app"])
    server.skills({"git-workflow/SKILL.md": TEXT, "git-workflow/logo": b"\xff\x00"})
    return server


if __name__ == "__main__":
    everything_server.serve(make_server)
