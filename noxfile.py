"""The project's chores, each in an environment of its own: `nox -l` lists them, `nox -s NAME` runs one.

Arguments after `--` go to the tool a session runs: `nox -s tests -- tests/wire -k converter`.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import nox

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["tests", "types", "lint", "docs"]
nox.options.reuse_venv = "yes"
nox.options.error_on_missing_interpreters = True

PYPROJECT = nox.project.load_toml("pyproject.toml")
# The classifiers say which versions of Python we support.
PYTHONS = nox.project.python_versions(PYPROJECT)

# The peers we are compared with and talk to. Pinned, so that a red session means that we changed.
PEERS = nox.project.load_toml("benchmarks/peers.toml")
OFFICIAL_SDK = [PEERS["python"]["mcp"]]
OFFICIAL_SDK_1 = [PEERS["python"]["mcp-1"]]
FASTMCP = [PEERS["python"]["fastmcp"]]
FASTMCP_SKILLS = ["fastmcp==4.2.*"]  # the first that has the extension
FASTMCP_TASKS = ["fastmcp-tasks==4.1.*"]
PEER_SERVERS = ["mcp-server-time==2026.10.*", "mcp-server-git==2026.10.*"]
EVERYTHING_SERVER = "@modelcontextprotocol/server-everything@2026.8.31"
NODE_CLIENT = f"@modelcontextprotocol/client@{PEERS['npm']['@modelcontextprotocol/client']}"
# A certified authorization server, for logins that nobody here has a hand in.
OIDC_PROVIDER = "oidc-provider@9.13.3"
# Whose strict conversions our schemas go through.
AGENTS = {
    "openai-agents": "openai-agents==0.24.*",
    "pydantic-ai": "pydantic-ai-slim[openai]==2.68.*",
    "google-adk": "google-adk==2.13.*",
    "langchain": "langchain-core==1.8.*",
}
INSPECTOR = "@modelcontextprotocol/inspector@2.12.0"
EXT_APPS = "@modelcontextprotocol/ext-apps@2.0.4"  # it brings the client
EXT_TASKS = "@modelcontextprotocol/ext-tasks@0.2.2"
NODE_SKILLS = [
    f"@modelcontextprotocol/{name}@{PEERS['npm'][f'@modelcontextprotocol/{name}']}"
    for name in ("server", "node", "client")
]
# A client of gRPC and the conformance suite of HTTP/2, in Go.
GRPCURL = "github.com/fullstorydev/grpcurl/cmd/grpcurl@v1.9.3"
H2SPEC = "github.com/summerwind/h2spec/cmd/h2spec@v2.2.1+incompatible"
CONFORMANCE = "@modelcontextprotocol/conformance@0.2.0-alpha.12"
# The suite and the Inspector need version 22, which systems do not always have.
NODE = PEERS["python"]["node"]


@contextmanager
def timed(session: nox.Session) -> Iterator[None]:
    """Log how long the body took: what a chore costs should be seen, not guessed."""
    start = time.monotonic()
    try:
        yield
    finally:
        session.log(f"{session.name}: {time.monotonic() - start:.1f} s")


def groups(*names: str) -> tuple[str, ...]:
    """The requirements of dependency groups, resolved here because the session's pip may be too old to."""
    return nox.project.dependency_groups(PYPROJECT, *names)


# Tests mostly wait, for processes and for clocks: so many of them at once keep the processors busy.
WORKERS = str(2 * (os.cpu_count() or 1))


def run_tests(session: nox.Session, *arguments: str, **env: str) -> None:
    """Run tests beside each other, then those marked `alone` one after the other, if some of the chosen are."""
    env["PYTHONDONTWRITEBYTECODE"] = ""  # else each of hundreds of processes compiles what it imports
    notes = Path("build", "tests").absolute()  # what tests/conftest.py has to say to us
    shutil.rmtree(notes, ignore_errors=True)
    notes.mkdir(parents=True)
    env["TRIMCP_NOTES"] = str(notes)
    try:
        for alone, workers in (("no", WORKERS), ("only", "0")):
            if alone == "no" or (notes / "alone").exists():
                env["TRIMCP_ALONE"] = alone
                session.run("pytest", "-n", workers, *arguments, env=env, success_codes=[0, 5])
        if not (notes / "ran").exists():
            session.error("no test was selected")
    finally:
        tell_left_out(session, notes / "left-out")


def tell_left_out(session: nox.Session, file: Path) -> None:
    """Say why tests were left out and what brings them back, where whoever reads only the end will see it."""
    reasons: Counter[str] = Counter()
    for line in file.read_text("utf-8").splitlines() if file.exists() else ():
        reason, count = json.loads(line)
        reasons[reason] += count
    for reason, count in reasons.most_common():
        session.warn(f"left out: {count} test{'s' if count > 1 else ''}, {reason}")


@nox.session
def demo(session: nox.Session) -> None:
    """Index the standard library over a real pipe: progress, a cancelled search, a clean end."""
    session.install(".[cli]")
    session.run("trimcp", "demo", *session.posargs)


@nox.session
def tests(session: nox.Session) -> None:
    """Run the test suite; as root, with the system's packages that some tests need (tests/programs.py)."""
    session.install(".[cli]", *groups("tests"))
    if not session.posargs:
        session.run("python", "tests/programs.py", "--install")
    with timed(session):
        run_tests(session, *session.posargs)


# `nox -s tests-3.13`, where there is such an interpreter; by default only the one that runs nox is tried.
for version in PYTHONS:
    nox.session(tests.func, name=f"tests-{version}", python=version, default=False)


@nox.session(default=False)
def pythons(session: nox.Session) -> None:
    """Run the test suite on every Python that we support and that is here; `-- 3.14` on that one alone."""
    wanted = [version for version in PYTHONS if version in session.posargs] or list(PYTHONS)
    there = [version for version in wanted if shutil.which(f"python{version}")]
    for version in sorted({*wanted} - {*there}):
        session.warn(f"NOTHING HERE SAYS THAT Python {version} WORKS: there is no python{version}")
    if not there:
        session.error("none of these is here")
    more = [argument for argument in session.posargs if argument not in PYTHONS]
    for version in there:
        session.run("nox", "-s", f"tests-{version}", "--", *more, external=True)


@nox.session(default=False)
def matrix(session: nox.Session) -> None:
    """Run the interaction tests over every transport in every revision: `tests` has the oldest, the newest and 2026."""
    session.install(".[cli]", *groups("tests"))
    with timed(session):
        run_tests(session, *(session.posargs or ["tests/interaction"]), TRIMCP_MATRIX="1")


@nox.session
def guarantees(session: nox.Session) -> None:
    """Hold us to every figure we promise; `-- --page` writes those measured into docs/reliability.md."""
    session.install(".[cli]", *groups("tests"))
    page = "--page" in session.posargs
    chosen = [argument for argument in session.posargs if argument != "--page"]
    figures = Path("build", "guarantees.json").absolute()
    figures.parent.mkdir(exist_ok=True)
    with timed(session):
        if page:  # what is published is measured one after the other, with nothing beside it
            session.run("pytest", "tests/guarantees", *chosen, env={"TRIMCP_FIGURES": str(figures)})
            session.run("python", "docs/reliability.py", str(figures))
        else:
            run_tests(session, "tests/guarantees", *chosen, TRIMCP_FIGURES=str(figures))


@nox.session
def types(session: nox.Session) -> None:
    """Check our own code strictly, and what a user's type checker sees of it."""
    # Editable: pyright --verifytypes reads the package where an import finds it, which should be this tree.
    session.install("-e", ".[cli]", *groups("types"))
    with timed(session):
        session.run("mypy", "--strict", "-p", "trimcp")
        # Programs of users. Their directories are no packages, hence the flag.
        session.run("mypy", "--strict", "--explicit-package-bases", "tests/typing")
        session.run("python", "-m", "tests.docs.check_snippets")
        session.run("python", "-m", "tests.cli.checked_project")
        session.run("pyright", "--pythonpath", str(Path(session.bin) / "python"))
        session.run("pyright", "--verifytypes", "trimcp", "--ignoreexternal")


@nox.session
def lint(session: nox.Session) -> None:
    """Check style and formatting, and that the news fragments make a changelog."""
    session.install(*groups("lint"))
    with timed(session):
        session.run("ruff", "check", ".")
        session.run("ruff", "format", "--check", ".")
        session.run("towncrier", "build", "--draft", "--version", "next", silent=True)
        if Path(".git").exists():
            env = {"PRE_COMMIT_HOME": str(session.cache_dir / "pre-commit"), "SKIP": "ruff-check,ruff-format"}
            session.run("pre-commit", "run", "--all-files", env=env)


@nox.session(default=False)
def proto(session: nox.Session) -> None:
    """Have protoc read the protobuf messages of agent tools; a test checks that what it wrote is current."""
    session.install("grpcio-tools==1.85.1")
    source = "trimcp/agent_tools/proto/agent_tools.proto"
    written = f"--descriptor_set_out={source.removesuffix('.proto')}.binpb"
    session.run("python", "-m", "grpc_tools.protoc", "-I", ".", written, source)


@nox.session(default=False)
def browser(session: nox.Session) -> None:
    """Walk through the pages of the command in a real browser; `-- --pictures` takes those of the documentation."""
    if shutil.which("chromium") is None:
        what = "there is no chromium on this machine's path: apt-get install chromium"
        if "chromium" in os.environ.get("TRIMCP_REQUIRE", "").split(","):
            session.error(f"{what}, which TRIMCP_REQUIRE names")
        session.skip(what)
    session.install(".[cli]", *groups("browser"))
    chosen = [argument for argument in session.posargs if argument != "--pictures"]
    with timed(session):
        run_tests(session, *(chosen or ["tests/browser"]), TRIMCP_PICTURES=str(int("--pictures" in session.posargs)))


@nox.session(default=False)
def vendored(session: nox.Session) -> None:
    """Compare the libraries of the pages with what npm has of them."""
    folder = Path("trimcp/cli/web/page/vendor")
    for line in (folder / "README.md").read_text("utf-8").splitlines():
        name, _, source = line.strip("| ").partition(" | ")
        package, colon, path = source.partition(" | ")[0].partition(":")
        if not colon or "@" not in package:
            continue
        published = install_from_npm(session, package) / package.rpartition("@")[0] / path
        if published.read_bytes() != (folder / name).read_bytes():
            session.error(f"{folder / name} is not {path} of {package}")
        session.log(f"{name} is {path} of {package}")


@nox.session
def docs(session: nox.Session) -> None:
    """Build the documentation; a broken link or reference is an error."""
    session.install(".[cli]", *groups("docs"))
    with timed(session):
        # The theme prints an advertisement against its own dependency otherwise.
        env = {"NO_MKDOCS_2_WARNING": "1"}
        session.run("mkdocs", *(session.posargs or ["build", "--strict"]), env=env)


@nox.session(default=False)
def site(session: nox.Session) -> None:
    """Build the site into build/site: the documentation of each release that has a tag, and of this tree as `dev`."""
    target = Path("build", "site").absolute()
    shutil.rmtree(target, ignore_errors=True)
    listed = session.run("git", "tag", "--list", "v[0-9]*", "--sort=-version:refname", external=True, silent=True)
    tags = (listed or "").split()
    here = Path.cwd()
    with timed(session), tempfile.TemporaryDirectory() as folder:
        for version in [*tags, "dev"]:
            tree = here if version == "dev" else Path(folder, version)
            if tree != here:
                clone = ("git", "clone", "--quiet", "--depth=1", "--branch", version, here.as_uri(), str(tree))
                session.run(*clone, external=True, silent=True)
            with session.chdir(tree):  # with the package of this version, from which its reference is made
                session.install(".[cli]", *groups("docs"))
                built = target / version.removeprefix("v")
                session.run("mkdocs", "build", "--strict", "--site-dir", str(built), env={"NO_MKDOCS_2_WARNING": "1"})
        session.run("python", "docs/versions.py", str(target), *(tag.removeprefix("v") for tag in tags), "dev")
    session.log(f"the site is in {target}")


@nox.session(default=False)
def release(session: nox.Session) -> None:
    """Prepare a release, `-- 0.2.0`: build it, try what was built in bare environments, and make its changelog.

    All of it happens in a copy, and is found in build/release; nothing is uploaded. `-- 0.2.0 --apply` then writes the
    version and the changelog into this tree and removes the news fragments: commit and tag that.
    """
    versions = [argument for argument in session.posargs if not argument.startswith("-")]
    if len(versions) != 1 or {*session.posargs} - {*versions, "--apply"}:
        session.error("say which version: nox -s release -- 0.2.0 [--apply]")
    (version,) = versions
    session.install("build>=1.2", "twine>=6", "towncrier>=24.8")
    dist = Path("build", "release").absolute()
    shutil.rmtree(dist, ignore_errors=True)
    with timed(session), tempfile.TemporaryDirectory() as folder:
        copy = Path(folder, "trimcp")
        tracked = session.run("git", "ls-files", "-z", external=True, silent=True) or ""
        for name in filter(None, tracked.split("\0")):
            if Path(name).is_file():  # else it was removed, and that is not committed yet
                (copy / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(name, copy / name)
        project = copy / "pyproject.toml"
        line = f'version = "{PYPROJECT["project"]["version"]}"'
        project.write_text(project.read_text("utf-8").replace(line, f'version = "{version}"', 1), "utf-8")
        with session.chdir(copy):
            session.run("towncrier", "build", "--yes", "--version", version, silent=True)
            session.run("python", "-m", "build", "--outdir", str(dist), silent=True)  # the wheel, from the sdist
        built = sorted(dist.iterdir())
        if {path.name for path in built} != {f"trimcp-{version}.tar.gz", f"trimcp-{version}-py3-none-any.whl"}:
            session.error(f"what was built is {', '.join(path.name for path in built)}")
        session.run("twine", "check", "--strict", *map(str, built))
        smoke = Path("tests/release/smoke.py").absolute()
        for path in built:
            bare = Path(folder, path.suffix.strip("."))
            session.run("python", "-m", "venv", str(bare), silent=True)
            for extra, command in (("", ["python", str(smoke), version]), ("[cli]", ["trimcp", "demo"])):
                install = ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", f"{path}{extra}"]
                session.run(str(bare / "bin" / "python"), *install, external=True)
                with session.chdir(folder):  # not in a checkout, where Python would find that
                    session.run(str(bare / "bin" / command[0]), *command[1:], external=True)
        shutil.copy2(copy / "CHANGELOG.md", dist / "CHANGELOG.md")
        if "--apply" in session.posargs:
            for name in ("pyproject.toml", "CHANGELOG.md"):
                shutil.copy2(copy / name, name)
            for fragment in Path("newsfragments").glob("*.md"):
                if not (copy / fragment).exists():
                    fragment.unlink()
            session.log(f"{version} is prepared in this tree: look at it, commit and tag it")
    session.log(f"{version} is in {dist}")


@nox.session(default=False)
def recording(session: nox.Session) -> None:
    """Record the demonstration and a measurement anew, as the pictures that README and docs begin with."""
    session.install(".[cli]", *groups("tests"))
    session.run("python", "docs/recording.py")


@nox.session
def bench(session: nox.Session) -> None:
    """Measure every implementation in every cell and write docs/performance.md; `-- --quick` in under five minutes."""
    session.install(".[cli,plot]")
    # The others are installed apart, by the run itself, and kept from one to the next.
    with timed(session):
        session.run("python", "benchmarks/run.py", *session.posargs)


@nox.session(default=False)
def fuzz(session: nox.Session) -> None:
    """Try what no peer should say: 20,000 mutations on each transport, and more; or `-- --atheris --seconds 60`."""
    session.install(".[cli]", *groups("tests"))
    if "--atheris" in session.posargs:
        session.install("atheris>=3.0")
        rest = [arg for arg in session.posargs if arg != "--atheris"]
        with timed(session):
            session.run("python", "-m", "tests.fuzz.run_atheris", *rest)
        return
    every = ["tests/fuzz", "tests/protocol", "tests/session", "tests/guarantees"]
    every += ["-k", "targets or machine or mutat"]
    show = ["-o", "timeout=1800", "-s", "--durations=0", "--durations-min=1"]
    report = Path("build", "fuzz.json").absolute()
    report.parent.mkdir(exist_ok=True)
    with timed(session):
        env = {"TRIMCP_FUZZ": "1", "TRIMCP_FIGURES": str(report)}
        session.run("pytest", *show, *(session.posargs or every), env=env)


@nox.session(default=False)
def soak(session: nox.Session) -> None:
    """Load servers and clients for some minutes and see whether anything grows or stays: `-- --minutes 10`."""
    session.install(".[cli]", *groups("tests"))
    report = Path("build", "soak.json").absolute()
    report.parent.mkdir(exist_ok=True)
    with timed(session):
        session.run("python", "-m", "tests.soak.run", "--json", str(report), *session.posargs)


@nox.session(default=False)
def replicas(session: nox.Session) -> None:
    """Kill, pause and restart processes that serve as one, under load, for minutes; `-- --short` for half a minute."""
    missing = [name for name in ("nginx", "redis-server") if shutil.which(name) is None]
    if missing:
        what = (
            f"for want of {' and '.join(missing)} nothing here tries replicas: apt-get install nginx-light redis-server"
        )
        if set(missing) & set(os.environ.get("TRIMCP_REQUIRE", "").split(",")):
            session.error(what)
        session.warn(f"NOTHING HERE SAYS THAT REPLICAS WORK: {what}")
        session.skip(what)
    session.install(".[cli,redis]", *groups("tests"), *OFFICIAL_SDK)
    short = "--short" in session.posargs
    tasks = [] if short else ["tests/store/test_task_kills.py"]  # of which `tests` has the shorter form
    chosen = [argument for argument in session.posargs if argument != "--short"] or ["tests/replicas", *tasks]
    env = {"TRIMCP_REPLICAS_SECONDS": "8" if short else "60"}
    with timed(session):
        if not session.posargs:  # what each test of the protocol asks for, with sessions in Redis; `tests` has SQLite
            over_redis = ("tests/interaction", "-k", "redis", "-n", WORKERS)
            session.run("pytest", "-q", *over_redis, env={"TRIMCP_REDIS": "1"})
        session.run("pytest", "-s", *(["-m", "not slow"] if short else []), *chosen, env=env)


@nox.session(name="bench-sessions")
def bench_sessions(session: nox.Session) -> None:
    """Measure a thousand sessions with open streams on every implementation."""
    session.install(".[cli]")
    session.run("python", "benchmarks/sessions.py", *session.posargs)


@nox.session(name="bench-check")
def bench_check(session: nox.Session) -> None:
    """Count what calls cost, and fail if one costs a tenth more than it did: benchmarks/baseline.json."""
    baselines = json.loads(Path("benchmarks/baseline.json").read_text("utf-8"))
    baseline = baselines.get(f"{sys.version_info.major}.{sys.version_info.minor}", {})
    # The versions it was made with, so that a red session means that we changed.
    pins = [f"{name}=={version}" for name, version in baseline.get("versions", {}).items() if name != "python"]
    if "--newest" in session.posargs:
        pins = ["--upgrade", "--upgrade-strategy", "eager"]
    session.install(".[grpc]", *pins)
    with timed(session):
        session.run("python", "benchmarks/check.py", *session.posargs)


@nox.session
def interop(session: nox.Session) -> None:
    """Let other people's clients drive us, and drive other people's servers, over every transport we share."""
    session.install(".[auth,cli]", *groups("tests"), *OFFICIAL_SDK, *PEER_SERVERS, NODE)
    env = {
        "TRIMCP_OFFICIAL_SDK_1": str(install_apart(session, "official-sdk-1", *OFFICIAL_SDK_1)),
        "TRIMCP_FASTMCP": str(install_apart(session, "fastmcp", *FASTMCP)),
        "TRIMCP_FASTMCP_SKILLS": str(install_apart(session, "fastmcp-skills", *FASTMCP_SKILLS)),
        "TRIMCP_FASTMCP_TASKS": str(install_apart(session, "fastmcp-tasks", *FASTMCP_TASKS)),
        "TRIMCP_NODE_CLIENT": str(install_from_npm(session, NODE_CLIENT)),
        "TRIMCP_NODE_INSPECTOR": str(install_from_npm(session, INSPECTOR)),
        "TRIMCP_NODE_APPS": str(install_from_npm(session, EXT_APPS)),
        "TRIMCP_NODE_TASKS": str(install_from_npm(session, EXT_TASKS, NODE_CLIENT)),
        "TRIMCP_NODE_SKILLS": str(install_from_npm(session, *NODE_SKILLS)),
        "TRIMCP_NODE_EVERYTHING": str(install_from_npm(session, EVERYTHING_SERVER)),
        "TRIMCP_NODE_OIDC_PROVIDER": str(install_from_npm(session, OIDC_PROVIDER)),
        "TRIMCP_REAL_SERVERS": json.dumps(install_real_servers(session)),
        **build_peers(session),
    }
    if (grpcurl := install_from_go(session, GRPCURL)) is not None:
        env["TRIMCP_GRPCURL"] = str(grpcurl)
    for name, requirement in AGENTS.items():
        try:
            env[f"TRIMCP_STRICT_{name.replace('-', '_').upper()}"] = str(install_apart(session, name, requirement))
        except nox.command.CommandFailed:
            session.warn(f"NOTHING HERE SAYS THAT {name} TAKES OUR SCHEMAS: it could not be installed")
    with timed(session):
        session.run("pytest", *(session.posargs or ["tests/interop"]), env=env)


@nox.session(name="interop-quick", default=False)
def interop_quick(session: nox.Session) -> None:
    """What of `interop` fits into .ci/run: the Go SDK, where there is Go, and the real servers marked `quick`."""
    session.install(".[cli]", *groups("tests"), NODE)
    env = {
        "TRIMCP_REAL_SERVERS": json.dumps(install_real_servers(session, quick=True)),
        **build_peers(session, ("go",)),
    }
    with timed(session):
        chosen = ["tests/interop/test_compiled_peers.py", "tests/interop/test_real_servers.py"]
        run_tests(session, *(session.posargs or [*chosen, "-k", "(go- or quick) and not slow"]), **env)


@nox.session
def conformance(session: nox.Session) -> None:
    """Hold our server and our client against the official conformance suite, in every version."""
    session.install(".[auth,cli,skills]", NODE)
    env = {"TRIMCP_CONFORMANCE": str(install_from_npm(session, CONFORMANCE))}
    with timed(session):
        session.run("python", "-m", "tests.conformance.run", *session.posargs, env=env)


@nox.session(default=False)
def h2spec(session: nox.Session) -> None:
    """Hold our HTTP/2 against h2spec, where there is Go to build it."""
    session.install(".")
    program = install_from_go(session, H2SPEC)
    if program is None:
        what = "h2spec is written in Go, and there is no `go` on this machine's path"
        if "go" in os.environ.get("TRIMCP_REQUIRE", "").split(","):
            session.error(f"{what}, which TRIMCP_REQUIRE names")
        session.skip(what)
    with timed(session):
        env = {"TRIMCP_H2SPEC": str(program)}
        session.run("python", "-m", "tests.conformance.h2spec", *session.posargs, env=env)


def install_from_go(session: nox.Session, package: str) -> Path | None:
    """A program written in Go, built once and kept from one session to the next; None without Go."""
    if shutil.which("go") is None:
        return None
    path, _, version = package.partition("@")
    folder = (session.cache_dir / "go-peers" / version).absolute()
    program = folder / path.rpartition("/")[2]
    if not program.exists():
        session.run("go", "install", package, external=True, silent=True, env={"GOBIN": str(folder)})
    return program


def install_apart(session: nox.Session, name: str, *requirements: str) -> Path:
    """The interpreter of an environment for what cannot live with the rest, kept from one session to the next."""
    folder = session.cache_dir / "python-peers" / name
    python = folder / "bin" / "python"
    done = folder / "installed.txt"
    if not done.exists() or done.read_text("utf-8") != "\n".join(requirements):
        session.run("python", "-m", "venv", "--clear", str(folder))
        quiet = ["--quiet", "--disable-pip-version-check"]
        session.run(str(python), "-m", "pip", "install", *quiet, *requirements, external=True)
        done.write_text("\n".join(requirements), "utf-8")
    return python


def install_real_servers(session: nox.Session, *, quick: bool = False) -> dict[str, str]:
    """The folder with the programs of each server that people use, by its package; `quick`: of those marked so."""
    servers = nox.project.load_toml("tests/interop/real_servers.toml")["servers"]
    found = {}
    for server in servers:
        package = server["package"]
        if quick and not server.get("quick", False):
            continue
        if server["from"] == "pypi":
            python = install_apart(session, f"real-{package.partition('=')[0]}", package, *server.get("with", ()))
            found[package] = str(python.parent)
        else:
            found[package] = str(install_from_npm(session, package) / ".bin")
    return found


def build_peers(session: nox.Session, kinds: tuple[str, ...] = ("go", "rust", "java")) -> dict[str, str]:
    """What starts our programs on the official SDKs in these languages, where there is a toolchain: tests/interop."""
    built = session.cache_dir.absolute() / "compiled-peers"
    built.mkdir(parents=True, exist_ok=True)
    found = {}
    for name, tool, command in (
        ("go", "go", ("go", "build", "-C", "tests/interop/go", "-o", str(built / "go-peer"), ".")),
        ("rust", "cargo", ("cargo", "build", "--manifest-path", "tests/interop/rust/Cargo.toml", "--locked")),
    ):
        if name not in kinds:
            continue
        if shutil.which(tool) is None:
            if tool in os.environ.get("TRIMCP_REQUIRE", "").split(","):
                session.error(f"there is no {tool} on this machine's path, which TRIMCP_REQUIRE names")
            session.warn(f"UNTESTED, for want of {tool}: the {name} SDK as client and as server")
            continue
        session.run(*command, external=True, env={"CARGO_TARGET_DIR": str(built / "rust")})
        program = built / ("go-peer" if name == "go" else "rust/debug/peer")
        found[f"TRIMCP_PEER_{name.upper()}"] = str(program)
    if "java" not in kinds:
        return found
    if shutil.which("mvn") is None or shutil.which("javac") is None:
        session.warn("UNTESTED, for want of Maven: the Java SDK as client and as server")
        return found
    source = Path("tests/interop/java")
    for name, version in PEERS["maven"].items():
        lib, classes = built / name / "lib", built / name / "classes"
        if not lib.exists():
            words = ["-q", "-B", "-f", str(source / "pom.xml"), f"-Dmcp.version={version}", f"-DoutputDirectory={lib}"]
            session.run("mvn", *words, "dependency:copy-dependencies", external=True)
        classpath = f"{lib}/*"
        session.run("javac", "-cp", classpath, "-d", str(classes), f"{source}/src/main/java/Peer.java", external=True)
        found[f"TRIMCP_PEER_{name.upper().replace('-', '_')}"] = f"java -cp {classes}:{classpath} Peer"
    return found


def install_from_npm(session: nox.Session, package: str, *beside: str) -> Path:
    """The node_modules folder with a package written for Node and `beside` it others, kept from session to session."""
    name, _, version = package.rpartition("@")
    # The folder is named after the version, so a new pin is a new folder.
    folder = session.cache_dir / "node-peers" / name.rpartition("/")[2] / version
    if not (folder / "package-lock.json").exists():
        folder.mkdir(parents=True, exist_ok=True)
        quiet = ["--no-audit", "--no-fund", "--loglevel=error"]
        session.run("npm", "install", "--prefix", str(folder), *quiet, package, *beside, external=True)
    return folder / "node_modules"
