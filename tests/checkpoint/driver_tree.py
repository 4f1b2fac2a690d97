"""A small engine tree that plays the control protocol, without an engine: a leader with a control thread, a listener, a
child process behind a socket pair, shared memory. Arguments: [HOST:]PORT SHM_NAME [inotify] [uring] [tcp] [big] [deaf] [doomed]
[held]: deaf prepares, but never restores; doomed gives a verdict instead, and ends; held begins what it is asked for
(prepare.begun or restore.begun in the control directory) and ends it when there is a file of that name with .go.

Commands on a connection, one a line: ``get`` answers one JSON line, ``set TEXT`` writes shared memory, ``exit N`` ends the tree.
"""

# ruff: noqa: PTH103, PTH105, PTH108, PTH110, PTH116, PTH123

from __future__ import annotations

import ctypes
import json
import mmap
import os
import signal
import socket
import sys
import threading
import time

CONFIG = json.loads(os.environ["NVSNAP_HOOKS_CONFIG"])
CONTROL = CONFIG["control_dir"]
SHM_BYTES = 64 << 20


class Leader:
    def __init__(self, host: str, port: int, shm: str, extras: list[str]) -> None:
        self.state, self.mode, self.generation = "serving", "cold", 0
        self.incarnation: str | None = None
        self.env: dict = {}
        self.last: dict | None = None
        self.closed = 0
        self.lock = threading.Lock()
        self.memory = self.open_memory(shm)
        self.ghost = self.open_memory(shm + "-gone", unlink=True)
        self.linked = self.open_linked(shm)
        self.near, far = socket.socketpair()
        self.child = os.fork()
        if self.child == 0:
            self.near.close()
            child(far, self.memory)
        far.close()
        self.extras = [self.extra(name) for name in extras]
        self.register()
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        self.listener = socket.create_server((host, port), family=family, dualstack_ipv6=host == "::")
        threading.Thread(target=self.control, daemon=True).start()
        threading.Thread(target=self.signals, daemon=True).start()

    def open_memory(self, name: str, unlink: bool = False) -> mmap.mmap:
        path = "/dev/shm/" + name
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o640)
        os.ftruncate(descriptor, SHM_BYTES)
        memory = mmap.mmap(descriptor, SHM_BYTES)
        memory[:5] = b"first"
        memory[-4:] = b"last"
        os.close(descriptor)
        if unlink:
            os.unlink(path)
        return memory

    def open_linked(self, name: str) -> int:
        """A file whose own name is gone while another is left: CRIU makes a link_remap of it."""
        path = f"/dev/shm/{name}-link"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.link(path, path + "2")
        os.unlink(path)
        return descriptor

    def extra(self, name: str) -> object:
        if name == "inotify":
            return ctypes.CDLL(None).inotify_init1(0)
        if name == "uring":
            parameters = ctypes.create_string_buffer(120)
            descriptor = ctypes.CDLL(None, use_errno=True).syscall(425, 4, parameters)
            if descriptor < 0:
                raise OSError(ctypes.get_errno(), "io_uring_setup")
            return descriptor
        if name == "tcp":
            server = socket.create_server(("127.0.0.1", 0))
            client = socket.create_connection(server.getsockname())
            return server, client, server.accept()
        if name in ("deaf", "doomed", "held"):
            return name
        if name == "big":
            return bytearray(os.urandom(1 << 20)) * 48
        raise SystemExit(f"unknown extra {name}")

    def register(self) -> None:
        who = {"pid": os.getpid(), "cookie": CONFIG["cookie"], "pid_namespace": os.stat("/proc/self/ns/pid").st_ino}
        self.write("leader.json", {**who, "engine": "stand-in", "version": "1", "guard_pid": 0})
        os.makedirs(f"{CONTROL}/processes", exist_ok=True)
        self.write(f"processes/{os.getpid()}.json", {**who, "role": "leader", "rank": 0, "patches": {}})
        self.who = who
        self.status()

    def write(self, name: str, value: dict) -> None:
        with open(f"{CONTROL}/{name}.{os.getpid()}.new", "w") as file:
            json.dump(value, file)
        os.replace(f"{CONTROL}/{name}.{os.getpid()}.new", f"{CONTROL}/{name}")

    def status(self) -> None:
        self.who["pid_namespace"] = os.stat("/proc/self/ns/pid").st_ino
        self.write(
            "status.json",
            {
                "schema": 1,
                "state": self.state,
                "mode": self.mode,
                "generation": self.generation,
                "snapshot_ready": self.state == "prepared",
                "engine": {"name": "stand-in", "version": "1"},
                "leader": self.who,
                "incarnation": self.incarnation,
                "processes": [],
                "last": self.last,
            },
        )

    def metadata(self) -> dict:
        try:
            with open(CONFIG["metadata"]) as file:
                return json.load(file)
        except (OSError, ValueError):
            return {}

    def control(self) -> None:
        while True:
            for action in ("prepare", "restore"):
                path = f"{CONTROL}/{action}"
                if os.path.exists(path):
                    with open(path) as file:
                        text = file.read()
                    os.unlink(path)
                    self.act(action, [json.loads(text)["id"]] if text else [])
            if self.state == "prepared" and self.metadata().get("incarnation", self.incarnation) != self.incarnation:
                self.act("restore", [])
            time.sleep(0.02)

    def signals(self) -> None:
        while True:
            number = signal.sigwait([CONFIG["prepare_signal"], CONFIG["restore_signal"]])
            self.act("prepare" if number == CONFIG["prepare_signal"] else "restore", [])

    def act(self, action: str, requests: list) -> None:
        if action == "restore" and "deaf" in self.extras:
            return
        if action == "restore" and "doomed" in self.extras:
            self.write("verdict.json", {"exit_code": 74, "reason": "no interface nope0"})
            os.kill(os.getpid(), signal.SIGKILL)
        if "held" in self.extras:
            open(f"{CONTROL}/{action}.begun", "w").close()
            while not os.path.exists(f"{CONTROL}/{action}.go"):
                time.sleep(0.02)
        with self.lock:
            wanted = "prepared" if action == "prepare" else "serving"
            if self.state != wanted:
                found = self.metadata()
                restored = action == "restore" and found.get("incarnation") != self.incarnation
                self.state, self.generation = wanted, self.generation + 1
                self.incarnation = found.get("incarnation")
                if restored:
                    self.mode, self.env = "restored", found.get("env") or {}
                print(action, self.generation, flush=True)
            self.last = {"action": action, "ok": True, "error": None, "seconds": 0.0, "requests": requests}
            self.status()

    def answer(self) -> bytes:
        self.near.sendall(b"?")
        facts = {"pid": os.getpid(), "child": json.loads(self.near.recv(4096)), "closed": self.closed}
        facts |= {"ghost": self.ghost[:5].decode(), "linked": os.fstat(self.linked).st_size, "env": self.env}
        facts |= {"mode": self.mode, "generation": self.generation, "state": self.state}
        return json.dumps(facts).encode() + b"\n"

    def serve(self, connection: socket.socket) -> None:
        try:
            for line in connection.makefile("rb"):
                words = line.decode().split()
                if words[0] == "exit":
                    os._exit(int(words[1]))
                if words[0] == "set":
                    self.memory[:5] = words[1].encode()
                connection.sendall(self.answer())
        except OSError:
            pass
        self.closed += 1

    def run(self) -> None:
        while True:
            connection, _ = self.listener.accept()
            threading.Thread(target=self.serve, args=(connection,), daemon=True).start()


def child(pipe: socket.socket, memory: mmap.mmap) -> None:
    while pipe.recv(1):
        pipe.sendall(
            json.dumps({"pid": os.getpid(), "start": memory[:5].decode(), "end": memory[-4:].decode()}).encode()
        )
    os._exit(0)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: os._exit(7))
    host, _, port = sys.argv[1].rpartition(":")
    leader = Leader(host.strip("[]") or "127.0.0.1", int(port), sys.argv[2], sys.argv[3:])
    print("up", flush=True)
    leader.run()
