"""The driver with a real CRIU and real processes: frozen, killed, brought back."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys

import pytest
from driver_lab import USER, Connection, Lab, check_owned, uids, wait_until
from support import ROOT

from nvsnap_launch.hooktree import procfs
from nvsnap_launch.snapshot.create import CAP_SYS_RESOURCE
from nvsnap_launch.snapshot.tree import has_capability

pytestmark = [pytest.mark.criu, pytest.mark.timeout(120)]


def stop(process: subprocess.Popen[bytes], number: int = signal.SIGTERM) -> int:
    process.send_signal(number)
    return process.wait(20)


def test_killed_and_brought_back_twice_from_one_image(lab: Lab) -> None:
    launcher = lab.launch()
    client = Connection(lab.port)
    before = client.ask("set hello")

    made = lab.create()
    assert made.returncode == 0, made.stderr
    assert launcher.wait(20) == 0
    assert "lives on in the snapshot" in lab.words("launcher")
    assert lab.stand_ins() == []
    assert lab.left_in_shm() == []
    assert not lab.image.with_name("image.partial").exists()
    assert client.is_closed()

    for round_, value in (("first", "10.0.0.7"), ("second", "10.0.0.8")):
        restored = lab.restore(round_, "--pid-namespace", "new", "--env", f"POD_IP={value}", "--unset", "HF_TOKEN")
        again = lab.ask()
        assert (again["pid"], again["child"]["pid"]) == (before["pid"], before["child"]["pid"])
        assert again["child"] == {"pid": before["child"]["pid"], "start": "hello", "end": "last"}
        assert (again["ghost"], again["mode"], again["generation"]) == ("first", "restored", 2)
        assert again["env"] == {"POD_IP": value, "HF_TOKEN": None}
        wait_until(lambda: lab.ask()["closed"] >= 2, "the end of the connection that was established at the dump")
        assert lab.ask("set other")["child"]["start"] == "other"
        assert lab.left_in_shm() == [], "the restored tree's shared memory is its own"
        assert stop(restored) == 7, "the tree's own exit code"
        assert lab.stand_ins() == []
        assert lab.left_in_shm() == []
    lines = (lab.control / "stdout.log").read_text().split("\n")
    assert lines == ["up", "prepare 1", "restore 2", "restore 2", ""], "no log is truncated"
    assert (lab.folder / "second.out").read_text() == "restore 2\n", "only what is new is shown"


def test_exit_code_of_the_tree_is_the_commands(lab: Lab) -> None:
    launcher = lab.launch()
    assert lab.create().returncode == 0
    assert launcher.wait(20) == 0
    restored = lab.restore("restore")
    connection = Connection(lab.port)
    connection.socket.sendall(b"exit 33\n")
    assert restored.wait(20) == 33
    connection.close()


def test_nothing_is_left_when_the_outer_process_is_killed(lab: Lab) -> None:
    launcher = lab.launch()
    assert lab.create().returncode == 0
    assert launcher.wait(20) == 0
    restored = lab.restore("restore")
    assert len(lab.stand_ins()) == 2
    assert stop(restored, signal.SIGKILL) == -signal.SIGKILL
    wait_until(lambda: not lab.stand_ins(), "the end of the restored tree")
    assert lab.left_in_shm() == []


def test_a_restored_tree_can_be_frozen_again_from_outside(lab: Lab) -> None:
    launcher = lab.launch()
    assert lab.create().returncode == 0
    assert launcher.wait(20) == 0
    restored = lab.restore("first", "--pid-namespace", "new")
    assert lab.ask("set again")["generation"] == 2
    first = lab.image.rename(lab.folder / "first-image")

    made = lab.create()
    assert made.returncode == 0, made.stderr
    assert restored.wait(20) == 0
    assert lab.left_in_shm() == []

    lab.restore("second", "--pid-namespace", "new")
    again = lab.ask()
    assert (again["child"]["start"], again["generation"]) == ("again", 4)
    ids = [json.loads((folder / "manifest.json").read_text())["ids"] for folder in (first, lab.image)]
    assert ids[0] == ids[1], "the same numbers, in the tree's own namespace"


def test_somebody_elses_metadata_tells_the_engine_and_stays_as_it_is(lab: Lab) -> None:
    launcher = lab.launch()
    assert lab.create().returncode == 0
    assert launcher.wait(20) == 0
    metadata = lab.control / "restore.json"
    text = json.dumps({"schema": 1, "incarnation": "pod-2", "snapshot": "s", "env": {"POD_IP": "10.1.1.1"}})
    metadata.write_text(text)
    refused = lab.run("snapshot", "restore", str(lab.image), "--env", "POD_IP=10.1.1.2")
    assert refused.returncode == 64
    assert "change it there" in refused.stderr
    lab.restore("restore")
    assert lab.ask()["env"] == {"POD_IP": "10.1.1.1"}
    assert metadata.read_text() == text


def test_metadata_elsewhere_that_says_nothing_new_is_made_up_for_by_a_request(lab: Lab) -> None:
    metadata = lab.folder / "agent.json"
    metadata.write_text(json.dumps({"schema": 1, "incarnation": "pod-1"}))
    launcher = lab.launch(options=("--restore-metadata", str(metadata)))
    assert lab.create().returncode == 0
    assert launcher.wait(20) == 0
    lab.restore("restore")
    again = lab.ask()
    assert (again["state"], again["generation"], again["mode"]) == ("serving", 2, "cold")
    assert not (lab.control / "restore.json").exists()


def test_leave_running_keeps_server_and_connections(lab: Lab) -> None:
    launcher = lab.launch()
    client = Connection(lab.port)
    made = lab.create("--leave-running")
    assert made.returncode == 0, made.stderr
    answer = client.ask()
    assert (answer["state"], answer["generation"], answer["mode"]) == ("serving", 2, "cold")
    assert [name for name in lab.left_in_shm() if "link_remap" in name] == []
    assert lab.run("snapshot", "inspect", str(lab.image)).returncode == 2, "not while the server has its port"
    assert stop(launcher) == 7
    assert lab.run("snapshot", "inspect", str(lab.image)).returncode == 0


def test_numbers_in_use_are_refused_in_the_current_namespace(lab: Lab) -> None:
    lab.launch()
    assert lab.create("--leave-running").returncode == 0
    refused = lab.run("snapshot", "restore", str(lab.image), "--pid-namespace", "current")
    assert refused.returncode == 64
    assert "in use" in refused.stderr
    report = json.loads(lab.run("snapshot", "inspect", "--json", str(lab.image)).stdout)
    assert report["restorable"] and report["pids_in_use"] and report["pid_namespace"] == "new"
    assert report["listening"] == [f"127.0.0.1:{lab.port}"]


def test_a_restore_into_a_control_directory_in_use_is_refused(lab: Lab) -> None:
    lab.launch()
    assert lab.create("--leave-running").returncode == 0
    refused = lab.run("snapshot", "restore", str(lab.image))
    assert refused.returncode == 64
    assert "is in use by launcher" in refused.stderr
    assert lab.ask()["state"] == "serving"


def test_criu_failing_at_the_restore_leaves_nothing(lab: Lab) -> None:
    launcher = lab.launch()
    assert lab.create().returncode == 0
    assert launcher.wait(20) == 0
    # Somebody takes the address after it was found to be free.
    taker = lab.folder / "criu-that-comes-late"
    taker.write_text(f"""#!{sys.executable}
import os, socket, sys
if sys.argv[1] == "restore":
    late = socket.create_server(("127.0.0.1", {lab.port}))
    late.set_inheritable(True)
os.execv("{lab.criu}", sys.argv)
""")
    taker.chmod(0o755)
    failed = lab.run("snapshot", "restore", str(lab.image), "--criu", str(taker))
    assert failed.returncode == 74
    assert "CRIU restore ended with" in failed.stderr
    assert "Error (" in failed.stderr, "CRIU's own words"
    status = json.loads((lab.control / "status.json").read_text())
    assert (status["state"], status["exit"]["code"]) == ("failed", 74)
    assert status["exit"]["reason"] in failed.stderr
    assert lab.stand_ins() == []
    assert lab.left_in_shm() == []


def test_a_server_that_does_not_come_back_is_ended_with_74(lab: Lab) -> None:
    launcher = lab.launch("deaf")
    assert lab.create().returncode == 0
    assert launcher.wait(20) == 0
    failed = lab.run("snapshot", "restore", str(lab.image), "--wait-timeout", "1")
    assert failed.returncode == 74
    assert "does not serve" in failed.stderr
    assert lab.stand_ins() == []
    assert lab.left_in_shm() == []


# The launcher, that looks at what CRIU brought only when it is dead.
SLOW_TO_LOOK = """
import time
from nvsnap_launch.__main__ import main
from nvsnap_launch.hooktree import procfs
from nvsnap_launch.snapshot.criu import Criu
restore = Criu.restore
def slow(*arguments):
    restore(*arguments)
    while procfs.alive({root}):
        time.sleep(0.01)
Criu.restore = slow
main()
"""


def test_a_server_that_ends_at_once_tells_its_reason(lab: Lab) -> None:
    launcher = lab.launch("doomed")
    assert lab.create().returncode == 0
    assert launcher.wait(20) == 0
    root = json.loads((lab.image / "manifest.json").read_text())["root_pid"]
    command = [sys.executable, "-c", SLOW_TO_LOOK.format(root=root), "snapshot", "restore", str(lab.image)]
    failed = subprocess.run(command, cwd=ROOT, env=lab.environment(), capture_output=True, text=True, timeout=60)
    assert failed.returncode == 74
    assert failed.stderr.count("no interface nope0") == 1
    assert "not our child" not in failed.stderr
    assert lab.state() == "failed"


def test_a_restore_stopped_while_criu_works_leaves_nothing(lab: Lab) -> None:
    launcher = lab.launch()
    assert lab.create().returncode == 0
    assert launcher.wait(20) == 0
    mark, slow = lab.folder / "restoring", lab.folder / "slow-criu"
    slow.write_text(f'#!/bin/sh\n[ $1 = restore ] && {{ touch {mark}; sleep 60; }}\nexec {lab.criu} "$@"\n')
    slow.chmod(0o755)
    restorer = lab.start("restore", "snapshot", "restore", str(lab.image), "--criu", str(slow))
    wait_until(mark.exists, "the start of CRIU")
    # A large image takes CRIU minutes: a liveness probe must not end that.
    assert (lab.state(), lab.run("wait", "alive", "--timeout", "0").returncode) == ("restoring", 0)
    assert stop(restorer) == 128 + signal.SIGTERM
    assert (lab.state(), lab.run("wait", "alive", "--timeout", "0").returncode) == ("ended", 1)
    assert lab.stand_ins() == []
    lab.restore("again")
    assert lab.ask()["mode"] == "restored", "the image is as good as before"


def test_a_restore_stopped_half_way_leaves_nothing(lab: Lab) -> None:
    restorer, root = half_way(lab, "stop")
    assert stop(restorer, signal.SIGINT) == 128 + signal.SIGINT
    nothing_is_left(lab, root)


@pytest.mark.parametrize("namespace", ["current", "new"])
def test_a_criu_killed_half_way_leaves_nothing(lab: Lab, namespace: str) -> None:
    restorer, root = half_way(lab, "kill", namespace)
    assert restorer.wait(20) == 74
    assert "CRIU restore was killed by signal 9" in lab.words("restore")
    nothing_is_left(lab, root)


def half_way(lab: Lab, action: str, namespace: str = "current") -> tuple[subprocess.Popen[bytes], int]:
    """A restore whose CRIU is stopped or killed when it has made a file without a name, and the number of the tree's root."""
    launcher = lab.launch()
    assert lab.create().returncode == 0
    assert launcher.wait(20) == 0
    mark, criu = lab.folder / "half-way", lab.folder / "half-way-criu"
    ghost = f"/dev/shm/{lab.shm}-gone.cr.*.ghost"
    end = {"stop": f"kill -STOP $$; touch {mark}", "kill": "kill -9 $$"}[action]
    criu.write_text(f"""#!/bin/sh
if [ $1 = restore ]; then (
    # It is a file without a name as soon as it is mapped: caught by slowing CRIU down.
    until set -- {ghost}; [ -e "$1" ]; do kill -STOP $$; kill -CONT $$; done
    {end}
) & fi
exec {lab.criu} "$@"
""")
    criu.chmod(0o755)
    options = ("--pid-namespace", namespace, "--criu", str(criu))
    restorer = lab.start("restore", "snapshot", "restore", str(lab.image), *options)
    if action == "stop":
        wait_until(mark.exists, "the first file")
        assert [name for name in lab.left_in_shm() if ".ghost" in name]
    return restorer, json.loads((lab.image / "manifest.json").read_text())["root_pid"]


def nothing_is_left(lab: Lab, root: int) -> None:
    assert lab.stand_ins() == []
    wait_until(lambda: procfs.stat(root) is None, "its number is free again")  # init reaps what is not our child
    assert lab.left_in_shm() == []
    lab.restore("again")
    assert lab.ask()["mode"] == "restored", "the image is as good as before"


def need_limits_of_others() -> None:
    if not has_capability(CAP_SYS_RESOURCE):
        pytest.skip("CRIU cannot dump another user's processes without CAP_SYS_RESOURCE")


def test_another_users_tree_is_refused_where_criu_cannot_dump_it(users_lab: Lab, criu: str) -> None:
    lab = users_lab
    lab.launch()
    # Root without this right, as in most containers.
    without = ("setpriv", "--bounding-set", "-sys_resource", "--inh-caps", "-sys_resource", sys.executable)
    refused = lab.start("create", "snapshot", "create", str(lab.image), python=without)
    assert refused.wait(20) == 64
    assert f"the engine runs as user {USER}, and CRIU cannot dump" in lab.words("create")
    assert lab.ask()["generation"] == 0, "it was not paused for nothing"
    assert not lab.image.with_name("image.partial").exists()


def test_another_users_tree_comes_back_as_that_users_on_a_fresh_machine(users_lab: Lab, criu: str) -> None:
    need_limits_of_others()
    lab = users_lab
    launcher = lab.launch()
    lab.ask("set hello")
    made = lab.create()
    assert made.returncode == 0, made.stderr
    assert launcher.wait(20) == 0
    shutil.rmtree(lab.control)

    restored = lab.restore("first", "--pid-namespace", "new", "--env", "POD_IP=10.0.0.7")
    again = lab.ask()
    assert (again["child"]["start"], again["mode"], again["state"]) == ("hello", "restored", "serving")
    assert again["env"] == {"POD_IP": "10.0.0.7"}
    (supervisor,) = procfs.children(restored.pid)
    assert uids(supervisor) == {str(USER)}
    check_owned(lab)
    assert lab.run("prepare").returncode == 0, "it takes requests"
    assert lab.run("restore").returncode == 0
    assert stop(restored) == 7
    assert "restore 2\n" in (lab.folder / "first.out").read_text(), "its log is followed"
    check_owned(lab)

    restored = lab.restore("second", "--pid-namespace", "new")
    assert stop(restored, signal.SIGKILL) == -signal.SIGKILL
    wait_until(lambda: not lab.stand_ins(), "the end of the restored tree, bound to its outer process as before")
    assert lab.left_in_shm() == []


def test_a_control_directory_that_somebody_else_has_is_refused(users_lab: Lab, criu: str) -> None:
    need_limits_of_others()
    lab = users_lab
    launcher = lab.launch()
    assert lab.create().returncode == 0
    assert launcher.wait(20) == 0
    os.chown(lab.control, 0, 0)
    refused = lab.run("snapshot", "restore", str(lab.image))
    assert refused.returncode == 64
    assert f"belongs to user 0, not to user {USER}" in refused.stderr or "permission denied" in refused.stderr
    assert lab.stand_ins() == []


def test_a_tree_that_cannot_be_supervised_is_ended(lab: Lab) -> None:
    launcher = lab.launch()
    assert lab.create().returncode == 0
    assert launcher.wait(20) == 0
    late = lab.folder / "criu-that-is-in-the-way"
    place = f"{lab.control}/supervisor.json"
    late.write_text(f'#!/bin/sh\n[ $1 = restore ] && rm {place} && mkdir {place}\nexec {lab.criu} "$@"\n')
    late.chmod(0o755)
    options = ("--pid-namespace", "current", "--criu", str(late))
    failed = lab.run("snapshot", "restore", str(lab.image), *options)
    assert failed.returncode == 74
    assert "Is a directory" in failed.stderr
    assert lab.stand_ins() == []
    assert lab.left_in_shm() == []
