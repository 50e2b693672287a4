"""Let atheris look for inputs that break a target, each target for a while: `nox -s fuzz -- --atheris --seconds 60`.

Unlike hypothesis it sees which lines an input reaches, and goes on from those that reached new ones. What it found in
earlier runs lies in the folder it is given. An input that breaks something is written there as `crash-...`; to look at
it without atheris: `python -m tests.fuzz.run_atheris --show FILE TARGET`.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description="Run the fuzz targets under atheris.")
    parser.add_argument("targets", nargs="*", help="which, by name; by default all")
    parser.add_argument("--seconds", type=int, default=60, help="for how long each")
    parser.add_argument("--folder", type=Path, default=Path(".nox/fuzz-corpus"), help="where inputs are kept")
    parser.add_argument("--show", type=Path, help="run one input without atheris")
    parser.add_argument("--only", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.only:
        _fuzz(options.only, options.seconds, options.folder)
    from tests.fuzz.targets import TARGETS

    if options.show is not None:
        TARGETS[options.targets[0]](options.show.read_bytes())
        return 0
    from tests.fuzz import corpus

    corpus.write(options.folder)
    return max([_run(name, options.seconds, options.folder) for name in options.targets or TARGETS])


def _run(name: str, seconds: int, folder: Path) -> int:
    """Run one target in a process of its own: the fuzzer ends the process it runs in."""
    began = time.monotonic()
    command = [sys.executable, "-m", "tests.fuzz.run_atheris", "--only", name]
    command += ["--seconds", str(seconds), "--folder", str(folder)]
    ran = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=False)
    lines = ran.stdout.splitlines()
    summary = next((line for line in reversed(lines) if line.startswith("Done ")), f"exit code {ran.returncode}")
    print(f"{name}: {summary} ({time.monotonic() - began:.0f} s)", flush=True)
    if ran.returncode:
        print("\n".join(lines[-60:]), flush=True)
    return int(ran.returncode != 0)


def _fuzz(name: str, seconds: int, folder: Path) -> None:
    import atheris

    with atheris.instrument_imports(include=["trimcp"]):
        from tests.fuzz.targets import TARGETS
    inputs = folder / name
    inputs.mkdir(parents=True, exist_ok=True)
    flags = [f"-max_total_time={seconds}", "-max_len=4096", "-timeout=10", "-rss_limit_mb=1024"]
    atheris.Setup([sys.argv[0], *flags, f"-artifact_prefix={inputs}/", str(inputs)], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
