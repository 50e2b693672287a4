"""Why a WebSocket connection has ended: close codes (RFC 6455, section 7.4.1), faults of the peer, texts of errors."""

from __future__ import annotations

from typing import Final

from trimcp.framing.frames import FrameFault

PROTOCOL_ERROR: Final = 1002
NOT_UTF8: Final = 1007
_POLICY: Final = 1008

# Texts for error messages.
_CODES: Final = {
    1000: "normal",
    1001: "going away",
    1002: "protocol error",
    1003: "unsupported data",
    1005: "no code",
    1007: "text that is not UTF-8",
    1008: "policy violation",
    1009: "message too big",
    1010: "missing extension",
    1011: "internal error",
    1012: "restarting",
    1013: "try again later",
}

LATE_MESSAGE: Final = FrameFault(_POLICY, "a message took too long")
LATE: Final = "the peer took too long to end a message"
CLOSED: Final = "the peer has closed the connection"
GONE: Final = "the peer is gone without a closing handshake"


def fault_of(code: int) -> FrameFault:
    """Return the fault of a peer whose input the frame protocol could not read, by the code that it says."""
    if code == NOT_UTF8:
        return FrameFault(NOT_UTF8, "text is UTF-8")
    return FrameFault(PROTOCOL_ERROR, "a Close frame holds a code and a text, or nothing")


def fault_text(fault: FrameFault) -> str:
    """Return what is said of a peer that was closed for this fault."""
    return f"the peer broke the WebSocket protocol ({fault.code}: {fault.reason})"


def silence_text(seconds: float) -> str:
    """Return what is said of a peer that was given up after so many seconds."""
    return f"nothing was heard of the peer for {seconds:g} seconds"


def close_text(code: int, reason: str) -> str:
    """Return what is said of a peer that has sent this Close frame."""
    name = f" ({_CODES[code]})" if code in _CODES else ""
    return f"the peer closed the WebSocket with code {code}{name}" + (f": {reason[:200]!r}" if reason else "")
