"""What some tests need of the machine beyond Python and git: a table with a line for each, and its package.

A test says `@pytest.mark.needs("curl")`, or calls `require("curl")` in its middle. Where that is missing, the test is
left out, and the last lines of the run say how many were, and what brings it. `TRIMCP_REQUIRE=bwrap,curl` makes it a
failure, so that a machine that checks changes leaves nothing out in silence.

As a program it prints which of them there are, for `TRIMCP_REQUIRE`; with `--install` it first installs those that are
missing, where it may: as root, with apt-get. It imports only what Python brings.
"""

from __future__ import annotations

import functools
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass
from typing import Final

REQUIRE: Final = "TRIMCP_REQUIRE"
"""The environment variable that names what has to be there, with commas."""


@dataclass(frozen=True)
class Program:
    """One line of the table.

    Attributes:
        package: what brings it, on Debian and Ubuntu; "" if no package does.
        commands: what must be on the path.
        check: a command that succeeds where it works; without one, being there is enough.
        covers: what goes untested without it.
        also: what it needs beside its package.
        platform: the `sys.platform` that has it; "" if all have.
    """

    package: str
    commands: tuple[str, ...]
    covers: str
    check: tuple[str, ...] = ()
    also: str = ""
    platform: str = ""


_ISOLATED: Final = "bwrap --unshare-all --die-with-parent --new-session --cap-drop ALL --ro-bind / /"
_MOUNTED: Final = "--proc /proc --remount-ro /proc --dev /dev --tmpfs /tmp --remount-ro / --"
_SANDBOX: Final = (*_ISOLATED.split(), *_MOUNTED.split(), sys.executable, "-c", "")
_SMALL: Final = ("cat", "echo", "env", "false", "head", "ls", "mkdir", "printf", "sleep", "touch", "tr", "true", "yes")
_ALSO: Final = "and let users make namespaces"

PROGRAMS: Final = {
    "bwrap": Program("bubblewrap", ("bwrap",), "sandboxes", _SANDBOX, _ALSO, "linux"),
    "bash": Program("bash coreutils", ("bash", "dirname", "mktemp", "rm", "tee"), "the run that checks changes"),
    "chromium": Program(
        "chromium chromium-driver", ("chromium", "chromedriver"), "pages in a browser", ("chromium", "--version")
    ),
    "coreutils": Program("coreutils", _SMALL, "programs as tools"),
    "curl": Program("curl", ("curl",), "the commands that the documentation has typed"),
    "go": Program("", ("go",), "HTTP/2 beside h2spec, and servers and clients in Go"),
    "grep": Program("grep", ("grep",), "programs as tools"),
    "prlimit": Program("util-linux", ("prlimit",), "bounds of memory and time of programs", platform="linux"),
    "nginx": Program("nginx-light", ("nginx",), "replicas behind a balancer"),
    "redis-server": Program("redis-server", ("redis-server",), "stores in Redis"),
    "sed": Program("sed", ("sed",), "pages that change a file"),
    "tar": Program("tar", ("tar",), "benchmarks beside an earlier trimcp"),
    "taskset": Program("util-linux", ("taskset",), "benchmarks", platform="linux"),
    "ps": Program("procps", ("ps",), "descendants where there is no /proc"),
}


@functools.cache
def works(name: str) -> bool:
    """Whether this program is here and does what it should."""
    program = PROGRAMS[name]
    if any(shutil.which(command) is None for command in program.commands):
        return False
    if not program.check:
        return True
    try:
        done = subprocess.run(program.check, stdin=subprocess.DEVNULL, capture_output=True, check=False, timeout=60)
    except (OSError, subprocess.SubprocessError):
        return False
    return done.returncode == 0


def remedy(name: str) -> str:
    """What brings this program, as somebody would type it."""
    program = PROGRAMS[name]
    if not program.package:
        return f"put {' and '.join(program.commands)} on the path"
    return f"apt-get install {program.package}" + (f", {program.also}" if program.also else "")


def require(*names: str) -> None:
    """Leave the calling test out where one of these is missing; fail where `TRIMCP_REQUIRE` names it."""
    import pytest

    missing = broken()
    for name in names:
        program = PROGRAMS[name]
        if name in missing:
            pytest.fail(missing[name], pytrace=False)
        if program.platform not in ("", sys.platform):
            pytest.skip(f"{name} is only for {program.platform}")
        if not works(name):
            pytest.skip(f"for want of {name} nothing here tries {program.covers}: {remedy(name)}")


def unknown() -> str:
    """What is wrong with the names in `TRIMCP_REQUIRE`; "" if all are in the table."""
    names = [name for name in os.environ.get(REQUIRE, "").split(",") if name and name not in PROGRAMS]
    return f"{REQUIRE} names {', '.join(names)}, and knows only {', '.join(PROGRAMS)}" if names else ""


def broken() -> dict[str, str]:
    """What `TRIMCP_REQUIRE` names and is not here, and what is wrong with each."""
    required = [
        name for name in os.environ.get(REQUIRE, "").split(",") if name and not (name in PROGRAMS and works(name))
    ]
    known = f"{REQUIRE} does not know it, only {', '.join(PROGRAMS)}"
    return {name: f"{name} is required and missing: {remedy(name) if name in PROGRAMS else known}" for name in required}


def install() -> None:
    """Install what is missing, where that may be done: as root, with apt-get. What fails is told."""
    here = [name for name, program in PROGRAMS.items() if program.platform in ("", sys.platform)]
    missing = sorted({PROGRAMS[name].package for name in here if any(map(_is_missing, PROGRAMS[name].commands))})
    missing = [word for package in missing for word in package.split()]
    if not missing or os.geteuid() != 0 or shutil.which("apt-get") is None:
        return
    print(f"installing {', '.join(missing)}", file=sys.stderr, flush=True)
    for words in (["update"], ["install", "-y", "--no-install-recommends", *missing]):
        environment = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
        try:
            subprocess.run(["apt-get", "-qq", *words], check=True, timeout=300, env=environment, stdout=sys.stderr)
        except (OSError, subprocess.SubprocessError) as error:
            print(f"could not: {error}", file=sys.stderr)
            return


def _is_missing(command: str) -> bool:
    return shutil.which(command) is None


if __name__ == "__main__":
    if "--install" in sys.argv[1:]:
        install()
    print(",".join(name for name in PROGRAMS if works(name)))
    sys.exit("\n".join(broken().values()) or None)
