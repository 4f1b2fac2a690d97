"""The files that build and run images, for what can be known without a registry."""

from __future__ import annotations

import json
import re
import runpy
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from container import WORK
from contract_harness import ROOT
from nvsnap_hooks.vllm import versions

IMAGES = ROOT / "images"
STOCK = IMAGES / "vllm" / "Dockerfile"
POD = IMAGES / "kubernetes" / "vllm" / "vllm.yaml"
DEBIAN = IMAGES / "debian-cpu" / "Dockerfile"
READY = ["nvsnap-launch", "wait", "ready", "--timeout", "0"]
ALIVE = ["nvsnap-launch", "wait", "alive", "--timeout", "0"]
# What the build makes in the context: a wheel, and what images/debian-cpu/build.py puts there.
MADE = {STOCK: ("dist/nvsnap_launch-*.whl",), DEBIAN: ("base.tar", "wheels/", "criu/", "engine/", "vllm")}


def instructions(path: Path) -> Iterator[tuple[str, str]]:
    """(INSTRUCTION, the rest) of a Dockerfile, continued lines joined."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    for line in "\n".join(lines).replace("\\\n", " ").splitlines():
        if line.strip():
            name, _, rest = line.partition(" ")
            yield name, rest.strip()


def value(path: Path, name: str) -> str:
    found = [rest for instruction, rest in instructions(path) if instruction == name]
    assert found, f"{path}: no {name}"
    return found[-1]


@pytest.mark.parametrize("path", [STOCK, DEBIAN], ids=["vllm", "debian-cpu"])
def test_what_a_dockerfile_promises(path: Path) -> None:
    user, _, group = value(path, "USER").partition(":")
    assert int(user) > 0
    assert group == "0", "any other user of group 0 can then do the same"
    entrypoint = json.loads(value(path, "ENTRYPOINT"))
    assert len(entrypoint) == 1
    assert (ROOT / "entrypoints" / Path(entrypoint[0]).name).is_file()
    assert json.loads(value(path, "HEALTHCHECK").partition(" CMD ")[2]) == READY
    assert value(path, "STOPSIGNAL") == "SIGTERM"
    for name, rest in instructions(path):
        if name in ("COPY", "ADD"):
            source = rest.split()[-2]
            assert source in MADE[path] or (ROOT / source).exists(), f"{path}: {source}"
        assert name != "RUN" or "pip install" not in rest or "--no-index" in rest, "nothing is fetched"


def test_the_stock_image_is_a_version_that_is_verified() -> None:
    image = value(STOCK, "ARG").removeprefix("VLLM_IMAGE=")
    assert value(STOCK, "FROM") == "${VLLM_IMAGE}"
    name, _, tag = image.partition(":")
    assert name == "vllm/vllm-openai"
    assert versions.lookup(tag.removeprefix("v")) is not None, f"{tag} is not in the table"
    tags = set(re.findall(r"nvsnap-vllm:(v[0-9.]+[0-9])", "".join(file.read_text() for file in text_files())))
    assert tags == {tag}, "one version in all files"


def text_files() -> list[Path]:
    return [path for path in IMAGES.rglob("*") if path.suffix in (".yaml", "") and path.is_file()]


def load(path: Path) -> Any:
    return read_yaml(path.read_text())


def read_yaml(text: str) -> Any:
    """By the engine's Python, which has a parser."""
    command = [
        WORK / "engine" / "bin" / "python",
        "-c",
        "import json, sys, yaml; print(json.dumps(yaml.safe_load(sys.stdin)))",
    ]
    return json.loads(subprocess.run(command, input=text, check=True, capture_output=True, text=True).stdout)


@pytest.mark.image
def test_no_probe_ends_an_engine_that_is_only_frozen() -> None:
    pod = load(POD)
    engine = pod["spec"]["containers"][0]
    probes = {name: engine[name]["exec"]["command"] for name in ("startupProbe", "readinessProbe", "livenessProbe")}
    assert probes == {"startupProbe": READY, "readinessProbe": READY, "livenessProbe": ALIVE}
    startup = engine["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800, "a large model, or a slow restore"
    assert pod["spec"]["securityContext"]["runAsUser"] == int(value(STOCK, "USER").partition(":")[0])
    assert engine["securityContext"]["readOnlyRootFilesystem"] is True
    mounts = {mount["mountPath"] for mount in engine["volumeMounts"]}
    assert {"/run/nvsnap", "/dev/shm", "/tmp"} <= mounts
    assert {mount["name"] for mount in engine["volumeMounts"]} == {volume["name"] for volume in pod["spec"]["volumes"]}


@pytest.mark.image
def test_the_placeholder_differs_in_its_command_and_in_what_it_has_started_with() -> None:
    folder = IMAGES / "kubernetes" / "standby"
    overlay = load(folder / "kustomization.yaml")
    bases = [(folder / base).resolve() for base in overlay["resources"]]
    assert bases == [POD.parent]
    assert not set(bases) & {folder, *folder.parents}, "kustomize takes no base that the overlay lies in"
    assert load(POD.parent / "kustomization.yaml") == {"resources": [POD.name]}
    (patch,) = overlay["patches"]
    assert patch["target"] == {"kind": "Pod", "name": load(POD)["metadata"]["name"]}
    place = "/spec/containers/0"
    assert read_yaml(patch["patch"]) == [
        {"op": "add", "path": f"{place}/command", "value": ["/opt/nvsnap/entrypoints/standby"]},
        {"op": "replace", "path": f"{place}/startupProbe/exec/command", "value": ALIVE},
    ]
    assert (ROOT / "entrypoints" / "standby").is_file()


def builder(work: Path, with_engine: bool = False) -> Any:
    return runpy.run_path(str(IMAGES / "debian-cpu" / "build.py"))["Builder"](work, with_engine)


def test_an_image_with_another_engine_or_criu_is_another(tmp_path: Path) -> None:
    for folder in ("engine", "criu"):
        (tmp_path / folder).mkdir()
    engine, criu = tmp_path / "engine" / ".nvsnap-engine", tmp_path / "criu" / "criu"
    criu.touch(0o755)
    found = []
    for version in ("1", "2"):
        engine.write_text(version)
        found += [builder(tmp_path, with_engine).fingerprint() for with_engine in (False, True)]
    assert len(set(found)) == 3, "what has no engine in it is the same"
    criu.write_text("#!/bin/sh\necho Version: 4.9\n")
    assert builder(tmp_path).fingerprint() not in found


def test_an_index_is_fetched_where_there_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A container of Debian's has sources, and no index of them."""
    asked, index = tmp_path / "asked", tmp_path / "index"
    made = builder(tmp_path)
    suite = made.run.__globals__["suite"]()
    says = f'echo "$@" >>{asked}\n[ "$1" != update ] || echo "Packages http://mirror {suite}" >{index}'
    (tmp_path / "apt-get").write_text(f"#!/bin/sh\n{says}\n[ ! -f {index} ] || cat {index}\n")
    (tmp_path / "apt-get").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    made.place.mkdir()
    for _ in range(2):
        assert made.debian() == [f"deb http://mirror {suite} main"]
    assert asked.read_text().count("update") == 1


@pytest.mark.image
def test_the_compose_file() -> None:
    compose = IMAGES / "vllm" / "compose.yaml"
    service = load(compose)["services"]["vllm"]
    build = service["build"]
    assert (compose.parent / build["context"] / build["dockerfile"]).resolve() == STOCK
    user = value(STOCK, "USER").partition(":")[0]
    assert service["read_only"] is True
    assert f"uid={user}" in service["tmpfs"][1]
    assert service["tmpfs"][1].startswith("/run/nvsnap:")
