#!/usr/bin/env python3
"""Build the Debian image of the CPU chain: images/debian-cpu/build.py [--work DIR] [--with-engine].

Needs root, apt and what `tools/setup` makes. No container registry: the base is made of Debian's packages by mmdebstrap, and
buildah builds on it. Results, under DIR/image: rootfs/ and config.json (for an OCI runtime), and image.tar, which
`podman load` and `docker load` take. What has not changed is not built again.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
NAME = "localhost/nvsnap-launch-cpu"
TOOLS = {"buildah": "buildah", "mmdebstrap": "mmdebstrap", "crun": "crun"}  # command: Debian's package
PACKAGES = "python3,python3-dev,python3-venv,g++,libnuma1"  # torch compiles on CPU, also where vLLM is told to be eager
BEAT_S = 10


class Failed(Exception):
    """One sentence."""


def say(text: str) -> None:
    print(f"image: {text}", flush=True)


class Builder:
    def __init__(self, work: Path, with_engine: bool) -> None:
        self.work, self.with_engine = work, with_engine
        self.place = work / "image"
        self.context = self.place / "context"
        self.log = self.place / "build.log"
        self.storage = ["--storage-driver", "vfs", "--root", str(self.place / "storage")]
        self.storage += ["--runroot", str(self.place / "run")]

    def step(self, what: str, command: list[str], **more: object) -> str:
        """Run a command, its words in the log; a line at the end, and each BEAT_S seconds. Returns its stdout."""
        begin = beat = time.monotonic()
        with self.log.open("ab") as log:
            log.write(f"\n# {what}: {' '.join(command)}\n".encode())
            log.flush()
            answer = self.place / "stdout"
            with answer.open("wb") as stdout:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=stdout,
                    stderr=log,
                    **more,  # type: ignore[call-overload]
                )
            while process.poll() is None:
                time.sleep(0.1)
                if time.monotonic() - beat > BEAT_S:
                    beat = time.monotonic()
                    say(f"{what}: {beat - begin:.0f} s")
            if process.returncode:
                raise Failed(f"{what} failed ({process.returncode}); its words are at the end of {self.log}")
        say(f"{what}: done after {time.monotonic() - begin:.0f} s")
        return answer.read_text(errors="replace")

    def buildah(self, what: str, *arguments: str) -> str:
        return self.step(what, ["buildah", *self.storage, *arguments])

    def is_built(self) -> bool:
        """True when the image is of this checkout."""
        return (self.place / "rootfs").is_dir() and read(self.place / "stamp") == self.fingerprint()

    def run(self) -> None:
        self.place.mkdir(parents=True, exist_ok=True)
        if self.is_built():
            say(f"is there: {self.place / 'rootfs'}")
            return
        stamp, wanted = self.place / "stamp", self.fingerprint()
        if os.geteuid() != 0:
            raise Failed("building the image needs root")
        stamp.unlink(missing_ok=True)
        self.log.write_text("")
        self.install_tools()
        self.fill_context()
        self.build()
        stamp.write_text(wanted)
        say(f"ready: {self.place / 'image.tar'}, and unpacked in {self.place / 'rootfs'}")

    # -- what goes in -----------------------------------------------------------------------------------------

    def fingerprint(self) -> str:
        """Of all that is copied into the image: our files, and which CRIU and engine."""
        engine = self.with_engine and read(self.work / "engine" / ".nvsnap-engine")
        state = hashlib.sha256(f"{engine} {self.criu()} {PACKAGES} {suite()}".encode())
        for path in sorted(self.sources()):
            state.update(f"{path.relative_to(ROOT)} {path.stat().st_mode}\0".encode() + path.read_bytes())
        return state.hexdigest()

    def criu(self) -> str:
        try:
            return subprocess.run([self.work / "criu" / "criu", "--version"], capture_output=True, text=True).stdout
        except OSError:
            return ""

    def sources(self) -> Iterator[Path]:
        yield from (ROOT / "pyproject.toml", ROOT / "tools" / "unpack-criu", Path(__file__).resolve())
        yield from (path for path in HERE.iterdir() if path.is_file())
        for folder in ("nvsnap_launch", "hooks", "entrypoints"):
            yield from (
                path for path in (ROOT / folder).rglob("*") if path.is_file() and "__pycache__" not in path.parts
            )

    def install_tools(self) -> None:
        missing = sorted(package for command, package in TOOLS.items() if shutil.which(command) is None)
        if missing:
            if shutil.which("apt-get") is None:
                raise Failed(f"missing: {', '.join(missing)}; install them and start again")
            quiet = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            self.step("package index", ["apt-get", "update", "-qq"])
            install = ["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing]
            self.step(f"installing {', '.join(missing)}", install, env=quiet)

    def fill_context(self) -> None:
        engine = self.work / "engine"
        image_python = self.make_base()
        if (found := python_minor(str(engine / "bin" / "python"))) != image_python:
            raise Failed(f"Debian {suite()} has Python {image_python}, the engine's is {found}: they must be the same")
        for name in ("wheels", "engine", "criu"):
            shutil.rmtree(self.context / name, ignore_errors=True)
        wheel = [str(self.work / "venv" / "bin" / "python"), "-m", "pip", "wheel", "--disable-pip-version-check"]
        self.step("wheels", [*wheel, "--no-input", "--wheel-dir", str(self.context / "wheels"), str(ROOT)])
        shutil.copytree(self.work / "criu", self.context / "criu", symlinks=True)
        shutil.copy2(HERE / "vllm", self.context / "vllm")
        packages = engine / "lib" / f"python{image_python}" / "site-packages"
        if self.with_engine:
            self.step("copying the engine", ["cp", "-a", str(packages), str(self.context / "engine")])
        else:
            (self.context / "engine").mkdir()

    def make_base(self) -> str:
        """base.tar, once a suite; returns the version of its Python."""
        base, made = self.context / "base.tar", self.context.parent / "base"
        wanted = f"{suite()} {PACKAGES}"
        if not base.exists() or read(made) != wanted:
            self.context.mkdir(exist_ok=True)
            sources = self.debian()
            command = ["mmdebstrap", "--variant=minbase", f"--include={PACKAGES}", suite(), f"{base}.new", *sources]
            self.step(f"Debian {suite()} from its packages (a minute or two)", [*command, "--format=tar"])
            Path(f"{base}.new").rename(base)
            made.write_text(wanted)
        with tarfile.open(base) as tar:
            names = (Path(name).name for name in tar.getnames() if name.startswith("./usr/bin/python3."))
            return next(names).removeprefix("python")

    def debian(self) -> list[str]:
        """Sources for mmdebstrap: apt's own. A container of Debian's has no index of them yet."""
        if not mirrors():
            self.step("package index", ["apt-get", "update", "-qq"])
        if not (found := mirrors()):
            raise Failed(f"apt has no mirror of Debian {suite()} among its sources")
        return [f"deb {mirror} {suite()} main" for mirror in found]

    # -- the image --------------------------------------------------------------------------------------------

    def build(self) -> None:
        rootfs, archive = self.place / "rootfs", self.place / "image.tar"
        shutil.rmtree(rootfs, ignore_errors=True)
        try:
            options = ["--isolation", "chroot", "--format", "docker", "--layers=false", "-f", str(HERE / "Dockerfile")]
            self.buildah("building the image", "build", *options, "-t", NAME, str(self.context))
            archive.unlink(missing_ok=True)
            self.buildah("saving it", "push", NAME, f"docker-archive:{archive}:{NAME}:latest")
        finally:
            shutil.rmtree(self.place / "storage", ignore_errors=True)
            shutil.rmtree(self.place / "run", ignore_errors=True)
        rootfs.mkdir()
        with tarfile.open(archive) as tar, tempfile.TemporaryDirectory(dir=self.place) as folder:
            tar.extractall(folder)
            index = json.loads(Path(folder, "manifest.json").read_text())[0]
            config = json.loads(Path(folder, index["Config"]).read_text())["config"]
            (self.place / "config.json").write_text(json.dumps(config, indent=1))
            for layer in index["Layers"]:  # one: nothing in it takes away what is below
                self.step("unpacking it", ["tar", "-C", str(rootfs), "--numeric-owner", "-xpf", f"{folder}/{layer}"])


def read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def suite() -> str:
    """That of this machine where it is Debian, so that the Python of the engine's environment fits."""
    words = dict(line.split("=", 1) for line in Path("/etc/os-release").read_text().splitlines() if "=" in line)
    is_debian = words.get("ID", "").strip('"') == "debian"
    return words.get("VERSION_CODENAME", "bookworm").strip('"') if is_debian else "bookworm"


def mirrors() -> list[str]:
    """Those that apt is set up with for this suite. None where it has no index yet."""
    command = ["apt-get", "indextargets", "--format", "$(CREATED_BY) $(REPO_URI) $(CODENAME)"]
    lines = subprocess.run(command, capture_output=True, text=True, check=False).stdout.splitlines()
    found = [line.split()[1] for line in lines if line.split()[:1] == ["Packages"] and line.split()[2:] == [suite()]]
    return list(dict.fromkeys(found))


def python_minor(python: str) -> str:
    """``3.11``. Raises Failed when there is none."""
    try:
        command = [python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        raise Failed(f"{python} does not run: make it with tools/setup engine") from None


def main() -> int:
    parser = argparse.ArgumentParser(description="Build the Debian image of the CPU chain.")
    parser.add_argument("--work", type=Path, default=Path(os.environ.get("NVSNAP_WORK") or ROOT / ".work"))
    parser.add_argument("--with-engine", action="store_true", help="copy the engine into the image (3 GB)")
    given = parser.parse_args()
    try:
        Builder(given.work.absolute(), given.with_engine).run()
    except Failed as error:
        print(f"image: {error}", file=sys.stderr)
        return 69
    return 0


if __name__ == "__main__":
    sys.exit(main())
