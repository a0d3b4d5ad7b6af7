"""Runs inside the sandbox's process: confines it, then executes a program. It is a script of its
own, imports nothing of megarl, and works for any user, without privileges and without namespaces.

    python -I -B -X utf8 confine.py '{"program": "/tmp/x/program.py", ...}'

First come the limits of the kernel (CPU, memory, files), then Landlock (no file but those named),
then a seccomp filter that allows the system calls which computing needs, and no others: no process,
no socket, no signal to others, and no SIGKILL to itself, so that such an end came from outside.
None of it can be taken back. "1" on the pipe `status` says that all of it stands; "!" and a text,
what did not work. The pipe is closed before the program begins.
"""

from __future__ import annotations

import ast
import ctypes
import json
import os
import platform
import resource
import signal
import struct
import sys
import traceback
from typing import Any

_LIBC = ctypes.CDLL(None, use_errno=True)
_PR_SET_PDEATHSIG, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 22, 38
_ENOSYS = 38

# Landlock's system calls have the same numbers everywhere
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_READ_FILE, _READ_DIR, _WRITE_FILE = 1 << 2, 1 << 3, 1 << 1
_MAKE_REG, _TRUNCATE = 1 << 8, 1 << 14
# access rights to files that a version of Landlock knows: those of the first, and of later ones
_FIRST, _LATER = (1 << 13) - 1, {2: 1 << 13, 3: _TRUNCATE, 5: 1 << 15}
_NO_TCP, _NO_SIGNALS_AND_ABSTRACT_SOCKETS = 3, 3  # from versions 4 and 6

# audit number of the machine -> system calls that are allowed whatever their arguments: reading and
# writing open files, opening (Landlock decides which), memory, threads' locks, time, own identity.
# Left out for good: what changes a file's mode, owner or times, which Landlock does not see, and
# what reserves disk space without writing to it.
_ALLOWED: dict[str, tuple[int, frozenset[int]]] = {
    "x86_64": (
        0xC000003E,
        frozenset(
            [*range(16), *range(17, 29), *range(32, 37), 38, 39, 40, 44, 45, 60, 63]
            + [74, 75, 77, 78, 79, 80, 81, 82, 83, 84, 85, 86, 87, 88, 89, 95, 96, 97, 98, 99]
            + [100, 102, 104, 107, 108, 110, 111, 115, 118, 120, 121, 124, 127, 128, 130, 131]
            + [137, 138, 146, 147, 158, 186, 201, 202, 204, 213, 217, 218, 219, 221, 228, 229]
            + [230, 231, 232, 233, 257, 258, 262, 263, 264, 265, 266, 267, 269, 270, 271, 273]
            + [274, 281, 283, 286, 290, 291, 292, 293, 295, 296, 309, 316, 318, 324, 326]
            + [332, 334, 436, 439, 449]
        ),
    ),
    "aarch64": (
        0xC00000B7,
        frozenset(
            [17, *range(19, 25), *range(34, 39), 43, 44, 46, 48, 49, 50, 56, 57, 59]
            + [*range(61, 74), 78, 79, 80, 82, 83, 85, 86, 93, 94, 96, 98, 99, 100, 101, 102]
            + [103, 113, 114, 115, 123, 124, 125, 126, 128, 132, 133, 134, 135, 136, 137, 139]
            + [148, 150, 153, 155, 156, 158, 160, 163, 165, 166, 168, 169, 172, 173, 174, 175]
            + [176, 177, 178, 179, 206, 207, 214, 215, 216, 222, 223, 226, 227, 232, 233, 276]
            + [278, 283, 285, 291, 293, 436, 439, 449]
        ),
    ),
}
# the numbers, in the same order, of what is allowed with certain arguments alone
_CALLS = ("clone", "clone3", "kill", "tgkill", "prlimit64", "ioctl", "fcntl", "socketpair")
_NUMBERS = {
    "x86_64": (56, 435, 62, 234, 302, 16, 72, 53),
    "aarch64": (220, 435, 129, 131, 261, 29, 25, 199),
}
# the calls that open a file, and which of their arguments has the flags
_OPENS = {"x86_64": ((2, 1), (257, 2)), "aarch64": ((56, 2),)}
_UNNAMED = 0x400000  # O_TMPFILE's own bit
_CLONE_THREAD, _CLONE_NEW = 0x10000, 0x7E020000
_IOCTLS = (0x5401, 0x5421, 0x541B, 0x5450, 0x5451)  # is it a terminal, blocking, closed on exec
_FCNTLS = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)  # none that has signals sent

# numbers of socket, of socketpair, and of what a program in namespaces is refused: io_uring, which
# makes sockets that no filter sees, and the three calls of the user's keyring
_NETWORK = {
    "x86_64": (41, 53, (425, 248, 249, 250)),
    "aarch64": (198, 199, (425, 217, 218, 219)),
}
_FAMILIES = (2, 10, 16)  # IPv4, IPv6, netlink
_X32 = 0x40000000  # from here on the system calls of another ABI

# classic BPF: opcodes, and where seccomp_data holds its fields
_LOAD, _AND, _JUMP_EQUAL, _JUMP_AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x06
_NR, _ARCH, _ARGS = 0, 4, 16
_ALLOW, _KILL, _ERRNO = 0x7FFF0000, 0x80000000, 0x00050000
Instruction = tuple[int, int, int, int]


def main() -> None:
    """Confines this process as the job in argv says, and executes the program."""
    job = json.loads(sys.argv[1])
    status = job["status"]
    try:
        with open(job["program"], encoding="utf-8") as file:
            source = file.read()
        _end_with(job["parent"])
        _limit(job)
        restrict_files(job["readable"], job["directory"])
        filter_calls()
    except Exception as e:
        os.write(status, f"!{type(e).__name__}: {e}".encode())
        os._exit(1)
    os.write(status, b"1")
    os.close(status)
    sys.argv = ["program.py"]
    os.remove = os.unlink = _empty
    _execute(source, show_last=job["show_last"])


def _end_with(parent: int) -> None:
    """Has the kernel end this process with the one that started it."""
    _call(_LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0), "prctl(PDEATHSIG)")
    if os.getppid() != parent:
        raise RuntimeError("the process that started the sandbox is gone")


def _limit(job: dict[str, Any]) -> None:
    try:  # where memory runs out, this process goes before those of the job
        with open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
    except OSError:  # the machine does not let it
        pass
    cpu = job["cpu"]
    for what, soft, hard in (
        (resource.RLIMIT_CPU, cpu, cpu + 1),
        (resource.RLIMIT_AS, job["memory"], job["memory"]),
        (resource.RLIMIT_FSIZE, job["file_size"], job["file_size"]),
        (resource.RLIMIT_NOFILE, 32, 32),
        (resource.RLIMIT_CORE, 0, 0),
    ):
        resource.setrlimit(what, (soft, hard))


def restrict_files(readable: list[str], directory: str) -> None:
    """Forbids this process every file but those in `readable`, to be read, and those of
    `directory`, which it may also make and write. It may remove none: a file without a name that is
    still mapped takes disk space which nobody sees. Raises OSError where the kernel has no
    Landlock."""
    version = _LIBC.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    _call(version, "Landlock (Linux 5.13 or later, with landlock in CONFIG_LSM)")
    files = _FIRST | sum(bit for since, bit in _LATER.items() if version >= since)
    fields = [files]
    if version >= 4:
        fields.append(_NO_TCP)
    if version >= 6:
        fields.append(_NO_SIGNALS_AND_ABSTRACT_SOCKETS)
    attributes = struct.pack(f"{len(fields)}Q", *fields)
    rules = _LIBC.syscall(
        _CREATE_RULESET, attributes, ctypes.c_size_t(len(attributes)), ctypes.c_uint(0)
    )
    _call(rules, "landlock_create_ruleset")
    written = _READ_FILE | _READ_DIR | _WRITE_FILE | _MAKE_REG | _TRUNCATE
    for path in readable:
        _allow(rules, path, _READ_FILE | _READ_DIR)
    _allow(rules, "/dev/null", _READ_FILE | _WRITE_FILE | _TRUNCATE & files)
    _allow(rules, directory, written & files)
    _no_new_privileges()
    _call(_LIBC.syscall(_RESTRICT_SELF, rules, 0), "landlock_restrict_self")
    os.close(rules)


def _allow(rules: int, path: str, rights: int) -> None:
    try:
        fd = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    if not os.path.isdir(path):
        rights &= ~_READ_DIR
    rule = struct.pack("=Qi", rights, fd)
    _call(_LIBC.syscall(_ADD_RULE, rules, 1, rule, 0), f"landlock_add_rule({path})")
    os.close(fd)


def filter_calls() -> None:
    """Forbids this process every system call that computing does not need. Raises OSError where the
    kernel has no seccomp, RuntimeError on a machine whose numbers are not known."""
    machine = platform.machine()
    if machine not in _ALLOWED:
        raise RuntimeError(f"no system calls are known of {machine}: use x86_64 or aarch64")
    program = packed(filter_program(machine, os.getpid()))
    code = ctypes.create_string_buffer(program, len(program))
    # struct sock_fprog: the number of instructions, padding, and where they are
    head = struct.pack("=H6xQ", len(program) // 8, ctypes.addressof(code))
    _no_new_privileges()
    _call(_LIBC.prctl(_PR_SET_SECCOMP, 2, ctypes.c_char_p(head), 0, 0), "prctl(SECCOMP)")


def filter_program(machine: str, pid: int) -> list[Instruction]:
    """Returns the seccomp filter of process `pid` on a machine: other machines' calls end it, calls
    not named fail as not permitted. The arguments are compared by their lower 32 bits, as the
    kernel reads them, but for a pointer."""
    _, allowed = _ALLOWED[machine]
    n = dict(zip(_CALLS, _NUMBERS[machine], strict=True))
    code = _calls_of(machine)
    # glibc falls back to clone where there is no clone3, whose flags no filter can see
    code += [(_JUMP_EQUAL, 0, 1, n["clone3"]), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    special = {*n.values(), *(nr for nr, _ in _OPENS[machine])}
    for nr in sorted(allowed - special):
        code += [(_JUMP_EQUAL, 0, 1, nr), (_RETURN, 0, 0, _ALLOW)]
    for nr, at in _OPENS[machine]:
        code += _where(nr, [_load(at), (_AND, 0, 0, _UNNAMED), *_equal(0)])
    # threads, no processes and no namespaces
    flags = (_load(0), (_AND, 0, 0, _CLONE_THREAD | _CLONE_NEW))
    code += _where(n["clone"], [*flags, *_equal(_CLONE_THREAD)])
    code += _where(n["kill"], [_load(0), *_equal(pid), _load(1), *_unequal(signal.SIGKILL)])
    code += _where(n["tgkill"], [_load(0), *_equal(pid), _load(2), *_unequal(signal.SIGKILL)])
    # limits may be read, its own: the pointer to new ones, of 64 bits, is null
    reads = [_load(0), *_equal(0, pid), _load(2), *_equal(0), _load(2, high=True), *_equal(0)]
    code += _where(n["prlimit64"], reads)
    code += _where(n["ioctl"], [_load(1), *_equal(*_IOCTLS)])
    code += _where(n["fcntl"], [_load(1), *_equal(*_FCNTLS)])
    # of streams between two ends of this process, as asyncio wants
    stream = [_load(0), *_equal(1), _load(1), (_AND, 0, 0, 0xF), *_equal(1)]
    code += _where(n["socketpair"], stream)
    return [*code, (_RETURN, 0, 0, _ERRNO | 1)]


def network_filter(machine: str) -> list[Instruction]:
    """Returns the seccomp filter of a program that has network and IPC namespaces of its own.

    Namespaces do not cover Unix sockets with a path, VSOCK sockets and keyrings. The filter refuses
    every socket except IPv4, IPv6 and netlink, and every pair of sockets that can connect to
    another socket. Raises RuntimeError if the numbers of the machine's system calls are unknown.
    """
    if machine not in _NETWORK:
        raise RuntimeError(f"machine={machine}: unknown system calls; use x86_64 or aarch64")
    socket, socketpair, refused = _NETWORK[machine]
    code = _calls_of(machine)
    code += [(_JUMP_AT_LEAST, 0, 1, _X32), (_RETURN, 0, 0, _ERRNO | _ENOSYS)]
    code += _where(socket, [_load(0), *_equal(*_FAMILIES)])
    # streams and sequenced packets stay connected to each other, datagrams do not
    code += _where(socketpair, [_load(0), *_equal(1), _load(1), (_AND, 0, 0, 0xF), *_equal(1, 5)])
    for nr in refused:
        code += [(_JUMP_EQUAL, 0, 1, nr), (_RETURN, 0, 0, _ERRNO | 1)]
    return [*code, (_RETURN, 0, 0, _ALLOW)]


def packed(program: list[Instruction]) -> bytes:
    """Returns a filter as the kernel reads it, 8 bytes for each instruction."""
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _calls_of(machine: str) -> list[Instruction]:
    """Returns code that kills a process with another machine's call, and loads the number."""
    audit, _ = _ALLOWED[machine]
    same = [(_LOAD, 0, 0, _ARCH), (_JUMP_EQUAL, 1, 0, audit), (_RETURN, 0, 0, _KILL)]
    return [*same, (_LOAD, 0, 0, _NR)]


def _where(nr: int, conditions: list[Instruction]) -> list[Instruction]:
    """Returns code that ends in a decision where the call is `nr`: allowed if all conditions hold,
    else not permitted."""
    body = [*conditions, (_RETURN, 0, 0, _ALLOW)]
    return [(_JUMP_EQUAL, 0, len(body), nr), *body]


def _load(argument: int, *, high: bool = False) -> Instruction:
    return (_LOAD, 0, 0, _ARGS + 8 * argument + 4 * high)


def _equal(*values: int) -> list[Instruction]:
    """Returns code that refuses the call unless what was loaded is one of `values`."""
    tests = [(_JUMP_EQUAL, len(values) - i, 0, value) for i, value in enumerate(values)]
    return [*tests, (_RETURN, 0, 0, _ERRNO | 1)]


def _unequal(value: int) -> list[Instruction]:
    """Returns code that refuses the call where what was loaded is `value`."""
    return [(_JUMP_EQUAL, 0, 1, value), (_RETURN, 0, 0, _ERRNO | 1)]


def _no_new_privileges() -> None:
    _call(_LIBC.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(NO_NEW_PRIVS)")


def _call(result: int, what: str) -> None:
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), what)


def _empty(path: Any, *, dir_fd: int | None = None) -> None:
    """Stands in for os.remove, for programs that clean up behind themselves: the file stays, and
    has nothing in it."""
    os.close(os.open(path, os.O_WRONLY | os.O_TRUNC, dir_fd=dir_fd))


def _execute(source: str, *, show_last: bool) -> None:
    """Executes the program. Where it raises, the traceback begins in the program; where it ends
    with an expression, and show_last is set, its value is printed."""
    scope: dict[str, Any] = {"__name__": "__main__", "__builtins__": __builtins__}
    try:
        tree = ast.parse(source, "program.py")
        last = tree.body.pop() if show_last and tree.body else None
        if last is not None and not isinstance(last, ast.Expr):
            tree.body.append(last)
            last = None
        exec(compile(tree, "program.py", "exec"), scope)
        if isinstance(last, ast.Expr):
            value = eval(compile(ast.Expression(last.value), "program.py", "eval"), scope)
            if value is not None:
                print(repr(value))
    except SystemExit:
        raise
    except BaseException as e:
        seen = e.__traceback__
        traceback.print_exception(e.with_traceback(seen.tb_next if seen else None))
        sys.exit(1)


if __name__ == "__main__":
    main()
