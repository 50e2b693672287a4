"""Skills as both sides know them: entries with the digests of their files, and what makes one valid."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal
from urllib.parse import unquote

import attrs

from trimcp.extensions.yaml_values import read_yaml

MANIFEST: Final = "SKILL.md"
MOST_FILES: Final = 512
MOST_BYTES: Final = 16 * 1024 * 1024

_NAME: Final = re.compile(r"[a-z0-9]+(?:-[a-z0-9]+)*")
_DIGEST: Final = re.compile(r"sha256:[0-9a-f]{64}")
_LONGEST_NAME: Final = 64
_LONGEST_DESCRIPTION: Final = 1024
_MOST_FRONTMATTER: Final = 16 * 1024  # bytes
_MOST_NODES: Final = 1_000
_DEEPEST: Final = 16
_FRONTMATTER: Final = re.compile(r"\A---[ \t]*\r?\n(?P<yaml>.*?)^---[ \t]*(?:\r?\n|\Z)", re.DOTALL | re.MULTILINE)


@attrs.frozen
class SkillFile:
    """One file of a skill: its address, the SHA-256 of its bytes as `sha256:...`, and their number."""

    uri: str
    digest: str
    size: int


@attrs.frozen
class Skill:
    """One skill as its server describes it. All texts are the server's: untrusted.

    Attributes:
        uri: the address of its SKILL.md. It identifies the skill, together with the server.
        frontmatter: what its SKILL.md says of it, as JSON.
        resources: all its files, SKILL.md included; or "dynamic" if what it says is made for each reader.
    """

    uri: str
    frontmatter: Mapping[str, Any]
    resources: Sequence[SkillFile] | Literal["dynamic"]

    @property
    def name(self) -> str:
        """Its name, for display. Several skills may have the same."""
        return str(self.frontmatter["name"])

    @property
    def description(self) -> str:
        """What it is for and when to use it."""
        return str(self.frontmatter["description"])

    @property
    def root(self) -> str:
        """The address of its folder."""
        return self.uri.removesuffix(f"/{MANIFEST}")

    @property
    def files(self) -> Sequence[SkillFile]:
        """All its files, SKILL.md included; none are known of a dynamic one."""
        return () if isinstance(self.resources, str) else self.resources

    @property
    def fingerprint(self) -> str:
        """A digest of its address and all its files. Store it with an approval, which ends when it changes."""
        lines = [self.uri, *sorted(f"{file.uri} {file.digest}" for file in self.files)]
        return digest_of("\n".join(lines).encode())


def read_frontmatter(content: bytes) -> dict[str, Any]:
    """Return the frontmatter with which a SKILL.md begins.

    Raises ValueError: there is none, it is no mapping of JSON values, or it has an alias, a tag or too much; the text
    tells which. LocalError: the library is not installed.
    """
    most = _MOST_FRONTMATTER
    try:
        text = content[: most + 16].decode("utf-8", "ignore" if len(content) > most else "strict")
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8") from None
    found = _FRONTMATTER.match(text)
    if found is None:
        raise ValueError(f"it does not begin with frontmatter between lines of ---, at most {most} bytes")
    bounds = {"most_nodes": _MOST_NODES, "deepest": _DEEPEST}
    value = read_yaml(found["yaml"], "its frontmatter", kind="skills", first_line=2, **bounds)
    if not isinstance(value, dict):
        raise ValueError("its frontmatter is no mapping")
    return value


def digest_of(content: bytes) -> str:
    """Return the digest of a file's bytes as entries have it."""
    return f"sha256:{hashlib.sha256(content).hexdigest()}"


def check_entry(skill: Skill) -> None:
    """Raise ValueError, with what is wrong, for an entry that no server should send and no client should use."""
    name, description = skill.frontmatter.get("name"), skill.frontmatter.get("description")
    if not isinstance(name, str) or len(name) > _LONGEST_NAME or _NAME.fullmatch(name) is None:
        raise ValueError(f"its name is not made of at most {_LONGEST_NAME} small letters, digits and single hyphens")
    if not isinstance(description, str) or not 0 < len(description.strip()) <= len(description) <= _LONGEST_DESCRIPTION:
        raise ValueError(f"its description is not a text of at most {_LONGEST_DESCRIPTION} characters")
    if not skill.uri.endswith(f"/{name}/{MANIFEST}"):
        raise ValueError(f"its folder is not called {name}, as it is")
    if isinstance(skill.resources, str):
        return
    files = skill.files
    if len(files) > MOST_FILES or sum(file.size for file in files) > MOST_BYTES:
        raise ValueError(f"it has more than {MOST_FILES} files, or more than {MOST_BYTES} bytes of them")
    uris = {file.uri for file in files}
    if skill.uri not in uris or len(uris) < len(files):
        raise ValueError(f"its list of files lacks its {MANIFEST}, or has one of them twice")
    inside = f"{skill.root}/"
    for file in files:
        whole, steps = unquote(file.uri).split("/"), unquote(file.uri.removeprefix(inside)).split("/")
        if not file.uri.startswith(inside) or "" in steps or not {".", ".."}.isdisjoint(whole) or "\\" in file.uri:
            raise ValueError("its list of files has one that is not in its folder")
        if _DIGEST.fullmatch(file.digest) is None or file.size < 0:
            raise ValueError("its list of files has a digest or a size that is none")


def entry_of(raw: Any) -> Skill:
    """Return the entry in a server's answer. Raises ValueError, with what is wrong."""
    if not isinstance(raw, dict) or not isinstance(raw.get("uri"), str) or not isinstance(raw.get("frontmatter"), dict):
        raise ValueError("an entry is an object with the address and the frontmatter of a skill")
    files = raw.get("resources")
    if files != "dynamic":
        if not isinstance(files, list):
            raise ValueError("it has no list of files, nor is it said to be dynamic")
        files = tuple(_file_of(file) for file in files[: MOST_FILES + 1])
    skill = Skill(raw["uri"], raw["frontmatter"], files)
    check_entry(skill)
    return skill


def _file_of(raw: Any) -> SkillFile:
    uri, digest, size = (raw.get(key) if isinstance(raw, dict) else None for key in ("uri", "digest", "size"))
    if not isinstance(uri, str) or not isinstance(digest, str) or type(size) is not int:
        raise ValueError("its list of files has one without address, digest or size")
    return SkillFile(uri, digest, size)


def same_json(one: Any, other: Any) -> bool:
    """Return whether two JSON values are the same: numbers by value, and true is no number."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(value, other[key]) for key, value in one.items())
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    return bool(one == other)
