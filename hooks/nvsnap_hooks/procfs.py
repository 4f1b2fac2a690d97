"""What /proc says about a process. Standard library only and quick: the engine itself uses it.

Source of the formats: proc(5) and the kernel's Documentation/networking/proc_net_tcp.rst.
A process that is gone, or that we may not look into, gives an empty answer: it can end at any moment.
"""

from __future__ import annotations

import os
import socket
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterable

_PF_EXITING = 0x4

TCP_STATES = {
    1: "ESTABLISHED",
    2: "SYN_SENT",
    3: "SYN_RECV",
    4: "FIN_WAIT1",
    5: "FIN_WAIT2",
    6: "TIME_WAIT",
    7: "CLOSE",
    8: "CLOSE_WAIT",
    9: "LAST_ACK",
    10: "LISTEN",
    11: "CLOSING",
    12: "NEW_SYN_RECV",
}


def _read(path: str) -> bytes:
    try:
        with open(path, "rb") as file:
            return file.read()
    except OSError:
        return b""


def descriptors(pid: int) -> dict[int, str]:
    """Open descriptor -> what it points at, as in ``socket:[123]``, ``anon_inode:[eventfd]`` or a path."""
    folder = f"/proc/{pid}/fd"
    try:
        names = os.listdir(folder)
    except OSError:
        return {}
    found = {}
    for name in names:
        try:
            found[int(name)] = os.readlink(f"{folder}/{name}")
        except OSError:
            continue
    return found


def mappings(pid: int) -> list[tuple[int, int, str]]:
    """(start, end, path) of each memory mapping, in bytes; path is "" without a file, and ends in `` (deleted)``
    when the file was unlinked."""
    found = []
    for line in os.fsdecode(_read(f"/proc/{pid}/maps")).splitlines():
        fields = line.split(None, 5)
        if len(fields) >= 5:
            start, _, end = fields[0].partition("-")
            found.append((int(start, 16), int(end, 16), fields[5] if len(fields) > 5 else ""))
    return found


def tcp_sockets(pid: int) -> list[tuple[tuple[str, int], tuple[str, int], str, int]]:
    """(local, remote, state, inode) of each TCP socket, IPv4 and IPv6, that the process holds open.

    Addresses are (ip, port), an IPv4 address inside an IPv6 socket given as IPv4; state is a name of TCP_STATES.
    The table is that of the process's own network namespace.
    """
    return tcp_sockets_of([pid])[pid]


def tcp_sockets_of(pids: Iterable[int]) -> dict[int, list[tuple[tuple[str, int], tuple[str, int], str, int]]]:
    """The same of several processes. The table of a network namespace is read once: a large host's takes 8 ms."""
    tables: dict[str, list[list[str]]] = {}
    found: dict[int, list[tuple[tuple[str, int], tuple[str, int], str, int]]] = {}
    for pid in pids:
        found[pid] = []
        own = {target[8:-1] for target in descriptors(pid).values() if target.startswith("socket:[")}
        if not own:
            continue
        for fields in _tcp_table(pid, tables):
            if fields[9] in own:
                state = TCP_STATES.get(int(fields[3], 16), fields[3])
                found[pid].append((_address(fields[1]), _address(fields[2]), state, int(fields[9])))
    return found


def _tcp_table(pid: int, known: dict[str, list[list[str]]]) -> list[list[str]]:
    try:
        namespace = os.readlink(f"/proc/{pid}/ns/net")
    except OSError:
        namespace = f"of {pid}"  # not ours to look at: its own table
    if namespace not in known:
        texts = (_read(f"/proc/{pid}/net/{name}").decode("ascii", "replace") for name in ("tcp", "tcp6"))
        lines = (line.split() for text in texts for line in text.splitlines()[1:])
        known[namespace] = [fields for fields in lines if len(fields) > 9]
    return known[namespace]


def _address(text: str) -> tuple[str, int]:
    """The kernel prints an address as 32-bit words in the machine's own byte order."""
    words, _, port = text.partition(":")
    raw = b"".join(int(words[at : at + 8], 16).to_bytes(4, sys.byteorder) for at in range(0, len(words), 8))
    if len(raw) == 4:
        return socket.inet_ntop(socket.AF_INET, raw), int(port, 16)
    if raw[:12] == b"\0" * 10 + b"\xff\xff":
        return socket.inet_ntop(socket.AF_INET, raw[12:]), int(port, 16)
    return socket.inet_ntop(socket.AF_INET6, raw), int(port, 16)


def _stat_fields(pid: int) -> list[bytes]:
    """proc(5) stat from the state letter on; empty when there is no such process."""
    text = _read(f"/proc/{pid}/stat")
    # The name, in parentheses, may itself hold spaces and parentheses.
    fields = text[text.rfind(b")") + 1 :].split()
    return fields if len(fields) >= 20 else []


def stat(pid: int) -> tuple[int, str, int] | None:
    """(parent's PID, state letter, start time in clock ticks since boot); None when there is no such process."""
    fields = _stat_fields(pid)
    return (int(fields[1]), fields[0].decode(), int(fields[19])) if fields else None


def session(pid: int) -> int:
    """PID of the process's session leader, as our PID namespace sees it; 0 when it is outside, or the process is gone."""
    fields = _stat_fields(pid)
    return int(fields[3]) if fields else 0


def alive(pid: int) -> bool:
    """True while the process runs or is stopped; one that is on its way out, or a zombie, has ended.

    The kernel closes a dying process's files, which others notice, before it turns it into a zombie: in between only the
    flag PF_EXITING (include/linux/sched.h) tells.
    """
    fields = _stat_fields(pid)
    return bool(fields) and fields[0] not in (b"Z", b"X", b"x") and not int(fields[6]) & _PF_EXITING


def namespace_of(pid: int) -> int:
    """Inode of a process's PID namespace; 0 where we may not look, or it is gone."""
    try:
        return os.stat(f"/proc/{pid}/ns/pid").st_ino
    except OSError:
        return 0


def inner_pid(pid: int, thread: int | None = None) -> int:
    """Number of a process, or of one of its threads, in its own PID namespace (NSpid in proc(5) status); 0 when it is gone."""
    text = _read(f"/proc/{pid}/status" if thread is None else f"/proc/{pid}/task/{thread}/status")
    line = next((line for line in text.splitlines() if line.startswith(b"NSpid:")), None)
    return int(line.split()[-1]) if line else 0


def all_pids() -> list[int]:
    """Every process that /proc shows, zombies too."""
    return [int(name) for name in os.listdir("/proc") if name.isdigit()]


def parents() -> dict[int, int]:
    """PID -> parent's PID of every process that /proc shows, zombies too."""
    found = {}
    for pid in all_pids():
        entry = stat(pid)
        if entry is not None:
            found[pid] = entry[0]
    return found


def children(pid: int) -> list[int]:
    """Direct children, zombies included."""
    return [child for child, parent in parents().items() if parent == pid]


def descendants(pid: int) -> list[int]:
    """Children, their children and so on, parents before children, zombies included; one pass over /proc."""
    below: dict[int, list[int]] = {}
    for child, parent in parents().items():
        below.setdefault(parent, []).append(child)
    found: list[int] = []
    level = [pid]
    while level:
        level = [child for parent in level for child in below.get(parent, ())]
        found += level
    return found


def command(pid: int) -> list[str]:
    """The command line as it was given; empty for a zombie or a kernel thread."""
    text = _read(f"/proc/{pid}/cmdline")
    return [os.fsdecode(part) for part in text.split(b"\0")[:-1]]


SECRETS = "key|token|secret|passw|passphrase|pwd|auth|credential|bearer|cookie"
# Options whose values are shown: what a message needs to tell one command from another, or what takes no value.
SHOWN = frozenset(
    "model served-model-name tokenizer host port uds dtype load-format device max-model-len max-num-seqs "
    "max-num-batched-tokens tensor-parallel-size pipeline-parallel-size data-parallel-size enforce-eager "
    "kv-cache-memory-bytes gpu-memory-utilization distributed-executor-backend ssl-keyfile ssl-certfile headless "
    "trust-remote-code multiprocessing-fork reuid regid clear-groups".split()
)
PLAIN = "[0-9.,]{1,12}[;)]*|auto|none|true|false|on|off"  # values that tell nothing
HIDDEN = "***"


def masked(argv: list[str]) -> list[str]:
    """A command line in which values are hidden: of options that are not in SHOWN and of variables, unless they are PLAIN; of
    whatever has a secret by its name; in JSON and in addresses.

    ``--api-key X``, ``--hf-token=X``, ``HF_TOKEN=X``, ``Authorization: Bearer X``, ``//user:X@host``; also within a shell's
    script.
    """
    shown: list[str] = []
    hide = ""  # of the words up to the next option: "all", or "unknown" for those that are not PLAIN
    for word in argv:
        if hide and not word.startswith("-"):
            shown.append(_value(word, hide))
        else:
            text, hide = _option(word) if word.startswith("-") else _word(word)
            shown.append(text)
    return shown


def _value(text: str, hide: str) -> str:
    return text if not hide or (hide == "unknown" and _found(f"^({PLAIN})$", text)) else HIDDEN


def _rest(value: str) -> str:
    """What to hide after a value: all, where it begins with a quotation mark that comes only once."""
    return "all" if value[:1] in ("'", '"') and value.count(value[0]) == 1 else ""


def _option(word: str) -> tuple[str, str]:
    """An option as it is shown, and what to hide after it."""
    name, equals, value = word.partition("=")
    key = name.lstrip("-").lower().replace("_", "-")
    if key in SHOWN:
        return _word(word)[0] if _found("[{@]", value) else word, ""
    hide = "all" if _found(SECRETS, key) else "unknown" if equals or word.startswith("--") else ""
    if not equals:
        return word, hide
    return f"{name}={_value(value, hide)}", _rest(value)


def _word(word: str) -> tuple[str, str]:
    """Any other word as it is shown, and what to hide after it."""
    name, equals, value = word.partition("=")
    if equals and name.isidentifier():
        hide = "all" if _found(SECRETS, name) else "unknown"
        if hide == "all" or not _found(r"\s", value):
            return f"{name}={_value(value, hide)}", _rest(value)
    if _found(r"^\{.|^\[\S", word):
        return HIDDEN, ""
    if _found(r"\s", word):
        return _text(word), ""
    if _found(f"({SECRETS})[^/]*[:=].", word):
        return HIDDEN, ""
    names_a_secret = _found(f"({SECRETS})[^/]*:$|^bearer$|^basic$", word)
    return _without_user(word), "all" if names_a_secret else ""


def _text(text: str) -> str:
    """Several words in one, such as a script."""
    import re

    parts = re.split(r"(\s+)", text)
    parts[::2] = masked(parts[::2])
    return "".join(parts)


def _without_user(address: str) -> str:
    start, slashes, rest = address.partition("//")
    return f"{start}//{HIDDEN}@{rest.rpartition('@')[2]}" if slashes and "@" in rest else address


def _found(pattern: str, text: str) -> bool:
    import re  # only for a message: each Python process of the engine imports this module

    return bool(re.search(pattern, text, re.I))


def words(argv: list[str], limit: int = 120) -> str:
    """A command line on one line of at most ``limit`` characters, without secrets; a long one keeps its ends: a program's
    path and its name.
    """
    text = " ".join(" ".join(masked(argv)).split())
    cut = (limit - 3) // 2
    return text if len(text) <= limit else f"{text[: limit - 3 - cut]}...{text[-cut:]}"


def environment(pid: int) -> dict[str, str]:
    """The environment the process was executed with; later changes of its own do not show."""
    entries = (os.fsdecode(part).partition("=") for part in _read(f"/proc/{pid}/environ").split(b"\0") if part)
    return {name: value for name, _, value in entries}
