"""What is no snapshot, or a damaged one, is refused before anything starts. Needs no CRIU."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import io
import json
import os
import signal
import socket
from pathlib import Path

import pytest
from driver_lab import write_snapshot

from nvsnap_launch import cli, libc
from nvsnap_launch.controldir import ControlDirectory
from nvsnap_launch.snapshot import criu as criu_tool
from nvsnap_launch.snapshot import manifest as manifests
from nvsnap_launch.snapshot import namespace, obstacles, restore, saved
from nvsnap_launch.snapshot.errors import SnapshotError
from nvsnap_launch.snapshot.tree import Tree

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="restoring is refused to others before this")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    """A folder that is whole by its manifest, though CRIU never made it."""
    images = tmp_path / "image" / manifests.IMAGES_DIR
    images.mkdir(parents=True)
    (images / "inventory.img").write_bytes(b"small")
    with (images / "pages-1.img").open("wb") as pages:
        for block in range(18):
            pages.write(bytes([block]) * (1 << 20))
    write_snapshot(tmp_path / "image", tmp_path / "control")
    return tmp_path / "image"


def fake_criu(folder: Path) -> str:
    path = folder / "criu"
    path.write_text(
        f"#!/bin/sh\ncase $1 in --version) echo Version: 4.9 ;; check) ;; *) touch {folder}/started ;; esac\n"
    )
    path.chmod(0o755)
    return str(path)


def run_restore(directory: Path, *options: str) -> tuple[int, str]:
    criu = fake_criu(directory.parent)
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    code, _, words = call("restore", str(directory), "--criu", criu, *options)
    assert not (directory.parent / "started").exists(), "CRIU was started"
    assert not (directory.parent / "control").exists(), "the control directory was touched"
    assert signal.pthread_sigmask(signal.SIG_BLOCK, []) == blocked, "Ctrl-C works as long as it only looks"
    return code, words


def write(path: Path, value: dict[str, object]) -> None:
    """A manifest that is whole, whatever is in it."""
    path.write_text(json.dumps(manifests.sealed(value)))


def call(*arguments: str) -> tuple[int, str, str]:
    """(exit status, stdout, stderr) of a snapshot command in this process."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = cli.call(["snapshot", *arguments])
    return code, out.getvalue(), err.getvalue()


def test_what_is_no_snapshot(tmp_path: Path) -> None:
    assert run_restore(tmp_path / "none")[0] == 64
    empty = tmp_path / "empty"
    empty.mkdir()
    code, words = run_restore(empty)
    assert (code, "is not a snapshot: it has no manifest.json" in words) == (64, True)
    for text in ("[]", "null", '{"kind": "other"}'):
        (empty / "manifest.json").write_text(text)
        code, words = run_restore(empty)
        assert (code, "is not a manifest of this driver" in words) == (64, True)


def test_another_schema(directory: Path) -> None:
    value = json.loads((directory / "manifest.json").read_text())
    (directory / "manifest.json").write_text(json.dumps(value | {"schema": 2}))
    code, words = run_restore(directory)
    assert (code, "has schema 2, this driver reads 1" in words) == (64, True)


def test_a_damaged_manifest(directory: Path) -> None:
    text = (directory / "manifest.json").read_text()
    (directory / "manifest.json").write_text(text[: len(text) // 2])
    assert run_restore(directory)[0] == 74
    value = json.loads(text)
    write(directory / "manifest.json", value | {"ids": "many"})
    code, words = run_restore(directory)
    assert (code, "damaged: ids" in words) == (74, True)
    del value["cookie"]
    write(directory / "manifest.json", value)
    assert "damaged: cookie" in run_restore(directory)[1]


@pytest.mark.parametrize(
    "edit",
    [
        {"root_pid": -1},
        {"root_pid": 0},
        {"root_pid": 1, "ids": [1, 4000001]},
        {"leader_pid": 4000002},
        {"ids": []},
        {"ids": [4000001, -4]},
        {"uid": 10**12},
        {"gid": -1},
        {"criu": "x.y"},
        {"criu": ""},
        {"control_dir": "relative/dir"},
        {"control_dir": ""},
        {"metadata": "restore.json"},
        {"cwd": ["/a\0b"]},
        {"outer": [{"path": "/lib\0/x", "size": 1}]},
        {"outer": [{"path": "/lib", "size": -1}]},
        {"streams": [{"path": "out.log"}]},
        {"control": [{"names": [], "blob": "files/0", "size": 0, "mode": 384, "uid": 0, "gid": 0}]},
        {"saved": [{"names": ["/dev/shm/x"], "blob": "../0", "size": 0, "mode": 384, "uid": 0, "gid": 0}]},
        {"saved": [{"names": ["/dev/shm/x"], "blob": "files/0", "size": 0, "mode": 1 << 20, "uid": 0, "gid": 0}]},
        {"files": [{"path": "/etc/passwd", "size": 1, "hash": "full", "sha256": ""}]},
        {"launcher": {"prepare_signal": 99, "restore_signal": 12, "agent": "signals"}},
    ],
    ids=str,
)
def test_an_edited_manifest_is_damaged(directory: Path, edit: dict[str, object]) -> None:
    path = directory / "manifest.json"
    write(path, json.loads(path.read_text()) | edit)
    code, words = run_restore(directory)
    assert (code, f"{path} is damaged: " in words, words.count("\n")) == (74, True, 1), words
    assert call("inspect", str(directory), "--criu", fake_criu(directory.parent))[0] == 74


def test_a_manifest_that_is_too_deep_is_damaged(directory: Path) -> None:
    (directory / "manifest.json").write_text("[" * 100000)
    assert run_restore(directory)[0] == 74


@needs_root
def test_damaged_files(directory: Path) -> None:
    pages = directory / manifests.IMAGES_DIR / "pages-1.img"
    whole = pages.read_bytes()
    pages.write_bytes(whole[:-1])
    code, words = run_restore(directory)
    assert (code, "instead of" in words) == (74, True)
    pages.write_bytes(whole[: len(whole) // 2] + bytes(len(whole) // 2))
    assert "other content" in run_restore(directory)[1]
    pages.write_bytes(whole[:-1] + b"\xff")
    assert "other content" in run_restore(directory)[1]
    pages.unlink()
    assert "No such file" in run_restore(directory)[1]
    pages.write_bytes(whole)
    (directory / manifests.IMAGES_DIR / "inventory.img").write_bytes(b"smalL")
    assert "inventory.img has other content" in run_restore(directory)[1]


@needs_root
def test_files_outside_that_changed(directory: Path) -> None:
    library = directory.parent / "library.so"
    library.write_bytes(b"12345")
    write_snapshot(directory, directory.parent / "control", outer=[{"path": str(library), "size": 4}])
    code, words = run_restore(directory)
    assert (code, "has 5 bytes instead of 4" in words) == (74, True)
    library.unlink()
    assert "No such file" in run_restore(directory)[1]
    write_snapshot(directory, directory.parent / "control", cwd=["/nowhere/at/all"])
    assert "/nowhere/at/all: no such folder" in run_restore(directory)[1]


@needs_root
def test_another_control_directory_needs_a_mount_of_its_own(directory: Path) -> None:
    other = directory.parent / "other"
    code, words = run_restore(directory, "--control-dir", str(other), "--pid-namespace", "current")
    assert (code, "for another in its place, use --pid-namespace new" in words) == (64, True), words
    assert not other.exists()
    assert restore.wants_namespace(manifests.load(directory), restore.Options(control_dir=other))


@needs_root
def test_numbers_in_use_only_matter_in_the_current_namespace(directory: Path) -> None:
    write_snapshot(directory, directory.parent / "control", ids=[4000001, os.getpid()])
    code, words = run_restore(directory, "--pid-namespace", "current")
    assert (code, f"in use here ({os.getpid()})" in words) == (64, True)
    manifest = manifests.load(directory)
    assert restore.wants_namespace(manifest, restore.Options())
    assert not restore.wants_namespace(manifest, restore.Options(pid_namespace="current"))


def test_a_variable_that_is_not_set_is_named() -> None:
    code, _, words = call("restore", "dir", "--env", "POD_IP=10.0.0.7", "--env", "NAME_THAT_IS_NOT_SET_HERE")
    assert (code, "NAME_THAT_IS_NOT_SET_HERE is not set here" in words) == (64, True), words


@pytest.mark.parametrize("value", ["hf-canary", "=hf-canary", "AKIA7CANARY7CANARY7X", "hf_CANARY"])
def test_what_is_no_variable_is_not_repeated(value: str) -> None:
    code, _, words = call("restore", "dir", "--env", "POD_IP=10.0.0.7", "--env", value)
    assert (code, "number 2 " in words, value in words) == (64, True, False), words


@needs_root
def test_inspect_says_what_is_missing(directory: Path) -> None:
    criu = fake_criu(directory.parent)
    code, out, _ = call("inspect", str(directory), "--criu", criu)
    assert (code, "can be restored here" in out) == (0, True)
    (directory / manifests.IMAGES_DIR / "inventory.img").unlink()
    code, out, _ = call("inspect", str(directory), "--criu", criu, "--json")
    assert code == 1
    assert json.loads(out)["reasons"] == ["images/inventory.img: No such file or directory"]


@needs_root
def test_inspect_says_what_is_in_the_way_at_this_moment(directory: Path) -> None:
    criu, control = fake_criu(directory.parent), ControlDirectory(directory.parent / "control")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        write_snapshot(directory, control.path, listening=[address])
        code, out, _ = call("inspect", str(directory), "--criu", criu)
        assert (code, f"listens on {address}, which is in use here" in out) == (2, True)
        assert run_restore(directory)[0] == 64
    assert call("inspect", str(directory), "--criu", criu)[0] == 0
    control.create()
    control.lock()
    code, out, _ = call("inspect", str(directory), "--criu", criu)
    assert (code, "is in use by launcher" in out) == (2, True)


@needs_root
def test_an_image_of_a_newer_criu_is_refused_by_restore_and_inspect_alike(directory: Path) -> None:
    write_snapshot(directory, directory.parent / "control", criu="5.0")
    reason = "the image was made by CRIU 5.0, here is the older 4.9"
    assert run_restore(directory) == (64, f"nvsnap_launch: {reason}\n")
    code, out, _ = call("inspect", str(directory), "--criu", fake_criu(directory.parent), "--json")
    assert (code, json.loads(out)["reasons"]) == (1, [reason])


@needs_root
def test_values_that_cannot_reach_the_engine_are_refused_before_anything_is_touched(directory: Path) -> None:
    metadata = directory.parent / "agent.json"
    write_snapshot(directory, directory.parent / "control", metadata=str(metadata))
    code, words = run_restore(directory, "--unset", "HF_TOKEN")
    assert (code, "need a metadata file of ours" in words) == (64, True)
    metadata.write_text('{"schema": 1, "incarnation": "pod-2"}')
    code, words = run_restore(directory, "--env", "POD_IP=10.0.0.7")
    assert (code, "already tells the engine; change it there" in words) == (64, True)
    metadata.write_text('{"schema": 1')
    assert run_restore(directory)[0] == 74


def test_a_file_that_cannot_be_put_back_whole_leaves_nothing(tmp_path: Path) -> None:
    source, keeper = tmp_path / "ring", saved.Keeper(tmp_path / "snapshot", Path("/"))
    keeper.directory.mkdir()
    source.write_bytes(b"1234")
    (tmp_path / "ring-too").hardlink_to(source)
    (kept,) = keeper.save([str(source), str(tmp_path / "ring-too")])
    source.unlink()
    with pytest.raises(FileExistsError):
        saved.put_back(keeper.directory, kept)
    assert not source.exists()
    assert (tmp_path / "ring-too").read_bytes() == b"1234", "somebody else's by now"


def test_io_uring_is_an_obstacle_unless_it_is_allowed() -> None:
    libc_ = ctypes.CDLL(None, use_errno=True)
    ring = libc_.syscall(425, 4, ctypes.create_string_buffer(120))
    if ring < 0:
        pytest.skip(f"io_uring_setup: {os.strerror(ctypes.get_errno())}")
    try:
        tree = Tree(os.getpid(), [os.getpid()])
        (found,) = obstacles.bad_descriptors(tree, io_uring_allowed=False)
        assert f"holds an io_uring (descriptor {ring})" in found
        assert obstacles.bad_descriptors(tree, io_uring_allowed=True) == []
    finally:
        os.close(ring)


def test_a_call_of_the_c_library_that_fails_is_an_error() -> None:
    with pytest.raises(OSError) as caught:
        libc.prctl(9999, 0)
    assert caught.value.errno == errno.EINVAL
    with pytest.raises(OSError) as caught:
        libc.mount("none", "/nowhere/at/all", "tmpfs", 0)
    assert caught.value.errno in (errno.ENOENT, errno.EPERM)


@pytest.mark.parametrize(
    ("release", "needed"),
    [("5.10.0", (4, 1)), ("6.15.9-x", (4, 1)), ("6.16.0", (4, 2)), ("7.0-rc1", (4, 2)), ("?", (4, 1))],
)
def test_criu_needed_by_kernel(release: str, needed: tuple[int, int]) -> None:
    assert criu_tool.needed_version(release) == needed


def test_error_lines_leave_out_what_every_run_prints(tmp_path: Path) -> None:
    log = tmp_path / "dump.log"
    lines = ["(0.1) Error (criu/util.c:1): rlimit: Can't setup RLIMIT_NOFILE for self", "(0.2) fine"]
    log.write_text("\n".join([*lines, "(0.3) Error (criu/x.c:2): no"]))
    assert criu_tool.error_lines(log) == ["(0.3) Error (criu/x.c:2): no"]
    assert criu_tool.error_lines(tmp_path / "none") == []


def test_numbers_for_criu_itself_keep_clear_of_the_trees() -> None:
    assert namespace.clear_start([5000, 5001], 100, 32768) is None
    assert namespace.clear_start([3, 7, 900], 2, 32768) == 900
    assert namespace.clear_start([500, 32767], 31900, 32768) == 500
    assert namespace.clear_start(list(range(1, 32768)), 1, 32768) is None


def test_sparse_files_stay_sparse(tmp_path: Path) -> None:
    source, keeper = tmp_path / "ring", saved.Keeper(tmp_path / "snapshot", Path("/"))
    keeper.directory.mkdir()
    with source.open("wb") as file:
        file.truncate(256 << 20)
        os.pwrite(file.fileno(), b"middle", 100 << 20)
    source.chmod(0o640)
    (tmp_path / "ring-too").hardlink_to(source)
    (kept,) = keeper.save([str(source), str(tmp_path / "ring-too"), str(tmp_path / "gone")])
    blob = keeper.directory / kept.blob
    assert (kept.size, blob.stat().st_size, kept.mode) == (256 << 20, 256 << 20, 0o640)
    assert blob.stat().st_blocks * 512 < 1 << 20
    with pytest.raises(FileExistsError):
        saved.put_back(keeper.directory, kept)
    for name in kept.names:
        Path(name).unlink()
    saved.put_back(keeper.directory, kept)
    assert source.stat().st_blocks * 512 < 1 << 20
    assert source.stat().st_mode & 0o7777 == 0o640
    assert source.samefile(tmp_path / "ring-too")
    with source.open("rb") as file:
        assert os.pread(file.fileno(), 6, 100 << 20) == b"middle"


def test_a_too_old_criu_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "criu"
    path.write_text("#!/bin/sh\necho Version: 3.17.1\n")
    path.chmod(0o755)
    with pytest.raises(SnapshotError, match=r"CRIU 3\.17\.1 .* is too old") as caught:
        criu_tool.find(str(path))
    assert caught.value.exit_code == 64
