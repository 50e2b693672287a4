"""A seccomp filter: the system calls that a program in a sandbox has no business with, as a program for the kernel.

Written by hand, since it is short: classic BPF over `struct seccomp_data` (seccomp(2)), for 64-bit x86 and ARM. What
is refused fails with EPERM, and nothing that computes, reads and writes needs it.
"""

from __future__ import annotations

import errno
import platform
import struct
import sys
from typing import Final

import attrs

# By name: the number on x86-64 and on ARM64; None where there is no such call.
_REFUSED: Final[dict[str, tuple[int | None, int | None]]] = {
    # other processes
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "pidfd_getfd": (438, 438),
    "kcmp": (312, 272),
    # file systems and namespaces
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "unshare": (272, 97),
    "setns": (308, 268),
    "name_to_handle_at": (303, 264),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    # keys
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    # parts of the kernel in which faults are found often
    "bpf": (321, 280),
    "perf_event_open": (298, 241),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    # the machine
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "reboot": (169, 142),
    "acct": (163, 89),
    "syslog": (103, 116),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "adjtimex": (159, 171),
    "clock_adjtime": (305, 266),
    "iopl": (172, None),
    "ioperm": (173, None),
    "modify_ldt": (154, None),
}
_CLONE: Final = (56, 220)
_CLONE3: Final = (435, 435)
_SOCKET: Final = (41, 198)
_IOCTL: Final = (16, 29)

_NEW_NAMESPACES: Final = 0x7E020000  # each CLONE_NEW* but CLONE_NEWTIME, which clone cannot make
_FAMILIES: Final = (2, 10, 16)  # AF_INET, AF_INET6, AF_NETLINK: all end in the sandbox's own network
_TIOCSTI: Final = 0x5412  # types into the terminal
_TIOCLINUX: Final = 0x541C
_X32: Final = 0x40000000  # the other way to call an x86-64 kernel, with numbers of its own

_NUMBER, _ARCHITECTURE, _FIRST, _SECOND = 0, 4, 16, 24  # offsets in struct seccomp_data; of arguments the low half
_LOAD, _RETURN = 0x20, 0x06
_JUMP_IF_EQUAL, _JUMP_IF_ANY, _JUMP_IF_AT_LEAST = 0x15, 0x45, 0x35
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000


@attrs.frozen
class _Machine:
    column: int
    architecture: int  # AUDIT_ARCH_*


_MACHINES: Final = {"x86_64": _Machine(0, 0xC000003E), "aarch64": _Machine(1, 0xC00000B7)}


def seccomp_filter(machine: str | None = None) -> bytes | None:
    """Return the filter for this machine (or one of that name), or None where we know no numbers of its calls.

    Beside what the table names it refuses sockets but IPv4, IPv6 and netlink (a Unix socket leads out of a network
    namespace by a path, a vsock to the host of a virtual machine), new namespaces, and typing into a terminal.
    """
    if machine is None:
        machine = platform.machine() if sys.maxsize > 2**32 else ""
    known = _MACHINES.get(machine)
    return None if known is None else _assemble(known)


def _assemble(machine: _Machine) -> bytes:
    column = machine.column
    program = [
        _step(_LOAD, _ARCHITECTURE),
        _step(_JUMP_IF_EQUAL, machine.architecture, then=1),
        _step(_RETURN, _KILL),  # a 32-bit program: its calls have other numbers
        _step(_LOAD, _NUMBER),
    ]
    if column == 0:
        program += [_step(_JUMP_IF_AT_LEAST, _X32, otherwise=1), _step(_RETURN, _KILL)]
    for numbers in _REFUSED.values():
        number = numbers[column]
        if number is not None:
            program += _when(number, [_refuse(errno.EPERM)])
    program += _when(_CLONE3[column], [_refuse(errno.ENOSYS)])  # its flags cannot be read here; all fall back on clone
    program += _when(
        _CLONE[column],
        [
            _step(_LOAD, _FIRST),
            _step(_JUMP_IF_ANY, _NEW_NAMESPACES, otherwise=1),
            _refuse(errno.EPERM),
            _step(_RETURN, _ALLOW),
        ],
    )
    allowed = [_step(_JUMP_IF_EQUAL, family, then=len(_FAMILIES) - at) for at, family in enumerate(_FAMILIES)]
    program += _when(_SOCKET[column], [_step(_LOAD, _FIRST), *allowed, _refuse(errno.EACCES), _step(_RETURN, _ALLOW)])
    program += _when(
        _IOCTL[column],
        [
            _step(_LOAD, _SECOND),
            _step(_JUMP_IF_EQUAL, _TIOCSTI, then=1),
            _step(_JUMP_IF_EQUAL, _TIOCLINUX, otherwise=1),
            _refuse(errno.EPERM),
            _step(_RETURN, _ALLOW),
        ],
    )
    program.append(_step(_RETURN, _ALLOW))
    return b"".join(program)


def _when(number: int, body: list[bytes]) -> list[bytes]:
    """Return the steps for one system call; its number is loaded, and the body returns."""
    return [_step(_JUMP_IF_EQUAL, number, otherwise=len(body)), *body]


def _refuse(number: int) -> bytes:
    return _step(_RETURN, _ERROR | number)


def _step(code: int, value: int, *, then: int = 0, otherwise: int = 0) -> bytes:
    """Return one instruction (struct sock_filter): a jump passes over so many instructions."""
    return struct.pack("<HBBI", code, then, otherwise, value)
