import os
import signal
import sys


def kill_process_tree(pid, include_parent=True):
    """Children of any depth first. As PID 1 of a container the parent outlives its own SIGKILL and ends with 0:
    STANDIN_EXIT_0."""
    for child in _children(pid):
        kill_process_tree(child)
    if include_parent:
        if pid == os.getpid() and os.environ.get("STANDIN_EXIT_0"):
            sys.stdout.flush()
            os._exit(0)
        _kill(pid)


def _kill(pid):
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


def _children(pid):
    found = []
    for entry in os.listdir("/proc"):
        if entry.isdigit():
            try:
                with open(f"/proc/{entry}/stat") as file:
                    parent = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
            if parent == pid:
                found.append(int(entry))
    return found
