"""Root acts as the tree's user. The restore here has a tree started in CRIU's place, so it needs neither CRIU nor its rights."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from driver_lab import ROOT, STAND_IN, USER, Lab, check_owned, uids, wait_until, write_snapshot

from nvsnap_launch.hooktree import procfs

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root can be another user")

LEADER = 7001  # a process number of the new PID namespace

# Starts the leader under its number, as an orphan that comes to PID 1, like CRIU's --restore-sibling, and ends when it runs.
IN_PLACE_OF_CRIU = """#!{python}
import os, re, sys
if sys.argv[1] == "--version":
    print("Version: 4.9")
elif sys.argv[1] == "restore":
    fd = int(re.search(r"fd\\[(\\d+)\\]", " ".join(sys.argv))[1])
    with open("/proc/sys/kernel/ns_last_pid", "w") as file:
        file.write("{before}")
    ended, begun = os.pipe()
    if os.fork() == 0:
        os.setsid()
        os.dup2(fd, 1)
        os.setgroups([])
        os.setresgid({user}, {user}, {user})
        os.setresuid({user}, {user}, {user})
        os.execve("{stand_in_python}", {command}, {environment})
    os.close(begun)
    os.read(ended, 1)  # closed by exec
"""


def snapshot_of(lab: Lab, folder: Path, log: Path) -> None:
    (folder / "images").mkdir(parents=True)
    write_snapshot(
        folder,
        lab.control,
        root_pid=LEADER,
        leader_pid=LEADER,
        ids=[LEADER],
        uid=USER,
        gid=USER,
        streams=[{"path": str(log)}],
        control_dirs=[str(lab.control / "processes")],
    )


def test_a_restore_is_supervised_as_the_trees_user(users_lab: Lab) -> None:
    lab = users_lab
    lab.control.rmdir()
    log = lab.control / "stdout.log"
    snapshot_of(lab, lab.image, log)
    config = {"control_dir": str(lab.control), "cookie": "cookie", "metadata": str(lab.control / "restore.json")}
    config |= {"prepare_signal": 10, "restore_signal": 12}
    python = lab.python[-1]
    script = IN_PLACE_OF_CRIU.format(
        python=sys.executable,
        before=LEADER - 1,
        user=USER,
        stand_in_python=python,
        command=[python, str(STAND_IN), str(lab.port), lab.shm],
        environment={"NVSNAP_HOOKS_CONFIG": json.dumps(config)},
    )
    criu = lab.folder / "in-place-of-criu"
    criu.write_text(script)
    criu.chmod(0o755)

    restored = lab.restore("restore", "--pid-namespace", "new", "--criu", str(criu))
    assert lab.ask()["pid"] == LEADER
    (supervisor,) = procfs.children(restored.pid)
    assert uids(supervisor) == {str(USER)}
    check_owned(lab)
    assert lab.run("prepare").returncode == 0
    assert lab.state() == "prepared"
    restored.send_signal(signal.SIGTERM)
    assert restored.wait(20) == 7
    assert (lab.folder / "restore.out").read_text() == "up\nprepare 1\n"
    check_owned(lab)

    restored = lab.restore("again", "--pid-namespace", "new", "--criu", str(criu))
    restored.kill()
    restored.wait(20)
    wait_until(lambda: not lab.stand_ins(), "the end of the tree: its supervisor is bound to the process outside")


def test_acting_and_becoming(tmp_path: Path) -> None:
    script = f"""
import os
from pathlib import Path
from nvsnap_launch.snapshot.owner import Owner
told = []
owner = Owner({USER}, {USER}, lambda: told.append(os.geteuid()))
with owner.acting():
    Path("open/made").write_text("")
    try:
        Path("closed/made").write_text("")
    except PermissionError:
        print("refused")
print(os.getresuid(), os.getresgid(), told)
owner.make_folder(Path("closed/folder"))
owner.make_folder(Path("closed/folder"))
owner.make_folder(Path("open/folder/below"))
owner.become()
try:
    os.seteuid(0)
except PermissionError:
    print(os.getresuid(), os.getresgid(), os.getgroups(), told[-1])
"""
    tmp_path.chmod(0o755)
    for name, mode in (("open", 0o777), ("closed", 0o755)):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(mode)
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    root, user = (0, 0, 0), (USER, USER, USER)
    assert result.stdout.splitlines() == ["refused", f"{root} {root} [0]", f"{user} {user} [{USER}] {USER}"], (
        result.stderr
    )
    for name in ("open/made", "closed/folder", "open/folder", "open/folder/below"):
        assert (tmp_path / name).stat().st_uid == USER
    assert (tmp_path / "closed/folder").stat().st_mode & 0o777 == 0o700


KEEPS = f"""
import os, sys
from pathlib import Path
from nvsnap_launch.snapshot.owner import Owner
from nvsnap_launch.snapshot.saved import Keeper
os.setgroups([0, 4])
keeper = Keeper(Path("snapshot"), Path("/proc/self/root"))
for name in sys.argv[1:]:
    try:
        print([len(kept.names) for kept in keeper.save([name, name + "-too"], Owner({USER}, {USER}))])
    except OSError as error:
        print(error.strerror)
print(os.getgroups())
"""


def test_a_control_file_is_read_as_its_owner(open_path: Path) -> None:
    """The owner of a control directory gets back, at a restore, what was read there: not what only root or a group may read."""
    secret, control = open_path / "secret", open_path / "control"
    for folder in (secret, control, open_path / "snapshot"):
        folder.mkdir(mode=0o755)
    for name, mode, group in (("roots", 0o600, 0), ("groups", 0o640, 4), ("open", 0o644, 0)):
        path = secret / f"{name}.json"
        path.write_text("{}")
        os.chown(path, 0, group)
        path.chmod(mode)
    (control / "linked.json").symlink_to(secret / "open.json")
    (control / "processes").symlink_to(secret)
    (control / "mine.json").write_text("{}")
    (control / "mine.json-too").hardlink_to(control / "mine.json")
    os.mkfifo(control / "pipe.json")
    asked = ["mine.json", "linked.json", "pipe.json", "gone.json"]
    asked += [f"processes/{name}.json" for name in ("open", "roots", "groups")]
    result = subprocess.run(
        [sys.executable, "-c", KEEPS, *(str(control / name) for name in asked)],
        cwd=open_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=20,
    )
    nothing = ["[]"] * 3
    assert result.stdout.splitlines() == ["[2]", *nothing, "[1]", *["Permission denied"] * 2, "[0, 4]"], result.stderr
