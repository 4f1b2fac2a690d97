# SGLang as it is released, for tools/install-engine: on torch's CPU build and without the CUDA packages it asks for.
# shellcheck shell=bash disable=SC2034  # what is set here is read there
DEFAULT_VERSION=0.5.23
PACKAGE=sglang
# What 0.5.18 asks for; 0.5.23 asks for 2.14.1 and runs on it too.
TORCH=torch==2.13.0+cpu
STAND_INS=$TOOLS/sglang-cpu

packages_id() { echo "sglang $VERSION $(checksum "$STAND_INS/packages.txt")"; }
ready_id() { echo "$(packages_id) $(checksum "$STAND_INS"/*.py "$STAND_INS"/*/*.py)"; }
checksum() { cat "$@" | cksum | cut -d' ' -f1; }

install_packages() {
    with_progress "$PACKAGE $VERSION" pip_install --no-deps "sglang==$VERSION" || give_up
    needed_by_sglang >"$DIR/requirements.txt" || fail 70 "cannot read what sglang $VERSION asks for"
    pip_install_with_torch "$TORCH" -r "$DIR/requirements.txt"
}

# The packages that a CPU server imports, as the release pins them; a bare name where another package would bring it (triton: torch's CUDA build).
needed_by_sglang() {
    "$DIR/bin/python" - "$STAND_INS/packages.txt" <<'PYTHON'
import importlib.metadata
import pathlib
import sys

from pip._vendor.packaging.requirements import Requirement
from pip._vendor.packaging.utils import canonicalize_name

asked = [Requirement(text) for text in importlib.metadata.requires("sglang") or []]
pins = {canonicalize_name(one.name): one for one in asked if one.marker is None or one.marker.evaluate({"extra": ""})}
for name in pathlib.Path(sys.argv[1]).read_text().split():
    print(pins.get(canonicalize_name(name), name))
PYTHON
}

complete_environment() {
    local site
    site=$(site_packages)
    (cd "$STAND_INS" && find . -name '*.py' -exec cp --parents {} "$site" \;)
}

check_engine() {
    SGLANG_USE_CPU_ENGINE=1 "$DIR/bin/python" -c 'import sglang.launch_server, sglang.srt.managers.scheduler, sglang.srt.entrypoints.http_server'
}
