"""Images that are damaged, unfinished, somebody else's or of another machine: refused before anything starts. Needs no CRIU."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from driver_lab import USER, write_snapshot
from test_driver_refusals import call, fake_criu, needs_root, run_restore, write

from nvsnap_launch.snapshot import manifest as manifests
from nvsnap_launch.snapshot import reasons, surroundings

LARGE = "images/pages-1.img"
FILES = ("images/inventory.img", LARGE, "images/empty.img", "files/0", "manifest.json")


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    folder = tmp_path / "image"
    for name in FILES[:-1]:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(b"" if "empty" in name else f"content of {name}".encode())
    (folder / LARGE).write_bytes(os.urandom(manifests.FULL_HASH_LIMIT + manifests.SAMPLE_BYTES))
    write_snapshot(folder, tmp_path / "control")
    return folder


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 3] ^= 1
    path.write_bytes(content)


def instead(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        path.unlink()
        make(path)

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "emptied": lambda path: os.truncate(path, 0),
    "longer": lambda path: os.truncate(path, path.stat().st_size + 1),
    "flipped": flip,
    "replaced": lambda path: path.write_bytes(b"x" * path.stat().st_size),
    "missing": Path.unlink,
    "a folder": instead(Path.mkdir),
    "a pipe": instead(os.mkfifo),
    "a link to nothing": instead(lambda path: path.symlink_to("nothing")),
    "a link to a device": instead(lambda path: path.symlink_to("/dev/zero")),
}


@needs_root
@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_refused_and_the_file_named(directory: Path, damage: str) -> None:
    for name in FILES:
        path = directory / name
        before = path.read_bytes()
        if not before and damage in ("truncated", "emptied", "flipped", "replaced"):
            continue
        DAMAGES[damage](path)
        if (damage, name) == ("flipped", LARGE):  # it is in no sample
            code, words, _ = call("inspect", str(directory), "--criu", fake_criu(directory.parent), "--verify")
            assert (code, f"{name} has other content than when it was made" in words) == (1, True), words
        else:
            code, words = run_restore(directory)
            assert code in (64, 74) and name.split("/")[-1] in words, words
        remove(path)
        path.write_bytes(before)


def remove(path: Path) -> None:
    if path.is_dir():
        path.rmdir()
    path.unlink(missing_ok=True)


@needs_root
def test_one_that_is_whole_is_not_refused(directory: Path) -> None:
    code, words, _ = call("inspect", str(directory), "--criu", fake_criu(directory.parent), "--verify")
    assert code == 0, words


def test_a_manifest_changed_by_hand(directory: Path) -> None:
    path = directory / "manifest.json"
    path.write_text(path.read_text().replace('"generation": 1', '"generation": 2'))
    assert run_restore(directory) == (74, f"nvsnap_launch: {path} is damaged: it was changed after it was made\n")


def remade(directory: Path, **changes: object) -> None:
    path = directory / "manifest.json"
    write(path, json.loads(path.read_text()) | changes)


@needs_root
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"machine": "riscv64"}, f"the snapshot is of riscv64, this machine is {platform.machine()}"),
        ({"cpu": ["avx9000", "sse"]}, "this CPU lacks avx9000, "),
        ({"kernel": "99.1.0"}, "was made on Linux 99.1.0, here is the older "),
        ({"hooks": {"path": "/nowhere", "sha256": "0"}}, "the hooks in /nowhere are not those "),
        ({"criu": "9.0"}, "the image was made by CRIU 9.0, here is the older 4.9"),
    ],
    ids=["architecture", "cpu", "kernel", "hooks", "criu"],
)
def test_of_another_machine(directory: Path, changes: dict[str, object], words: str) -> None:
    if "cpu" in changes and platform.machine() != "x86_64":
        pytest.skip("names of x86")
    remade(directory, **changes)
    code, said = run_restore(directory)
    assert (code, words in said) == (64, True), said


@needs_root
def test_of_another_engine(directory: Path) -> None:
    """Python goes on importing from these folders after the restore."""
    site = directory.parent / "site-packages"
    for name in (
        "vllm-0.32.0.dist-info",
        "torch-2.13.0.dist-info",
        "other-1.egg-info",
        "flashinfer_python-0.6.dist-info",
    ):
        (site / name).mkdir(parents=True)
    (site / "torch").mkdir()
    found = surroundings.packages(Path("/"), {str(site / "torch" / "libtorch.so")})
    assert found[str(site)] == ["flashinfer_python-0.6", "other-1", "torch-2.13.0", "vllm-0.32.0"]
    remade(directory, packages=found)
    (site / "new-2.dist-info").mkdir()
    assert call("inspect", str(directory), "--criu", fake_criu(directory.parent))[0] == 0, "one more is no harm"
    (site / "torch-2.13.0.dist-info").rename(site / "torch-2.14.0.dist-info")
    shutil.rmtree(site / "vllm-0.32.0.dist-info")
    code, words = run_restore(directory)
    assert code == 64
    assert f"{site} has torch-2.14.0 instead of torch-2.13.0\n" in words
    assert f"{site} has no vllm instead of vllm-0.32.0\n" in words


def test_hooks_are_compared_by_content(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.py").write_text("1")
    first = surroundings.code_digest(tmp_path)
    (tmp_path / "a" / "x.pyc").write_text("compiled")
    assert surroundings.code_digest(tmp_path) == first
    (tmp_path / "a" / "x.py").write_text("2")
    assert surroundings.code_digest(tmp_path) != first


def test_instruction_sets() -> None:
    x86 = "processor : 0\nflags\t\t: fpu sse4_2 avx2 avx512f nonstop_tsc ibrs aes vmx amx_tile\nbugs : x\n"
    assert surroundings.cpu_features(x86) == ["aes", "amx_tile", "avx2", "avx512f", "sse4_2"]
    assert surroundings.cpu_features("Features\t: fp asimd sve\n") == ["asimd", "fp", "sve"]
    assert surroundings.cpu_features("nothing") == []
    assert surroundings.numbers("6.18.44-x") > surroundings.numbers("6.9.0") > surroundings.numbers("?")


@needs_root
@pytest.mark.parametrize("path", [".", "images", "manifest.json", "files", "files/0", LARGE])
def test_what_others_may_change(directory: Path, path: str) -> None:
    place = directory / path
    for user in (USER, reasons.NOBODY):
        os.chown(place, user, 0)
        code, words = run_restore(directory)
        assert (code, f"{place} belongs to user {user}: give it to root" in words) == (64, True), words
    os.chown(place, 0, USER)
    place.chmod(0o770)
    code, words = run_restore(directory)
    assert (code, f"{place} can be written by group {USER}" in words) == (64, True), words
    os.chown(place, 0, 0)
    assert not reasons.not_ours(directory, manifests.load(directory)), "root's group"
    place.chmod(0o777)
    code, words = run_restore(directory)
    assert (code, f"{place} can be written by everybody" in words) == (64, True), words


@needs_root
def test_a_link_of_another_user_is_not_followed(directory: Path) -> None:
    place, away = directory / LARGE, directory.parent / "away"
    place.rename(away)
    place.symlink_to(away)
    os.chown(place, USER, USER, follow_symlinks=False)
    code, words = run_restore(directory)
    assert (code, f"{place} belongs to user {USER}" in words) == (64, True), words


@needs_root
def test_nobody_is_root_where_a_file_server_says_so(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    os.chown(directory, reasons.NOBODY, 0)
    manifest = manifests.load(directory)
    assert f"belongs to user {reasons.NOBODY}" in reasons.not_ours(directory, manifest)[0]
    monkeypatch.setattr(reasons, "nfs_devices", lambda mounts: {directory.stat().st_dev})
    assert reasons.not_ours(directory, manifest) == []


def test_what_is_mounted_by_nfs() -> None:
    lines = (
        "36 35 0:32 / /mnt rw,noatime shared:1 - nfs4 server:/export rw,vers=4.2",
        "37 35 0:300 / /old rw - nfs server:/nfs rw",
        "38 35 98:0 / /disk rw master:1 - ext4 /dev/nfs rw",
    )
    assert reasons.nfs_devices("\n".join(lines)) == {os.makedev(0, 32), os.makedev(0, 300)}


def test_one_that_is_being_written(tmp_path: Path) -> None:
    """Beside its place, or inside a folder that is there already: the manifest comes last."""
    (tmp_path / "image.partial").mkdir()
    for _ in range(2):
        code, words = run_restore(tmp_path / "image")
        assert (code, f"yet: {tmp_path}/image.partial is being written" in words) == (64, True), words
        (tmp_path / "image").mkdir(exist_ok=True)
    (tmp_path / "image.partial").rename(tmp_path / "image" / manifests.INNER_PARTIAL)
    code, words = run_restore(tmp_path / "image")
    assert (code, f"yet: {tmp_path}/image/.partial is being written" in words) == (64, True), words
