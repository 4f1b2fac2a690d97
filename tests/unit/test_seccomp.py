"""The io_uring filter, as instructions; tests/supervisor shows that the kernel takes it."""

from __future__ import annotations

import errno

import pytest

from nvsnap_launch import seccomp

ALLOW, ENOSYS = 0x7FFF0000, 0x00050000 | errno.ENOSYS


def run(program: list[tuple[int, int, int, int]], number: int, architecture: int) -> int:
    """What the kernel would answer: the three instructions that the filter is made of."""
    value, at = 0, 0
    data = {0: number, 4: architecture}
    while True:
        code, if_true, if_false, k = program[at]
        at += 1
        if code == 0x20:
            value = data[k]
        elif code == 0x15:
            at += if_true if value == k else if_false
        else:
            return k


@pytest.mark.parametrize(("machine", "architecture"), [("x86_64", 0xC000003E), ("aarch64", 0xC00000B7)])
def test_only_io_uring_setup_is_answered(machine: str, architecture: int) -> None:
    program = seccomp.instructions(machine)
    assert run(program, 425, architecture) == ENOSYS
    assert run(program, 425 | 0x40000000, architecture) == ENOSYS
    for number in (0, 59, 424, 426, 427):
        assert run(program, number, architecture) == ALLOW
    assert run(program, 425, 0x40000003) == ALLOW


def test_an_unknown_machine_is_said() -> None:
    with pytest.raises(OSError, match="riscv64"):
        seccomp.instructions("riscv64")
