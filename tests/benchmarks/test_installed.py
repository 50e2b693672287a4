"""What an installation is counted to consist of."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from installed import Installed, installed


def distribution(home: Path, name: str, size: int, *requires: str) -> None:
    """Install a distribution as pip leaves it, with its compiled bytecode."""
    package, info = home / name.replace("-", "_"), home / f"{name.replace('-', '_')}-1.0.dist-info"
    for folder in (package, info):
        folder.mkdir(parents=True)
    (package / "code.py").write_bytes(b"x" * size)
    (package / "code.pyc").write_bytes(b"x" * 10_000)
    needed = "".join(f"Requires-Dist: {text}\n" for text in requires)
    metadata = f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needed}"
    (info / "METADATA").write_text(metadata)
    (info / "RECORD").write_text(f"{package.name}/code.py,,\n{package.name}/code.pyc,,\n")


def test_a_distribution_counts_with_all_it_requires_but_no_bytecode(tmp_path: Path) -> None:
    home = tmp_path / "site-packages"
    distribution(home, "one", 1, "two-words>=1", "three; extra == 'more'", "four; python_version < '3'")
    distribution(home, "two_words", 20, "one")
    distribution(home, "three", 300)
    assert installed("one", home) == Installed(2, 21)


def test_an_extra_counts_where_it_is_asked_for(tmp_path: Path) -> None:
    home = tmp_path / "site-packages"
    distribution(home, "one", 1, "two[more]")
    distribution(home, "two", 20, "three; extra == 'more'")
    distribution(home, "three", 300)
    assert installed("one", home) == Installed(3, 321)


def package(folder: Path, size: int, **dependencies: str) -> None:
    """Install a package as npm leaves it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "package.json").write_text(json.dumps({"dependencies": dependencies}))
    (folder / "code.js").write_bytes(b"x" * size)


def test_a_node_package_counts_with_what_it_finds_next_to_it_or_within(tmp_path: Path) -> None:
    home = tmp_path / "node_modules"
    package(home / "@scope" / "one", 1_000, two="1", three="1")
    package(home / "two", 20_000, three="2")
    package(home / "three", 300_000)
    package(home / "two" / "node_modules" / "three", 4_000_000)
    package(home / "unused", 50_000_000)
    found = installed("@scope/one", home)
    assert found.distributions == 4
    assert found.size // 1_000 == 4_321


def test_what_is_not_there_is_an_error(tmp_path: Path) -> None:
    home = tmp_path / "site-packages"
    distribution(home, "one", 1, "two")
    with pytest.raises(KeyError, match="two"):
        installed("one", home)
