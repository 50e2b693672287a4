"""The filter of system calls, run as the kernel would, for both kinds of machines."""

from __future__ import annotations

import errno
import struct

import pytest

from trimcp.workers.seccomp import _REFUSED, seccomp_filter

ALLOWED, KILLED = 0x7FFF0000, 0x80000000
MACHINES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}

# By name: the numbers on both machines, from the kernel's tables.
ORDINARY = {"read": (0, 63), "write": (1, 64), "execve": (59, 221), "socketpair": (53, 199), "connect": (42, 203)}
CLONE, CLONE3, SOCKET, IOCTL = (56, 220), (435, 435), (41, 198), (16, 29)


def judge(program: bytes, architecture: int, number: int, *arguments: int) -> int:
    """Run the filter over one system call."""
    data = struct.pack("<IIQ6Q", number, architecture, 0, *arguments, *[0] * (6 - len(arguments)))
    steps = list(struct.iter_unpack("<HBBI", program))
    at = value = 0
    while True:
        code, then, otherwise, operand = steps[at]
        at += 1
        match code:
            case 0x20:
                (value,) = struct.unpack_from("<I", data, operand)
            case 0x06:
                return operand
            case 0x15:
                at += then if value == operand else otherwise
            case 0x35:
                at += then if value >= operand else otherwise
            case 0x45:
                at += then if value & operand else otherwise
            case _:
                raise AssertionError(hex(code))


def refused(number: int) -> int:
    return 0x00050000 | number


@pytest.fixture(params=MACHINES)
def machine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
def column(machine: str) -> int:
    return list(MACHINES).index(machine)


@pytest.fixture
def program(machine: str) -> bytes:
    found = seccomp_filter(machine)
    assert found is not None
    return found


def test_what_the_table_names_is_refused_and_the_rest_is_not(machine: str, column: int, program: bytes) -> None:
    here = MACHINES[machine]
    named = {numbers[column] for numbers in _REFUSED.values()} - {None}
    assert len(named) >= 45
    special = {numbers[column] for numbers in (CLONE3, SOCKET)}
    for number in range(600):
        said = judge(program, here, number)
        if number in named:
            assert said == refused(errno.EPERM), number
        elif number not in special:
            assert said == ALLOWED, number
    for numbers in ORDINARY.values():
        assert judge(program, here, numbers[column]) == ALLOWED


def test_no_new_namespaces(machine: str, column: int, program: bytes) -> None:
    here, clone = MACHINES[machine], CLONE[column]
    thread = 0x3D0F00  # what pthread_create asks for
    assert judge(program, here, clone, thread) == ALLOWED
    assert judge(program, here, clone, 17) == ALLOWED  # fork: SIGCHLD
    for flag in (0x00020000, 0x02000000, 0x04000000, 0x08000000, 0x10000000, 0x20000000, 0x40000000):
        assert judge(program, here, clone, 17 | flag) == refused(errno.EPERM), hex(flag)
    assert judge(program, here, CLONE3[column]) == refused(errno.ENOSYS)


def test_only_sockets_of_the_sandbox_s_own_network(machine: str, column: int, program: bytes) -> None:
    here, socket = MACHINES[machine], SOCKET[column]
    for family in range(50):
        expected = ALLOWED if family in (2, 10, 16) else refused(errno.EACCES)
        assert judge(program, here, socket, family) == expected, family


def test_nothing_is_typed_into_the_terminal(machine: str, column: int, program: bytes) -> None:
    here, ioctl = MACHINES[machine], IOCTL[column]
    assert judge(program, here, ioctl, 0, 0x5412) == refused(errno.EPERM)
    assert judge(program, here, ioctl, 0, 0x541C) == refused(errno.EPERM)
    assert judge(program, here, ioctl, 0, 0x5413) == ALLOWED  # TIOCGWINSZ


def test_calls_of_another_kind_are_the_end(machine: str, program: bytes) -> None:
    i386 = 0x40000003
    assert judge(program, i386, 0) == KILLED
    if machine == "x86_64":
        assert judge(program, MACHINES[machine], 0x40000000 | 101) == KILLED


def test_there_is_none_for_machines_whose_numbers_we_do_not_know() -> None:
    assert seccomp_filter("riscv64") is None
    assert seccomp_filter("i686") is None
