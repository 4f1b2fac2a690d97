"""What a frozen tree goes on to use without having it in its image: CPU, kernel, Python packages, hooks."""

from __future__ import annotations

import hashlib
import os
import platform
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from nvsnap_launch.snapshot.manifest import Manifest

INFO_ENDINGS = (".dist-info", ".egg-info")
# x86 flags (arch/x86/include/asm/cpufeatures.h) that stand for instructions a program may have chosen when it started;
# the others tell what the kernel does. On ARM all of "Features" are of this kind.
INSTRUCTIONS = re.compile(
    r"(?:avx|amx|s?sse|fma|bmi|f16c|v?aes|sha_|v?pclmul|popcnt|movbe|movdir|adx|rdrand|rdseed|xsave|gfni|abm|cx16|lahf)"
)


def cpu_features(text: str | None = None) -> list[str]:
    """Instruction sets of the first CPU in proc(5) cpuinfo (or such a text), sorted; empty where it does not tell."""
    text = Path("/proc/cpuinfo").read_text(errors="replace") if text is None else text
    match = re.search(r"^(flags|Features)\s*:\s*(.*)$", text, re.MULTILINE)
    if match is None:
        return []
    names = set(match[2].split())
    return sorted(names if match[1] == "Features" else filter(INSTRUCTIONS.match, names))


def packages(files: Path, paths: set[str]) -> dict[str, list[str]]:
    """Folder to name-version of each Python package installed in it, for the folders that hold these files.

    ``files``: the root of the file system in which the paths are.
    """
    folders = {folder for path in paths for folder in Path(path).parents}
    found = {str(folder): installed(files / str(folder).lstrip("/")) for folder in folders}
    return {folder: names for folder, names in sorted(found.items()) if names}


def installed(folder: Path) -> list[str]:
    try:
        names = os.listdir(folder)  # noqa: PTH208
    except OSError:
        return []
    return sorted(name.rpartition(".")[0] for name in names if name.endswith(INFO_ENDINGS))


def code_digest(folder: Path) -> str:
    """SHA-256 of all Python files below a folder with their names; of nothing where there are none. Raises OSError."""
    state = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        content = path.read_bytes()
        state.update(f"{path.relative_to(folder)}\0{len(content)}\0".encode() + content)
    return state.hexdigest()


def differences(manifest: Manifest) -> list[str]:
    """What is another here than where the snapshot was made, and would break the tree sooner or later."""
    if manifest.machine != platform.machine():
        return [f"the snapshot is of {manifest.machine}, this machine is {platform.machine()}"]
    return [*older_kernel(manifest), *lacking_cpu(manifest), *other_packages(manifest), *other_hooks(manifest)]


def older_kernel(manifest: Manifest) -> list[str]:
    """Its libraries have seen what the kernel of then can do; a newer one can do that as well."""
    here = os.uname().release
    if numbers(here) < numbers(manifest.kernel):
        return [f"the snapshot was made on Linux {manifest.kernel}, here is the older {here}"]
    return []


def numbers(release: str) -> tuple[int, ...]:
    """(major, minor) of a kernel release."""
    match = re.match(r"(\d+)\.(\d+)", release)
    return (int(match[1]), int(match[2])) if match else ()


def lacking_cpu(manifest: Manifest) -> list[str]:
    here = set(cpu_features())
    missing = [name for name in manifest.cpu if name not in here] if here else []
    return [f"this CPU lacks {', '.join(missing)}, which the tree may use"] if missing else []


def other_packages(manifest: Manifest) -> list[str]:
    """A module that is imported only after the restore must be of the version that is in memory."""
    found = []
    for folder, wanted in manifest.packages.items():
        here = installed(Path(folder))
        for name in [name for name in wanted if name not in here]:
            stem = name.partition("-")[0]
            now = [other for other in here if other.partition("-")[0] == stem]
            found.append(f"{folder} has {' and '.join(now) or 'no ' + stem} instead of {name}")
    return found


def other_hooks(manifest: Manifest) -> list[str]:
    folder = manifest.hooks.path
    try:
        same = code_digest(Path(folder)) == manifest.hooks.sha256
    except OSError as error:
        return [f"the hooks in {folder} cannot be read: {error.strerror}"]
    text = f"the hooks in {folder} are not those that the engine was frozen with"
    return [] if same else [f"{text}: install the nvsnap_launch that started it"]
