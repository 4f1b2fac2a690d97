"""A series of GPU cases in one command: ``PYTHONPATH=.:tests:tests/engine python tests/gpu/gpu_series.py [OPTIONS] CASE …``

Each case has its deadline from outside; one that fails or hangs does not stop the others, and nothing of it goes on running.
Writes OUT/series.jsonl (raw), OUT/table.txt and OUT/logs.tar.gz; ends with 0 when every case came out as it should.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import queue
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

from gpu_cases import CASES, SERVERS
from gpu_server import NO_MULTICAST

from demo import tree

Row = dict[str, Any]
HERE = Path(__file__).resolve().parent
MARK = "NVSNAP_GPU_SERIES"  # in the environment of all that a series starts
LOG_BYTES = 400_000
# What a row tells in its table.
_SPEED = ("speed 1", "speed 32", "speed 1 after", "speed 32 after", "median 1", "median 32", "ratio 1", "ratio 32")
_ANSWERS = ("drift", "weights", "different answers", "same", "agreement", "parked after tokens", "clean again")
_WAITS = ("longest gap before", "gaps", "gaps after", "first tokens", "all graphs", "streams left at the last graph")
TOLD = (*_SPEED, *_ANSWERS, *_WAITS, "exit", "said", "killed")
END_S = 30.0  # for a server that ends in order


class Series:
    def __init__(self, out: Path, place: dict[str, Any], budget: float) -> None:
        self.out, self.place = out, place
        self.mark = uuid.uuid4().hex
        self.ends = time.monotonic() + budget
        self.rows: list[Row] = []

    def run(self, names: Sequence[str]) -> None:
        """Cases of one shape that follow each other share a server."""
        left = list(names)
        while left:
            if time.monotonic() >= self.ends:
                self._take({"case": left.pop(0), "ok": False, "error": "not run: the series has no time left"})
                continue
            shape = CASES[left[0]].shape
            group = [name for at, name in enumerate(left) if all(CASES[n].shape == shape for n in left[: at + 1])]
            done = self._group(shape, group)
            left = left[max(1, done) :]

    def _group(self, shape: str, names: list[str]) -> int:
        """Run them in one child; returns how many are over, one that was killed included."""
        command = [sys.executable, str(HERE / "gpu_cases.py"), json.dumps(self.place), shape, *names]
        environment = {**os.environ, **NO_MULTICAST, MARK: self.mark}
        with (self.out / "series.log").open("ab") as log:
            child = subprocess.Popen(
                command, env=environment, stdout=subprocess.PIPE, stderr=log, text=True, start_new_session=True
            )
        assert child.stdout is not None
        lines = _lines(child.stdout)
        done, current, deadline, grace = 0, names[0], time.monotonic() + 60, END_S
        try:
            while done < len(names):
                try:
                    line = lines.get(timeout=max(0.0, min(deadline, self.ends) - time.monotonic()))
                except queue.Empty:
                    spent = time.monotonic() >= self.ends
                    why = "the series has no time left" if spent else "its deadline passed"
                    self._take({"case": current, "shape": shape, "ok": False, "error": why})
                    grace = 0.0
                    return done + 1
                if line is None:
                    self._take({"case": current, "shape": shape, "ok": False, "error": "the case's process died"})
                    return done + 1
                if "begin" in line:
                    current, deadline = line["begin"], time.monotonic() + line["deadline"]
                else:
                    self._take(line["row"])
                    done += 1
            return done
        finally:
            self._end(child, grace)

    def _end(self, child: subprocess.Popen[str], grace: float) -> None:
        """In order if it can, then whatever still carries our mark."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(grace)
        left = [pid for pid in marked(self.mark) if pid != os.getpid()]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        child.wait()
        if left:
            self._take({"case": "end", "ok": True, "killed": len(left)})
        wait_gone(self.mark)

    def _take(self, row: Row) -> None:
        self.rows.append(row)
        with (self.out / "series.jsonl").open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(shown(row), flush=True)


def _lines(stream: IO[str]) -> queue.Queue[Row | None]:
    """Parsed lines as they come, then None."""
    found: queue.Queue[Row | None] = queue.Queue()

    def read() -> None:
        for line in stream:
            with contextlib.suppress(ValueError):
                found.put(json.loads(line))
        found.put(None)

    threading.Thread(target=read, daemon=True).start()
    return found


def marked(mark: str) -> list[int]:
    """Every process with the mark in its environment, whoever its parent is by now, and all below them: SGLang's write their names
    over their environment."""
    wanted = f"{MARK}={mark}".encode()
    found: set[int] = set()
    for path in Path("/proc").iterdir():
        if path.name.isdigit():
            with contextlib.suppress(OSError):
                if wanted in (path / "environ").read_bytes().split(b"\0"):
                    found.add(int(path.name))
    return sorted(found.union(*({child.pid for child in tree.descendants(pid)} for pid in found)))


def wait_gone(mark: str) -> None:
    deadline = time.monotonic() + 20
    while marked(mark) and time.monotonic() < deadline:
        time.sleep(0.1)


def shown(row: Row) -> str:
    """One case in a few lines."""
    head = f"{row['case']:10} {'ok  ' if row['ok'] else 'FAIL'} {row.get('seconds', '')} s, start {row.get('start_s', '-')} s"
    lines = [head]
    for number, cycle in enumerate(row.get("cycles") or (), 1):
        lines.append(f"  cycle {number}: {_cycle(cycle)}")
    if "prepare" in row:
        lines.append(f"  {_cycle(row)}")
    if _told(row):
        lines.append("  " + _told(row))
    for kind, said in row.get("refused", {}).items():
        lines.append(
            f"  leftover {kind}: {'good' if said.get('good') else 'BAD'}: {str(said.get('said') or said)[:300]}"
        )
    if "beside bare" in row:
        lines.append("  beside bare: " + _told(row["beside bare"]))
    if "unreleased" in row:
        bare = row["unreleased"]
        lines.append(f"  bare, nothing released: mapped {bare.get('mapped')}; " + _calls(bare))
    if "deaf" in row:
        lines.append("  audit off: " + _calls(row["deaf"]))
    if "error" in row:
        lines.append("  " + row["error"][:800])
    return "\n".join(lines)


def _cycle(cycle: Row) -> str:
    prepared, restored = cycle.get("prepare") or {}, cycle.get("restore") or {}
    took = {
        name.partition(": ")[2]: step["seconds"]
        for name, step in (prepared.get("steps") or {}).items()
        if name.startswith("release: ") and step["seconds"] >= 0.01
    }
    return (
        f"prepare {prepared.get('without drain')} s {took}, used {prepared.get('used')} MiB; "
        f"suspend {_driver(cycle.get('suspend'))}, resume {_driver(cycle.get('resume'))}; "
        f"restore {restored.get('seconds')} s, first answer {restored.get('first answer')} s, "
        f"all graphs {restored.get('all graphs')} s ({restored.get('graphs')}); same {cycle.get('same')}, "
        f"eager same {restored.get('same eager')}, used {cycle.get('used')}"
    )


def _told(row: Row) -> str:
    found = {
        key: row[key] for key in TOLD if key in row and not (isinstance(row[key], dict) and key.startswith("speed"))
    }
    return ", ".join(f"{key}: {value}" for key, value in found.items())


def _calls(row: Row) -> str:
    return f"suspend {_driver(row.get('suspend'))}, resume {_driver(row.get('resume'))}"


def _driver(done: Row | None) -> str:
    """Seconds, or what went wrong."""
    if done is None:
        return "-"
    if done.get("ok"):
        return f"{done.get('seconds')} s"
    calls = {step: sorted({name for name, _ in found.values()}) for step, found in done.items() if step[0].isupper()}
    return f"failed {done.get('error') or calls}"


def keep_logs(folder: Path, archive: Path) -> None:
    """The end of each log, and what the control directory tells."""
    with tarfile.open(archive, "w:gz") as tar:
        for path in sorted(folder.rglob("*")):
            if path.is_file() and path.suffix in (".log", ".json", ".jsonl", ".txt"):
                _trim(path)
                tar.add(path, path.relative_to(folder))


def _trim(path: Path) -> None:
    if path.stat().st_size > LOG_BYTES:
        path.write_bytes(path.read_bytes()[-LOG_BYTES:])


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("cases", nargs="+", choices=list(CASES), metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--engine", choices=list(SERVERS), default="vllm")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--work", type=Path, help="models, caches and server folders; a new one by default")
    parser.add_argument("--python", default=sys.executable, help="the engine's Python")
    parser.add_argument("--engine-path", default="", help="what the engine's Python needs on PYTHONPATH")
    parser.add_argument("--device", choices=("gpu", "cpu"), default="gpu", help="cpu: a rehearsal without driver calls")
    parser.add_argument("--budget", type=float, default=560, help="seconds for all of it")
    parser.add_argument("--turn", default="", metavar="FILE", help="for series that run at one time: one has its turn")
    given = parser.parse_args(arguments)
    foreign = [name for name in given.cases if CASES[name].shape not in SERVERS[given.engine].shapes]
    if foreign:
        parser.error(f"not with {given.engine}: {', '.join(foreign)}")
    out, work = given.out.absolute(), (given.work or Path(tempfile.mkdtemp(prefix="nvsnap-gpu-"))).absolute()
    out.mkdir(parents=True, exist_ok=True)
    folder = work / f"run-{uuid.uuid4().hex[:6]}"
    folder.mkdir(parents=True)
    place = {
        "python": given.python,
        "path": given.engine_path,
        "work": str(work),
        "gpu": given.device == "gpu",
        "turn": given.turn,
        "engine": given.engine,
        "folder": str(folder),
    }
    series = Series(out, place, given.budget)
    series.run(given.cases)
    keep_logs(folder, out / "logs.tar.gz")
    table = "\n".join(shown(row) for row in series.rows)
    (out / "table.txt").write_text(table + "\n")
    return 0 if all(row["ok"] for row in series.rows) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
