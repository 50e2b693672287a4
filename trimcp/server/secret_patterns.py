"""What secrets look like in a text. Every pattern is bounded, and begins with letters that are looked for first.

A match of bounded length that never goes back over what it read costs a constant at each place, so no text takes
longer than its length: tested with texts made to be slow.
"""

from __future__ import annotations

import re
from typing import Final

import attrs

__all__ = ["SECRETS", "SecretPattern"]


@attrs.frozen(eq=False)
class SecretPattern:
    """One kind of secret.

    Attributes:
        name: what stands where it was.
        marks: texts of which one has to be there, in lower case; nothing else is searched.
        pattern: what it looks like. Where it has a group, that is the secret, and the rest stays.
    """

    name: str
    marks: tuple[str, ...]
    pattern: re.Pattern[str]


def _secret(name: str, marks: str, pattern: str) -> SecretPattern:
    return SecretPattern(name, tuple(marks.split()), re.compile(pattern, re.ASCII))


# Where a word begins, also after a line's end that JSON wrote as two characters.
_WORD: Final = r"(?:(?<![A-Za-z0-9_-])|(?<=\\[nrt]))"

SECRETS: Final = (
    # A key without its end is one that was cut.
    _secret(
        "private key",
        "-----begin",
        r"-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY(?: BLOCK)?-----(?:[^-]|-(?!----)){0,16384}+"
        r"(?:-----END [A-Z0-9 ]{0,48}-----)?",
    ),
    _secret(
        "authorization",
        "authorization",
        r"(?i:authorization)\\?[\"']?[ \t]{0,4}[:=][ \t]{0,4}\\?[\"']?([A-Za-z]{1,16}[ \t]{1,4}[^\s\"'\\,;]{1,4096}+)",
    ),
    _secret(
        "bearer token",
        "bearer",
        rf"{_WORD}(?i:bearer)[ \t]{{1,8}}((?=[A-Za-z._~+/-]{{0,255}}[0-9])[\w.~+/=-]{{12,4096}}+)",
    ),
    _secret("password in a URL", "://", r"://[^\s/:@\"']{0,255}+:([^\s/@\"']{1,255}+)@"),
    _secret("JSON web token", "eyj", r"eyJ[\w-]{8,512}+\.eyJ[\w-]{8,4096}+\.[\w-]{0,1024}+"),
    _secret("AWS key", "akia asia", r"(?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])"),
    _secret("GitHub token", "ghp_ gho_ ghu_ ghs_ ghr_ github_pat_", r"(?:gh[pousr]|github_pat)_\w{30,255}+"),
    _secret("GitLab token", "glpat-", r"glpat-[\w-]{20,255}+"),
    _secret("Slack token", "xox xapp-", r"(?:xox[abeprs]|xapp)-[\w-]{10,255}+"),
    _secret("Stripe key", "sk_live_ sk_test_ rk_live_ rk_test_", r"[sr]k_(?:live|test)_\w{16,255}+"),
    _secret("API key", "sk-", rf"{_WORD}sk-[\w-]{{20,255}}+"),
    _secret("Google key", "aiza ya29.", r"AIza[\w-]{35}|ya29\.[\w-]{20,1024}+"),
    _secret("package registry token", "npm_ pypi-", r"npm_\w{36}|pypi-[\w-]{50,1024}+"),
    _secret("Hugging Face token", "hf_", rf"{_WORD}hf_\w{{30,255}}+"),
)
"""The kinds that are known, in the order in which they are looked for."""
