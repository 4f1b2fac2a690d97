"""What an agent does in a placeholder: files back to their places, metadata, `criu restore`. Run by nsenter in its namespaces.

Arguments: SNAPSHOT CRIU METADATA (the text of the metadata file; empty: none) LOG. It knows nothing of the launcher that
waits there, but reads the manifest, puts the files back and has CRIU's flags from the snapshot driver's own code: what is tested is
that CRIU and the metadata are enough, not that the layout is described well enough to do it by hand.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from nvsnap_launch.snapshot import manifest as manifests
from nvsnap_launch.snapshot import saved
from nvsnap_launch.snapshot.criu import COMMON_FLAGS


def main(snapshot: Path, criu: str, metadata: str, log: str) -> None:
    manifest = manifests.load(snapshot)
    for file in manifest.control:
        saved.remove(file.names)
    for file in [*manifest.control, *manifest.saved]:
        saved.put_back(snapshot, file)
    if metadata:
        Path(manifest.metadata).write_text(metadata)
    work = Path(log).parent
    images = snapshot / manifests.IMAGES_DIR
    os.execv(criu, [criu, "restore", "-d", "-D", str(images), "-W", str(work), "-o", log, *COMMON_FLAGS])


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
