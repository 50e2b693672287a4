"""Records commands in a terminal as pictures that move: the demonstration, and a measurement.

`nox -s recording` writes them. A picture is one SVG without scripts: each text appears and goes by a CSS animation, and
who has asked the browser for less motion sees the end.
"""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import shlex
import struct
import subprocess
import sys
import sysconfig
import termios
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from html import escape
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import pyte

__all__ = ["Shown", "draw", "opened", "record"]

FILES: Final = re.compile(r'```python title="([\w.]+)"\n(.*?)```', re.DOTALL)
COLUMNS: Final = 100
STEP: Final = 0.2  # seconds from one picture to the next: a progress bar needs no more
PAUSE: Final = 6.0  # seconds that the last picture stands
LONGEST: Final = 120.0  # seconds that a command may take
OPENING: Final = 3.0  # seconds that the fullest picture stands before anything moves
BENCH: Final = "--tool lend -a title='Volume {n}' --under-way 16 --seconds 5"
CHARACTER: Final = 7.8
LINE: Final = 17
EDGE: Final = 14
COLOURS: Final = {
    "default": "#d4d7e0",
    "red": "#f2777a",
    "green": "#99cc99",
    "brown": "#ffcc66",
    "blue": "#6699cc",
    "magenta": "#cc99cc",
    "cyan": "#66cccc",
}


class Recording(NamedTuple):
    """What is recorded, for a page whose files are there."""

    typed: str
    page: str
    beside: tuple[str, ...] = ()
    """Commands that run meanwhile; of the first the last word of its first line stands for URL in the others."""
    keys: tuple[tuple[float, bytes], ...] = ()
    """What is pressed, and after how many seconds."""
    rows: int = 34


RECORDINGS: Final = {
    "demo.svg": Recording("trimcp demo", "index.md"),
    "howto/bench-live.svg": Recording(f"trimcp bench library.py {BENCH}", "howto/bench.md"),
    "howto/top.svg": Recording(
        "trimcp top",
        "howto/operate.md",
        beside=(
            "trimcp run builder.py --http --port 0 --admin",
            *(f"trimcp call URL build files={files}" for files in (40, 60, 25)),
        ),
        rows=17,
        keys=((3, b"\x1b[B"), (4, b"\x1b[B"), (5, b"\r"), (8, b"\r"), (9, b"c"), (10, b"too late\r"), (13, b"q")),
    ),
}


class Run(NamedTuple):
    """Characters of one line that look alike, from a column on."""

    column: int
    text: str
    colour: str
    bold: bool


class Shown(NamedTuple):
    """What stood in a row from one moment to another, in seconds."""

    row: int
    begin: float
    end: float
    runs: tuple[Run, ...]


def record(typed: str, folder: Path, keys: Sequence[tuple[float, bytes]] = (), rows: int = 34) -> list[Shown]:
    """Return what a command line showed on a terminal of its own, below itself; RuntimeError if it failed."""
    screen = pyte.Screen(COLUMNS, rows)
    stream = pyte.ByteStream(screen)
    stream.feed(f"$ {typed}\r\n".encode())
    leader, follower = pty.openpty()
    fcntl.ioctl(follower, termios.TIOCSWINSZ, struct.pack("HHHH", rows, COLUMNS, 0, 0))
    env = {**os.environ, "TERM": "xterm-256color", "COLUMNS": str(COLUMNS), "LINES": str(rows)}
    process = subprocess.Popen(
        shlex.split(typed), stdin=follower, stdout=follower, stderr=follower, env=env, cwd=folder
    )
    os.close(follower)
    seen: dict[int, tuple[float, tuple[Run, ...]]] = {}
    shown: list[Shown] = []

    def look(now: float) -> None:
        for row in range(rows):
            runs = tuple(_runs(screen, row))
            since, before = seen.get(row, (0.0, ()))
            if runs != before:
                if before:
                    shown.append(Shown(row, since, now, before))
                seen[row] = (now, runs)

    look(0.0)
    pressed = list(keys)
    with os.fdopen(leader, "rb", buffering=0) as terminal:
        select.select([terminal], [], [], LONGEST)  # how long a command takes to start is nothing to look at
        began = time.monotonic()
        due, open_ = STEP, True
        while open_ and (now := time.monotonic() - began) < LONGEST:
            if select.select([terminal], [], [], max(0.0, due - now))[0]:
                try:
                    data = terminal.read(65536)
                except OSError:  # how Linux says that nobody has the other end any more
                    data = b""
                open_ = bool(data)
                stream.feed(data)
            if pressed and now >= pressed[0][0]:
                os.write(leader, pressed.pop(0)[1])
            if (now := time.monotonic() - began) >= due or not open_:
                look(now)
                due = now + STEP
    if not open_ and process.wait() == 0:
        end = time.monotonic() - began + PAUSE
        return shown + [Shown(row, since, end, runs) for row, (since, runs) in sorted(seen.items()) if runs]
    process.kill()
    process.wait()
    raise RuntimeError(f"{typed} did not end well: {process.returncode}")


def _runs(screen: pyte.Screen, row: int) -> Iterator[Run]:
    line = screen.buffer[row]
    cells = [(column, line[column]) for column in range(COLUMNS)]
    for (colour, bold, reverse), alike in groupby(cells, lambda cell: (cell[1].fg, cell[1].bold, cell[1].reverse)):
        found = list(alike)
        text = "".join(cell.data for _, cell in found)
        if text.strip():
            spaces = len(text) - len(text.lstrip())
            # Where somebody keeps their Python is nobody's business.
            plain = text.strip().replace(sysconfig.get_path("stdlib"), "/usr/lib/python3")
            yield Run(found[0][0] + spaces, plain, "brown" if reverse else colour, bold or reverse)


def opened(shown: Sequence[Shown]) -> list[Shown]:
    """Return a recording that begins with its fullest picture: who looks for a moment sees no empty terminal."""
    moments = [[one for one in shown if one.begin <= at < one.end] for at in {one.begin for one in shown}]
    fullest = max(moments, key=lambda there: sum(len(run.text) for one in there for run in one.runs))
    later = [one._replace(begin=one.begin + OPENING, end=one.end + OPENING) for one in shown]
    return [one._replace(begin=0.0, end=OPENING) for one in fullest] + later


def draw(shown: Sequence[Shown], title: str) -> str:
    """Return the picture, whose animation begins anew when it has ended."""
    length = max(one.end for one in shown)
    last = 1 + max(one.row for one in shown)
    width, height = round(COLUMNS * CHARACTER + 2 * EDGE), last * LINE + 2 * EDGE
    moments = sorted({(one.begin, one.end) for one in shown if (one.begin, one.end) != (0.0, length)})
    names = {moment: f"t{number}" for number, moment in enumerate(moments)}
    styles = [f"text{{font:13px ui-monospace,Menlo,Consolas,monospace;white-space:pre;fill:{COLOURS['default']}}}"]
    styles += [f"[class*=t]{{animation:{length:.1f}s step-end infinite}}"]
    for (begin, end), name in names.items():
        steps = ["0%{opacity:0}"] if begin else []
        steps.append(f"{begin / length:.2%}{{opacity:1}}")
        steps += [f"{end / length:.2%}{{opacity:0}}"] if end < length else []
        styles.append(f".{name}{{animation-name:{name}}}@keyframes {name}{{{''.join(steps)}}}")
    gone = ",".join(f".{names[moment]}" for moment in moments if moment[1] < length)
    styles.append(f"@media(prefers-reduced-motion){{[class*=t]{{animation:none}}{gone}{{opacity:0}}}}")
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img">',
        f"<title>{escape(title)}</title>",
        f"<style>{''.join(styles)}</style>",
        f'<rect width="{width}" height="{height}" rx="8" fill="#23252e"/>',
    ]
    for one in shown:
        name = names.get((one.begin, one.end))
        spans = "".join(_span(run) for run in one.runs)
        y = EDGE + one.row * LINE + 12
        lines.append(f'<text y="{y}"{f" class={chr(34)}{name}{chr(34)}" if name else ""}>{spans}</text>')
    return "\n".join([*lines, "</svg>\n"])


def _span(run: Run) -> str:
    weight = ' font-weight="bold"' if run.bold else ""
    colour = COLOURS.get(run.colour, f"#{run.colour}")
    fill = "" if run.colour == "default" else f' fill="{colour}"'
    # A length for each, so that columns stay columns whatever font the reader has.
    x, length = EDGE + run.column * CHARACTER, len(run.text) * CHARACTER
    return f'<tspan x="{x:.1f}" textLength="{length:.1f}"{fill}{weight}>{escape(run.text, quote=False)}</tspan>'


def main() -> None:
    """Make the recordings anew that are named, or all."""
    docs = Path(__file__).parent
    for name, one in RECORDINGS.items():
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        with TemporaryDirectory() as folder, ExitStack() as stack:
            os.environ["XDG_RUNTIME_DIR"] = folder
            for file, code in FILES.findall((docs / one.page).read_text("utf-8")):
                Path(folder, file).write_text(code, "utf-8")
            url = ""
            for command in one.beside:
                words = shlex.split(command.replace("URL", url))
                process = stack.enter_context(
                    subprocess.Popen(words, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
                )
                stack.callback(process.kill)
                assert process.stderr is not None
                url = url or process.stderr.readline().split()[-1]
            shown = record(one.typed, Path(folder), one.keys, one.rows)
        (docs / name).write_text(draw(opened(shown), f"A terminal in which {shlex.split(one.typed)[1]} runs"), "utf-8")


if __name__ == "__main__":
    main()
