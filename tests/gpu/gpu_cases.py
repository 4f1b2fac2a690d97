"""What a GPU series can run, one function a case; all cases of one call share one server, started again when one took it down.

``gpu_cases.py CONFIG SHAPE CASE …`` writes JSON lines to stdout: ``{"begin": case, "deadline": seconds}``, then ``{"row": …}``.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import re
import signal
import statistics
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import gpu_checkpoint
import gpu_client
from engine_support import Seen, later
from gpu_server import START_S, GpuServer, Place
from gpu_sglang import SglangServer
from support import wait_until

from nvsnap_launch.hooktree import procfs

Row = dict[str, Any]
ANSWERS, ANSWER_TOKENS = 4, 48
GRAPHS_S = 90.0
TURN_S = 600.0  # for the others of a turn
SERVERS: dict[str, type[GpuServer]] = {"vllm": GpuServer, "sglang": SglangServer}


class Failed(Exception):
    """A case that did not come out as it should; the text says how."""


def check(good: bool, text: str) -> None:
    if not good:
        raise Failed(text)


@dataclass
class Lab:
    """One server of a shape, and what is asked of it again and again."""

    place: Place
    shape: str
    folder: Path
    server: GpuServer | None = None
    starts: int = 0
    turn: IO[str] | None = None
    began: Callable[[], None] = lambda: None
    say: Callable[[str], None] = field(default=lambda text: print(text, file=sys.stderr, flush=True))

    def up(self, row: Row) -> GpuServer:
        """The server, started if it is not there, and this series' turn. Its start is in the row that paid for it."""
        if self.server is None or not self.server.running:
            self.down()
            self.starts += 1
            self.server = self.make(str(self.starts))
            started = time.monotonic()
            self.server.start()
            row["start_s"] = round(time.monotonic() - started, 1)
        self.take_turn()
        return self.server

    def make(self, name: str, bare: bool = False) -> GpuServer:
        return SERVERS[self.place.engine].of(self.place, self.shape, self.folder / f"{self.shape}.{name}", bare)

    def take_turn(self) -> None:
        """Servers of several series may start at one time; then one at a time does something."""
        if self.place.turn and self.turn is None:
            self.turn = Path(self.place.turn).open("w")  # noqa: SIM115 (held until end_turn)
            fcntl.flock(self.turn, fcntl.LOCK_EX)
        self.began()

    def end_turn(self) -> None:
        if self.turn is not None:
            self.turn.close()
            self.turn = None

    def settle(self) -> None:
        """After a case that failed: a start is dear, so a server that still serves is kept."""
        assert self.server is not None
        try:
            check(self.server.running and self.server.status()["state"] == "serving", "not serving")
            wait_graphs(self.server)
            gpu_client.ask(self.server.port, 0, 1, 20)
            self.server.rpc("plant_away")
        except (AssertionError, Failed, RuntimeError, OSError):
            self.down()

    def down(self) -> None:
        if self.server is not None:
            self.server.end()
            self.server = None


# -- parts of cases -------------------------------------------------------------------------------


def answers(server: GpuServer) -> list[gpu_client.Tokens]:
    return [gpu_client.ask(server.port, number, answer_tokens(server)) for number in range(ANSWERS)]


def answer_tokens(server: GpuServer) -> int:
    return ANSWER_TOKENS if server.place.gpu else ANSWER_TOKENS // 4


def speed(server: GpuServer, clients: int, tokens: int = 256, runs: int = 9) -> float:
    """Median tokens a second, after one run that warms up. A rehearsal on CPU does not need the figure."""
    if not server.place.gpu:
        tokens, runs = 4, 1
    gpu_client.throughput(server.port, clients, tokens)
    return round(statistics.median(gpu_client.throughput(server.port, clients, tokens) for _ in range(runs)), 1)


def graphs(server: GpuServer) -> str:
    return str(server.status().get("graphs"))


def wait_graphs(server: GpuServer) -> str:
    """Until nothing is captured any more: ``captured``, or ``eager`` where there are no graphs."""
    wait_until(lambda: not graphs(server).startswith("recapturing"), GRAPHS_S, server.words, every=0.05)
    return graphs(server)


def steps(last: Row) -> Row:
    """Seconds of each step, of the slowest rank, and its counts."""
    found: Row = {}
    for step in last.get("steps") or ():
        known = found.setdefault(step["name"], {"seconds": 0.0})
        more = {key: value for key, value in step.items() if key not in ("name", "rank", "seconds")}
        known.update(more, seconds=max(known["seconds"], step.get("seconds", 0.0)))
    return found


def held(pid: int) -> dict[str, int]:
    """Descriptors of each GPU's device file, and the driver's threads by name: would they tell of a second context?"""
    files = [path for path in procfs.descriptors(pid).values() if path.startswith("/dev/nvidia")]
    threads = {name: count for name, count in Seen.of(pid).threads.items() if name.startswith("cuda")}
    return {**Counter(files), **threads}


def prepare(server: GpuServer) -> Row:
    last = server.act(signal.SIGUSR1, "prepared")
    found = steps(last)
    drain = found.get("drain", {}).get("seconds", 0.0)
    return {
        "seconds": last["seconds"],
        "without drain": round(last["seconds"] - drain, 3),
        "steps": found,
        "used": server.place.used(),
        "held": [held(pid) for pid in server.on_gpu] if server.place.gpu else [],
    }


def refused(server: GpuServer) -> str:
    """A prepare that comes to nothing; returns why."""
    last = server.act(signal.SIGUSR1, "serving")
    check(last["ok"] is False, f"the prepare succeeded: {last}")
    return str(last["error"])


def restore(server: GpuServer) -> Row:
    """SIGUSR2; a request is sent at the same moment. Seconds until serving, until its answer, until all graphs are there."""
    row: Row = {}
    started = time.monotonic()
    first = later(lambda: (gpu_client.ask(server.port, 0, 1), time.monotonic() - started))
    last = server.act(signal.SIGUSR2, "serving")
    row["serving"] = round(time.monotonic() - started, 3)
    check(last["ok"] is True, f"the restore failed: {last}")
    row["seconds"], row["steps"] = last["seconds"], steps(last)
    row["first answer"] = round(first.result(60)[1], 3)
    row["eager"] = graphs(server)
    row["same eager"] = [gpu_client.ask(server.port, 0, answer_tokens(server))]
    row["graphs"] = wait_graphs(server)
    row["all graphs"] = round(time.monotonic() - started, 2)
    return row


def cycle(server: GpuServer, before: list[gpu_client.Tokens]) -> Row:
    """Prepare, suspend, resume, restore. Raises Failed unless the answers are those of before."""
    row: Row = {"prepare": prepare(server)}
    row["suspend"] = suspended = server.suspend()
    row["used suspended"] = server.place.used()
    check(suspended["ok"], f"suspend failed: {suspended}")
    row["resume"] = server.resume(suspended["pids"])
    check(row["resume"]["ok"], f"resume failed: {row['resume']}")
    row["restore"] = restore(server)
    row["restore"]["same eager"] = row["restore"]["same eager"] == before[:1]
    row["same"] = answers(server) == before
    row["used"] = server.place.used()
    return row


# -- cases ----------------------------------------------------------------------------------------


def strong(lab: Lab, row: Row, cycles: int = 3) -> None:
    """Everything given up and taken back, again and again."""
    server = lab.up(row)
    row["weights MiB"] = round(server.weight_mib())
    before = answers(server)
    row["weights"], row["different answers"] = server.weights, len(set(before))
    row["speed 1"], row["speed 32"] = speed(server, 1), speed(server, 32)
    row["graphs before"], row["used before"] = graphs(server), server.place.used()
    row["cycles"] = []
    for number in range(cycles):
        lab.say(f"cycle {number + 1} of {cycles}")
        row["cycles"].append(cycle(server, before))
    row["speed 32 after"], row["speed 1 after"] = speed(server, 32), speed(server, 1)
    row["ratio 32"] = round(row["speed 32 after"] / row["speed 32"], 4)
    row["ratio 1"] = round(row["speed 1 after"] / row["speed 1"], 4)
    row["used after"] = server.place.used()
    row["drift"] = [
        round(after / first - 1, 5)
        for first, after in zip(row["cycles"][0]["used"], row["cycles"][-1]["used"], strict=True)
    ]
    check(all(c["same"] for c in row["cycles"]), "answers differ from those before")
    check(row["graphs before"] == graphs(server), f"graphs were {row['graphs before']}, are {graphs(server)}")
    if lab.place.gpu:
        check(row["ratio 32"] >= 0.98, f"throughput at 32 requests is {row['ratio 32']} of that before")
        check(all(abs(part) < 0.01 for part in row["drift"]), f"memory drifts by {row['drift']}")


def once(lab: Lab, row: Row) -> None:
    strong(lab, row, 1)


def speeds(lab: Lab, row: Row) -> None:
    """What of it costs speed: nothing at all, a prepare and restore in place, or the driver's suspend and resume?"""
    server = lab.up(row)
    before = answers(server)
    row["speeds"] = {"at first": both(server), "again": both(server)}
    prepare(server)
    restore(server)
    row["speeds"]["after a rollback"] = both(server)
    row["cycles"] = [cycle(server, before)]
    row["speeds"]["after a suspend"] = both(server)
    check(row["cycles"][0]["same"], "answers differ from those before")


def both(server: GpuServer) -> Row:
    one, many = speed(server, 1, 128, 7), speed(server, 32, 128, 7)
    return {"1": one, "32": many, **server.place.clocks()}


def rollback(lab: Lab, row: Row) -> None:
    """A prepare that nobody follows up: back in place."""
    server = lab.up(row)
    before = answers(server)
    row["prepare"], row["restore"] = prepare(server), restore(server)
    row["restore"]["same eager"] = row["restore"]["same eager"] == before[:1]
    row["same"] = answers(server) == before
    check(row["same"], "answers differ from those before")


def in_flight(lab: Lab, row: Row) -> None:
    """Eight streams are cut short by a prepare, wait out the cycle, and go on; then graphs come back while they run."""
    server, numbers, length = lab.up(row), range(20, 28), 900 if lab.place.gpu else 300
    whole = gpu_client.streams(server.port, numbers, length)
    for stream in whole:
        stream.join(gpu_client.LIMIT_S)
    check(all(s.complete for s in whole), f"reference streams: {[s.error for s in whole]}")
    row["longest gap before"] = round(max(max(s.gaps()) for s in whole), 4)
    running = gpu_client.streams(server.port, numbers, length)
    row["prepare"] = prepare(server)
    received = [len(stream.tokens) for stream in running]
    row["parked after tokens"] = received
    check(all(count < length for count in received), "the streams ended before they could be parked")
    row["suspend"] = suspended = server.suspend()
    check(suspended["ok"], f"suspend failed: {suspended}")
    row["resume"] = server.resume(suspended["pids"])
    check(row["resume"]["ok"], f"resume failed: {row['resume']}")
    server.act(signal.SIGUSR2, "serving")
    again = time.monotonic()
    row["graphs"] = wait_graphs(server)
    row["all graphs"] = round(time.monotonic() - again, 2)
    row["streams left at the last graph"] = sum(not stream.complete for stream in running)
    for stream in running:
        stream.join(gpu_client.LIMIT_S)
    # A token's bits depend on what else is in its batch: the same text is told, not asked for.
    row["agreement"] = [gpu_client.agreement(a.tokens, b.tokens) for a, b in zip(whole, running, strict=True)]
    row["same"] = sum(a.tokens == b.tokens for a, b in zip(whole, running, strict=True))
    row["gaps after"] = sorted((round(gap, 4) for s in running for gap in s.gaps(again)), reverse=True)[:10]
    check(all(s.complete and len(s.tokens) == length for s in running), f"streams: {[s.error for s in running]}")


def recapture_under_load(lab: Lab, row: Row) -> None:
    """No request waits long for a capture: eight streams from the restore on."""
    server = lab.up(row)
    prepare(server)
    server.act(signal.SIGUSR2, "serving")
    again = time.monotonic()
    running = gpu_client.streams(server.port, range(40, 48), 900 if lab.place.gpu else 100)
    row["graphs"], row["all graphs"] = wait_graphs(server), round(time.monotonic() - again, 2)
    row["streams left at the last graph"] = sum(not stream.complete for stream in running)
    for stream in running:
        stream.join(gpu_client.LIMIT_S)
    check(all(stream.complete for stream in running), f"streams: {[stream.error for stream in running]}")
    row["first tokens"] = sorted(round(stream.times[0] - again, 3) for stream in running)
    row["gaps"] = sorted((round(gap, 4) for stream in running for gap in stream.gaps()), reverse=True)[:10]
    if lab.place.gpu:
        check(row["gaps"][0] <= 0.3, f"a request waited {row['gaps'][0]} s")


def weak(lab: Lab, row: Row) -> None:
    """Each kind of leftover: refused, named, and served on. Then the audit is made deaf: what comes of such an image?"""
    server = lab.up(row)
    before = answers(server)
    row["refused"] = {}
    for kind, word in server.leftovers.items() if lab.place.gpu else ():
        row["refused"][kind] = leftover(server, kind, word)
        lab.say(f"{kind}: {row['refused'][kind]}")
    wrong = {kind: said for kind, said in row["refused"].items() if not said.get("good")}
    prepare(server)
    restore(server)
    row["clean again"] = answers(server) == before
    if lab.place.gpu:
        row["deaf"] = deaf(lab, server)
    check(not wrong, f"not refused, or not serving afterwards: {wrong}")
    check(row["clean again"], "answers differ after a clean cycle")


def stray(lab: Lab, row: Row) -> None:
    """A group of torch's that no coordinator knows, made after a restore: it works, and is refused by name."""
    server = lab.up(row)
    prepare(server)
    restore(server)
    said = leftover(server, "communicator", "process group")
    row["refused"] = {"communicator": said}
    check(said.get("good", False), f"not refused, or not serving afterwards: {said}")


def leftover(server: GpuServer, kind: str, word: str) -> Row:
    """Planted, refused, named, served on, taken away. Graphs may be on their way back all the while."""
    row: Row = {}
    try:
        row["planted"] = server.rpc("plant", kind, seconds=20)
        row["said"] = refused(server)
        gpu_client.ask(server.port, 0, ANSWER_TOKENS)
        row["good"] = bool(re.search(word, row["said"].lower()))
    except (AssertionError, Failed, RuntimeError, OSError) as error:
        row["error"] = str(error)[:600]
        if server.status().get("state") == "prepared":
            server.act(signal.SIGUSR2, "serving")
    if server.running:
        server.rpc("plant_away")
    return row


def deaf(lab: Lab, server: GpuServer) -> Row:
    """With the audit off, the first kind of leftover still mapped: the driver makes an image that can't be restored."""
    row: Row = {"planted": [server.rpc("plant", next(iter(server.leftovers))), server.rpc("plant", "deaf")]}
    row["prepare"] = prepare(server)
    row["suspend"] = suspended = server.suspend()
    if suspended["ok"]:
        row["resume"] = server.resume(suspended["pids"])
    lab.down()
    return row


def killed(lab: Lab, row: Row) -> None:
    """One rank dies in the middle of a prepare: the tree ends, not with 0, and says which process."""
    server = lab.up(row)
    pid = server.workers[1]
    server.rpc("plant", "death", "1")
    server.signal(signal.SIGUSR1)
    started = time.monotonic()
    row["exit"] = server.wait_exit(90)
    row["seconds"] = round(time.monotonic() - started, 2)
    status = server.status()
    row["said"] = f"{(status.get('last') or {}).get('error')} {(status.get('exit') or {}).get('reason')}"
    wait_until(lambda: not server.alive(), 20)
    row["left in /dev/shm"] = server.left_in_shm()
    row["used after"] = lab.place.used()
    lab.down()
    check(row["exit"] not in (0, None), f"ended with {row['exit']}")
    check(str(pid) in row["said"], f"process {pid} is not named: {row['said']}")


def profile(lab: Lab, row: Row) -> None:
    """Where the time of two cycles goes on each rank, and what is left on its GPU: to read, not to judge."""
    server = lab.up(row)
    row["planted"] = server.rpc("plant", "profile")
    row["cycles"] = []
    for _ in range(2):
        cycle = {"prepare": prepare(server), "restore": restore(server)}
        row["cycles"].append({**cycle, "profile": server.rpc("planted_profile")})
    server.rpc("plant_away")


def asleep(lab: Lab, row: Row) -> None:
    """vLLM's sleep mode: awake, put to sleep while prepared, and prepared while asleep; each suspended and resumed."""
    server = lab.up(row)
    before = answers(server)
    row["used before"] = server.place.used()
    row["cycles"] = [cycle(server, before)]
    for name, first, second in (
        ("sleep while prepared", prepare, fall_asleep),
        ("prepare while asleep", fall_asleep, prepare),
    ):
        found: Row = {"first": first(server), "second": second(server), "used": server.place.used()}
        row[name] = found
        found["suspend"] = suspended = server.suspend()
        check(suspended["ok"], f"suspend failed: {suspended}")
        found["resume"] = server.resume(suspended["pids"])
        check(found["resume"]["ok"], f"resume failed: {found['resume']}")
        if first is prepare:
            wake(server)
            found["restore"] = restore(server)
        else:
            server.act(signal.SIGUSR2, "serving")
            wake(server)
            found["graphs"] = wait_graphs(server)
        found["same"] = answers(server) == before
        check(found["same"], f"{name}: answers differ from those before")
    check(row["cycles"][0]["same"], "answers differ after a cycle")


def fall_asleep(server: GpuServer) -> Row:
    started = time.monotonic()
    gpu_client.call(server.port, "/sleep?level=1", {})
    return {"seconds": round(time.monotonic() - started, 3), "used": server.place.used()}


def wake(server: GpuServer) -> None:
    gpu_client.call(server.port, "/wake_up", {})


def against_bare(lab: Lab, row: Row) -> None:
    """The same engine with and without the launcher, at the same time on the same GPUs, measured in turn."""
    with beside(lab) as bare:
        compared(lab, row, bare)
    check_speed(lab, row)


@contextlib.contextmanager
def beside(lab: Lab) -> Iterator[Callable[[], GpuServer]]:
    """A bare server of the same shape, which starts meanwhile."""
    bare = lab.make("bare", bare=True)
    starting = later(bare.start)

    def up() -> GpuServer:
        starting.result(START_S)
        return bare

    try:
        yield up
    finally:
        bare.end()


def compared(lab: Lab, row: Row, bare: Callable[[], GpuServer]) -> None:
    server = lab.up(row)
    both = (("bare", bare()), ("launched", server))
    for clients, tokens in ((1, 128), (32, 128)) if lab.place.gpu else ((1, 4), (32, 4)):
        found: dict[str, list[float]] = {"bare": [], "launched": []}
        for turn in range(12 if lab.place.gpu else 2):
            for name, each in both[:: 1 if turn % 2 else -1]:
                found[name].append(gpu_client.throughput(each.port, clients, tokens))
        middle = {name: statistics.median(values[1:]) for name, values in found.items()}
        row[f"speed {clients}"] = {name: [round(value, 1) for value in values] for name, values in found.items()}
        row[f"ratio {clients}"] = round(middle["launched"] / middle["bare"], 4)
        row[f"median {clients}"] = {name: round(value, 1) for name, value in middle.items()}


def check_speed(lab: Lab, row: Row) -> None:
    if lab.place.gpu:
        check(min(row["ratio 1"], row["ratio 32"]) >= 0.99, "slower than bare")


def dense(lab: Lab, row: Row) -> None:
    """Against the bare server, then alone on the GPUs as in ``strong``."""
    row["beside bare"] = {}
    with beside(lab) as bare:
        compared(lab, row["beside bare"], bare)
    row["start_s"] = row["beside bare"].pop("start_s", None)
    strong(lab, row)
    check_speed(lab, row["beside bare"])


def report(lab: Lab, row: Row) -> None:
    """Nothing captured, no custom all-reduce, NCCL over sockets; the gather of logits has the peers' memory mapped.

    Under the launcher: a whole cycle. Bare, with nothing released: what does the driver say? That comes last, it may hang.
    """
    with beside(lab) as bare:
        server = lab.up(row)
        other = bare()
        before = answers(server)
        row["mapped"] = server.rpc("plant_look")
        try:
            row["cycles"] = [cycle(server, before)]
            row["mapped again"] = server.rpc("plant_look")
        finally:
            row["unreleased"] = unreleased(other)
    check(row["cycles"][0]["same"], "answers differ from those before")
    if lab.place.gpu:
        check(all(row["mapped"]) and all(row["unreleased"].get("mapped", [[]])), "no memory of the peer's was mapped")


def unreleased(server: GpuServer) -> Row:
    """The driver's calls on a server that nobody prepared. It is killed afterwards."""
    row: Row = {}
    try:
        before = answers(server)
        row["mapped"] = server.rpc("plant_look")
        row["suspend"] = suspended = server.suspend()
        if suspended["ok"]:
            row["resume"] = server.resume(suspended["pids"])
            if row["resume"]["ok"]:
                row["same"] = answers(server) == before
        elif suspended["pids"]:
            row["state"] = gpu_checkpoint.ask("state", suspended["pids"], 15)
    except (AssertionError, RuntimeError, OSError) as error:
        row["error"] = f"{type(error).__name__}: {str(error)[:600]}"
    finally:
        server.kill()
    return row


def measured(lab: Lab, row: Row) -> None:
    """Speed alone."""
    server = lab.up(row)
    row["speed 1"], row["speed 32"] = speed(server, 1), speed(server, 32)


@dataclass(frozen=True)
class Case:
    """``seconds``: the deadline from outside, on top of START_S where the server has to be started."""

    shape: str
    run: Callable[[Lab, Row], None]
    seconds: float


CASES = {
    "strong": Case("dense", strong, 280),
    "speeds": Case("dense", speeds, 200),
    "rollback": Case("dense", rollback, 60),
    "in-flight": Case("dense", in_flight, 120),
    "load": Case("dense", recapture_under_load, 90),
    "weak": Case("small", weak, 300),
    "stray": Case("small", stray, 60),
    "bare": Case("dense", against_bare, START_S + 90),
    "dense": Case("dense", dense, 400),
    "report": Case("report", report, 240),
    "report-nccl": Case("report-nccl", report, 240),
    "gather": Case("gather", once, 120),
    "all": Case("all", once, 150),
    "off": Case("off", measured, 90),
    "tp1": Case("tp1", once, 120),
    "plain": Case("plain", strong, 280),
    "strong1": Case("dense1", strong, 280),
    "eager": Case("eager", once, 120),
    "moe": Case("moe", strong, 200),
    "killed": Case("small", killed, 120),
    "sleep": Case("sleep", asleep, 150),
    "profile": Case("dense", profile, 150),
}


def tell(**line: Any) -> None:
    print(json.dumps(line), flush=True)


@contextlib.contextmanager
def to_stderr() -> Iterator[None]:
    """What a library prints must not break the lines."""
    with contextlib.redirect_stdout(sys.stderr):
        yield


def run(lab: Lab, name: str) -> Row:
    row: Row = {"case": name, "shape": lab.shape, "ok": True}
    started = time.monotonic()
    lab.began = lambda: tell(begin=name, deadline=CASES[name].seconds)
    try:
        with to_stderr():
            CASES[name].run(lab, row)
    except BaseException as error:
        traceback.print_exc()
        row.update(ok=False, error=f"{type(error).__name__}: {str(error)[:1500]}")
        if lab.server is not None:
            row["log"] = lab.server.words()[-2500:]
            lab.settle()
    finally:
        lab.end_turn()
    row["seconds"] = round(time.monotonic() - started, 1)
    return row


def main(config: str, shape: str, *names: str) -> int:
    values = json.loads(config)
    where = (Path(values["python"]), values["path"], Path(values["work"]))
    place = Place(*where, values["gpu"], values["turn"], values["engine"])
    gpu_client.speak(place.engine)
    lab = Lab(place, shape, Path(values["folder"]))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    try:
        for name in names:
            running = lab.server is not None and lab.server.running
            tell(begin=name, deadline=CASES[name].seconds + (0 if running else START_S) + (TURN_S if place.turn else 0))
            tell(row=run(lab, name))
    finally:
        lab.down()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
