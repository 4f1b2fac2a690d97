"""The metadata file of an agent: what is understood, what is refused, and in which words."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from pathlib import Path

import pytest
from nvsnap_hooks import metadata, protocol
from support import wait_until


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "restore.json"


def refusal(path: Path) -> str:
    with pytest.raises(metadata.MetadataError) as caught:
        metadata.read(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_no_file(path: Path) -> None:
    assert metadata.read(str(path)) is None
    assert metadata.read(str(path / "below")) is None
    assert metadata.signature(str(path)) is None
    path.write_text("{}")
    assert metadata.read(str(path / "below a file")) is None


def test_ours(path: Path) -> None:
    path.write_text(
        '{"schema": 1, "incarnation": "i-2", "snapshot": "s", "env": {"POD_IP": "10.0.0.7", "HF_TOKEN": null}}'
    )
    found = metadata.read(str(path))
    assert found is not None
    assert (found.incarnation, found.snapshot) == ("i-2", "s")
    assert found.env == {"POD_IP": "10.0.0.7", "HF_TOKEN": None}


def test_an_agents_id_is_the_incarnation(path: Path) -> None:
    path.write_text('{"id": "snap-7", "whatever": [1, 2]}')
    found = metadata.read(str(path))
    assert found is not None
    assert (found.incarnation, found.snapshot, found.env) == ("snap-7", None, {})


def test_without_an_incarnation_the_content_counts(path: Path) -> None:
    seen = set()
    for text in ('{"env": {}}', '{"env": {"POD_NAME": "a"}}', '{"env": {"POD_NAME": "b"}}', "{}"):
        path.write_text(text)
        found = metadata.read(str(path))
        assert found is not None
        seen.add(found.incarnation)
        path.write_text(text)
        again = metadata.read(str(path))
        assert again is not None
        assert again.incarnation in seen
    assert len(seen) == 4


def test_a_byte_order_mark_and_white_space_are_no_fault(path: Path) -> None:
    path.write_bytes(b'\xef\xbb\xbf\n {"incarnation": "i"} \n\n')
    found = metadata.read(str(path))
    assert found is not None
    assert found.incarnation == "i"


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b" ",
        b"{",
        b'{"incarnation": "i"',
        b'{"incarnation": "i"}}',
        b"{'incarnation': 'i'}",
        b"\xff\xfe\x00",
        b'{"a": "\xe4"}',
        b"\0" * 64,
    ],
    ids=repr,
)
def test_half_written(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    assert "not complete JSON" in refusal(path)
    with pytest.raises(metadata.HalfWritten):
        metadata.read(str(path))


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("[]", "must hold an object, not list"),
        ("null", "must hold an object, not NoneType"),
        ('"text"', "must hold an object, not str"),
        ("12", "must hold an object, not int"),
        ('{"schema": 2}', "schema 2, this version reads 1"),
        ('{"schema": "1"}', "schema '1'"),
        ('{"schema": null}', "schema None"),
        ('{"schema": true}', "schema True"),
        ('{"incarnation": ""}', "incarnation must be a non-empty string"),
        ('{"incarnation": 7}', "incarnation must be a non-empty string"),
        ('{"incarnation": ["i"]}', "incarnation must be a non-empty string"),
        ('{"incarnation": "i", "snapshot": 3}', "snapshot must be a string"),
        ('{"env": []}', "env must be an object, not list"),
        ('{"env": "A=b"}', "env must be an object, not str"),
        ('{"env": {"MASTER_PORT": 29500}}', "env.MASTER_PORT must be a string or null, not int"),
        ('{"env": {"POD_IP": true}}', "env.POD_IP must be a string or null, not bool"),
        ('{"env": {"POD_IP": {"a": 1}}}', "env.POD_IP must be a string or null, not dict"),
        ('{"env": {"A=B": "x"}}', "impossible name 'A'"),
        ('{"incarnation": "i", "incarnation": "j"}', "has 'incarnation' twice"),
        ('{"env": {"POD_IP": "1.1.1.1", "POD_IP": null}}', "has 'POD_IP' twice"),
        ('{"env": {}, "other": {"a": 1, "a": 2}}', "has 'a' twice"),
        ('{"env": {"": "x"}}', "impossible name ''"),
        ('{"env": {"A\\u0000": "x"}}', "impossible name"),
        ('{"env": {"POD_IP": "a\\u0000b"}}', "'POD_IP' holds what an environment can't"),
        ('{"env": {"POD_IP": "\\ud800"}}', "'POD_IP' holds what an environment can't"),
        ('{"env": {"\\ud800": "x"}}', "holds what an environment can't"),
    ],
)
def test_wrong(path: Path, content: str, words: str) -> None:
    path.write_text(content)
    assert words in refusal(path)
    with pytest.raises(metadata.MetadataError) as caught:
        metadata.read_until(str(path), 60)  # wrong is not half-written: no waiting
    assert not isinstance(caught.value, metadata.HalfWritten)


@pytest.mark.parametrize("depth", [5_000, 200_000])
def test_nested_without_end(path: Path, depth: int) -> None:
    """Refused in words like all else: nothing that escapes as another kind of error and ends a server."""
    path.write_text("[" * depth)
    refusal(path)
    assert protocol.read_json(path) is None


@pytest.mark.parametrize(
    "content",
    [
        '{"env": {"HF_TOKEN": "s3cret", "POD_IP": 7}}',
        '{"env": {"HF_TOKEN": "s3cret\\u0000"}}',
        '{"env": {"HF_TOKEN=s3cret": ""}}',
        '{"env": {"HF_TOKEN": "s3cret", "HF_TOKEN": "s3cret"}}',
        '{"env": {"HF_TOKEN": ["s3cret"]}}',
        '{"env": ["HF_TOKEN=s3cret"]}',
        '{"env": "HF_TOKEN=s3cret"}',
        '{"env": {"HF_TOKEN": "s3cret"',
        '"s3cret"',
        '{"incarnation": ["s3cret"]}',
        '{"incarnation": "i", "snapshot": {"s3cret": 1}}',
    ],
)
def test_values_are_never_repeated(path: Path, content: str) -> None:
    path.write_text(content)
    assert "s3cret" not in refusal(path)


def test_a_long_name_is_not_repeated_in_full(path: Path) -> None:
    for content in ({"env": {"N" * 5000: 7}}, {"env": {"N" * 5000 + "=": "x"}}, {"schema": "N" * 5000}):
        path.write_text(json.dumps(content))
        assert len(refusal(path)) < len(str(path)) + 200


def test_too_large(path: Path) -> None:
    path.write_text('{"incarnation": "' + "i" * metadata.SIZE_LIMIT + '"}')
    assert "larger than" in refusal(path)


def test_a_directory(path: Path) -> None:
    path.mkdir()
    assert "is a directory" in refusal(path)


def test_a_pipe_does_not_block(path: Path) -> None:
    os.mkfifo(path)
    started = time.monotonic()
    assert "not a regular file" in refusal(path)
    assert time.monotonic() - started < 5


def test_a_socket(open_path: Path) -> None:
    path = open_path / "restore.json"
    with socket.socket(socket.AF_UNIX) as bound:
        bound.bind(str(path))
        assert "can't be read" in refusal(path)


def test_a_loop_of_links(path: Path) -> None:
    path.symlink_to(path)
    assert "can't be read" in refusal(path)


def test_unreadable(open_path: Path) -> None:
    """As root every file is readable: the child gives that up first."""
    path = open_path / "restore.json"
    path.write_text("{}")
    path.chmod(0)
    pid = os.fork()
    if pid == 0:
        try:
            if os.geteuid() == 0:
                os.setgroups([])
                os.setgid(65534)
                os.setuid(65534)
            metadata.read(str(path))
            os._exit(1)
        except metadata.MetadataError as error:
            os._exit(0 if "can't be read: Permission denied" in str(error) else 2)
        except BaseException:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_half_written_is_read_again_until_whole(path: Path) -> None:
    path.write_text('{"incarnation": "i')
    found: list[metadata.Metadata | None] = []
    reader = threading.Thread(target=lambda: found.append(metadata.read_until(str(path), 20, 0.01)))
    reader.start()
    path.write_text('{"incarnation": "i-9"}')
    reader.join(20)
    assert found[0] is not None
    assert found[0].incarnation == "i-9"


def test_half_written_for_ever_is_an_error(path: Path) -> None:
    path.write_text("{")
    started = time.monotonic()
    with pytest.raises(metadata.HalfWritten):
        metadata.read_until(str(path), 0.3, 0.01)
    assert 0.3 <= time.monotonic() - started < 5


def test_the_signature_follows_a_swapped_link(tmp_path: Path) -> None:
    """As a ConfigMap is updated: the file is reached through a link to a folder that is replaced in one step."""
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "restore.json").write_text(json.dumps({"incarnation": name}))
    (tmp_path / "data").symlink_to("one")
    path = tmp_path / "restore.json"
    path.symlink_to("data/restore.json")
    before = metadata.signature(str(path))
    assert metadata.signature(str(path)) == before
    (tmp_path / "data.new").symlink_to("two")
    (tmp_path / "data.new").rename(tmp_path / "data")
    assert metadata.signature(str(path)) != before
    found = metadata.read(str(path))
    assert found is not None
    assert found.incarnation == "two"


def test_a_link_swapped_under_the_reader(tmp_path: Path) -> None:
    """Whatever the moment: one whole object or the other."""
    for name in ("one", "two"):
        (tmp_path / name).write_text(json.dumps({"incarnation": name, "env": {"POD_NAME": name}}))
    path = tmp_path / "restore.json"
    path.symlink_to("one")
    seen: set[str] = set()
    stop = threading.Event()

    def swap() -> None:
        while not stop.is_set():
            for name in ("two", "one"):
                (tmp_path / "new").symlink_to(name)
                (tmp_path / "new").rename(path)

    swapper = threading.Thread(target=swap)
    swapper.start()
    try:

        def both() -> bool:
            found = metadata.read(str(path))
            assert found is not None
            assert found.env == {"POD_NAME": found.incarnation}
            seen.add(found.incarnation)
            return len(seen) == 2

        wait_until(both, 20)
    finally:
        stop.set()
        swapper.join()


def test_the_signature_sees_a_rewrite_in_place(path: Path) -> None:
    path.write_text('{"incarnation": "a"}')
    before = metadata.signature(str(path))
    path.write_text('{"incarnation": "bb"}')
    assert metadata.signature(str(path)) != before
