"""That type checkers are given what the documentation says, line for line."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs import check_snippets

PAGE = """\
# A page

```python title="weather.py"
server = 1
```

```python
import weather
from weather import server
```

<!-- output -->
```text
nothing
```

```python
print(await server)
```

<!-- new program -->
```python
more = server
```
"""


def test_a_program_keeps_its_page_s_lines(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(PAGE, "utf-8")
    programs = {name: check_snippets.source_of(program) for name, program in check_snippets.programs_of(page)}
    assert list(programs) == ["weather.py", "line_8.py", "line_23.py"]
    lines = PAGE.splitlines()
    for source in programs.values():
        for number, line in enumerate(source.splitlines()[1:], 2):
            assert line.strip() in ("", "async def _program() -> None:", lines[number - 1]), number
    assert programs["line_8.py"].splitlines()[16:] == ["async def _program() -> None:", "    print(await server)"]


def test_programs_of_a_page_find_each_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check_snippets, "FOLDER", tmp_path)
    source = "import weather\nimport weathercock\nfrom weather import server\n"
    assert check_snippets.put("page", [("weather.py", ""), ("line_8.py", source)]) == [
        "page/weather.py",
        "page/line_8.py",
    ]
    written = (tmp_path / "page" / "line_8.py").read_text("utf-8")
    assert written == "from page import weather\nimport weathercock\nfrom page.weather import server\n"
