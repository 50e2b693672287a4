"""The plot: a file people can read, with everything named. Its looks are for eyes, not for this."""

from __future__ import annotations

import subprocess
import sys
from itertools import combinations, pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest

from tests.cli.reports import a_report, some_errors
from trimcp.bench.report import Histogram, Second
from trimcp.cli.bench.plot import check_plot, draw
from trimcp.cli.bench.table import Side, ratios
from trimcp.cli.exits import USAGE, Failure

ROOT = Path(__file__).parents[2]
CLOSED_LOOP = "ms (logarithmic) from sending to answer, not corrected for coordinated omission"


def texts_of(file: Path) -> list[str]:
    """The texts of an SVG."""
    return [
        "".join(each.itertext()).strip() for each in ElementTree.parse(file).iter("{http://www.w3.org/2000/svg}text")
    ]


def test_one_server_has_its_latencies_and_its_course(tmp_path: Path) -> None:
    file = tmp_path / "plot.svg"
    draw(str(file), "echo of $HOME_and$", [Side("500 per second", [a_report()])])
    texts = texts_of(file)
    for label in [
        *("echo of $HOME_and$", "500 per second", "share of calls (%)", CLOSED_LOOP),
        *("p50 1.00 ms", "p90 1.00 ms", "p99 1.00 ms", "p99.9 1.00 ms", "calls answered per second", "calls/s"),
        *("seconds since the start", "time in each second", "ms (logarithmic)", "p50", "p99"),
    ]:
        assert label in texts
    assert "with errors" not in texts


def test_seconds_with_errors_are_marked(tmp_path: Path) -> None:
    file = tmp_path / "plot.svg"
    over_time = (Second(0, 400, 0, 0.001, 0.002), Second(1, 0, 10, None, None))
    draw(str(file), "echo", [Side("", [a_report(errors=some_errors(), over_time=over_time)])])
    assert "with errors" in texts_of(file)


def test_two_servers_are_drawn_by_round(tmp_path: Path) -> None:
    file = tmp_path / "plot.svg"
    curves = [Side("the one", [a_report()] * 3), Side("the other", [a_report(milliseconds=4.0)] * 3)]
    draw(str(file), "echo", curves, "16 under way")
    texts = texts_of(file)
    assert [text for text in texts if text in ("the one", "the other", "16 under way")] != []
    assert {"p50 1.00 ms", "p50 4.00 ms", "round", "1", "2", "3"} <= set(texts)
    assert "seconds since the start" not in texts
    assert f"{CLOSED_LOOP}; median of 3 rounds" in texts


def test_plot_and_table_have_the_same_percentiles(tmp_path: Path) -> None:
    """Those of the rounds in the middle, not those of all calls of all rounds together."""
    file = tmp_path / "plot.svg"
    ours = [a_report(milliseconds=each) for each in (1.0, 2.0, 300.0)]
    theirs = [a_report(milliseconds=each) for each in (4.0, 5.0, 600.0)]
    draw(str(file), "echo", [Side("the one", ours), Side("the other", theirs)])
    pairs = list(zip(ours, theirs, strict=True))
    table = {each.figure.name: each for each in ratios(pairs)}
    shown = texts_of(file)
    for name in ("p50", "p99"):
        assert {f"{name} {table[name].first}", f"{name} {table[name].second}"} <= set(shown)


def test_lines_to_labels_cross_nothing(tmp_path: Path) -> None:
    """All labels are in one row and in the order of their lines, which begin below them."""
    from matplotlib.figure import Figure
    from matplotlib.text import Annotation

    from trimcp.cli.bench.plot import _draw_latencies

    axes = Figure(figsize=(8.2, 1.6)).add_subplot()
    near = [a_report(milliseconds=each) for each in (1.0, 1.02)]
    _draw_latencies(axes, [Side("a", near[:1]), Side("b", near[1:])])
    labels = [each for each in axes.texts if isinstance(each, Annotation)]
    assert len(labels) == 8
    assert len({each.xyann[1] for each in labels}) == 1
    assert [each.xy[0] for each in labels] == sorted(each.xy[0] for each in labels)
    assert all(after.xyann[0] - before.xyann[0] >= 0.117 for before, after in pairwise(labels))
    assert all(each.arrowprops["relpos"] == (0.5, 0.0) for each in labels)


@pytest.mark.parametrize("note", ["", "16 under way " * 9])
def test_long_lines_stay_inside_and_apart(note: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from matplotlib.figure import Figure

    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    curves = [Side("80.0 calls answered per second, " * 5, [a_report()])]
    draw(str(tmp_path / "plot.png"), "a tool of a long name · " * 6, curves * (2 if note else 1), note)
    [figure] = drawn
    boxes = [each.get_window_extent() for each in figure.texts if each.get_text()]
    assert len(boxes) == (4 if note else 2)
    assert all(box.x0 >= 0 and box.x1 <= 0.99 * figure.bbox.width for box in boxes)
    assert not any(one.overlaps(other) for one, other in combinations(boxes, 2))


def test_two_servers_of_one_round_are_both_there(tmp_path: Path) -> None:
    file = tmp_path / "plot.svg"
    draw(str(file), "echo", [Side("the one", [a_report()]), Side("the other", [a_report(milliseconds=4.0)])])
    assert {"p50 1.00 ms", "p50 4.00 ms", "round"} <= set(texts_of(file))


def test_nothing_answered_can_be_drawn_too(tmp_path: Path) -> None:
    file = tmp_path / "plot.svg"
    nothing = a_report(latency=Histogram(), calls=0, over_time=(Second(0, 0, 7, None, None),), errors=some_errors())
    draw(str(file), "echo", [Side("none", [nothing])])
    assert "no call was answered" in texts_of(file)
    draw(str(file), "echo", [Side("none", [a_report(latency=Histogram(), over_time=(), seconds=0.0)])])
    assert "no call was answered" in texts_of(file)


def test_times_far_apart_and_all_the_same_can_be_drawn(tmp_path: Path) -> None:
    far, same = Histogram(), Histogram()
    far.add([1e-6, 1e-3, 60.0])
    same.add([0.002] * 50)
    for latency in (far, same):
        draw(str(tmp_path / "plot.png"), "echo", [Side("", [a_report(latency=latency)])])
    assert (tmp_path / "plot.png").read_bytes().startswith(b"\x89PNG")


def test_letters_the_font_lacks_are_no_trouble(tmp_path: Path) -> None:
    draw(str(tmp_path / "plot.png"), "図書館", [Side("\x1b[31m <b>&", [a_report()])])
    draw(str(tmp_path / "plot.svg"), "図書館", [Side("\x1b[31m <b>&", [a_report()])])
    assert {"図書館", "\\x1b[31m <b>&"} <= set(texts_of(tmp_path / "plot.svg"))


def test_labels_that_would_touch_move_apart() -> None:
    from trimcp.cli.bench.plot import _apart

    assert _apart([0.1, 0.5], 0.2) == [0.1, 0.5]
    assert _apart([0.3, 0.35, 0.36], 0.2) == pytest.approx([0.3, 0.5, 0.7])
    assert _apart([0.9, 0.95, 1.0], 0.2) == pytest.approx([0.5, 0.7, 0.9]), "within the axes"
    assert _apart([0.0], 0.2) == [0.1]


@pytest.mark.parametrize(
    ("file", "told"),
    [
        ("plot.pdf", "--plot draws .svg or .png files; 'plot.pdf' has another ending"),
        ("nowhere/plot.svg", "--plot cannot write nowhere/plot.svg: there is no folder nowhere"),
    ],
)
def test_what_cannot_be_drawn_is_said_beforehand(file: str, told: str) -> None:
    with pytest.raises(Failure, match="--plot") as caught:
        check_plot(file)
    assert (caught.value.message, caught.value.exit_code) == (told, USAGE)
    check_plot("plot.PNG")


def test_a_file_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "plot.svg").mkdir()
    with pytest.raises(Failure, match=r"cannot write .*plot\.svg: Is a directory"):
        draw(str(tmp_path / "plot.svg"), "echo", [Side("", [a_report()])])


def test_without_matplotlib_it_says_what_to_install_before_it_measures() -> None:
    program = "import sys; sys.modules['matplotlib'] = None; import trimcp.cli; trimcp.cli.main()"
    words = ["bench", "no-such-program", "--tool", "t", "--plot", "x.svg"]
    done = subprocess.run([sys.executable, "-c", program, *words], capture_output=True, text=True, cwd=ROOT)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == 'Error: --plot needs matplotlib, which is not installed: pip install "trimcp[plot]"\n'
