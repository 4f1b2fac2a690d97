"""First on the engine's PYTHONPATH: load the sitecustomize that was there before, then the hooks. Never fatal, never loud."""

import sys


def _load_shadowed() -> None:
    """Run the sitecustomize that this file hides, exactly as Python would have: its errors are its own."""
    from importlib.machinery import PathFinder

    entries = [entry.rstrip("/") for entry in sys.path]
    here = __file__.rpartition("/")[0]
    # Only what comes after us was hidden by us. (Two copies of the hooks would otherwise call each other.)
    after = entries[entries.index(here) + 1 :] if here in entries else []
    spec = PathFinder.find_spec("sitecustomize", after)
    if spec is None or spec.loader is None:
        return
    from importlib.util import module_from_spec

    ours = sys.modules.pop("sitecustomize", None)
    module = module_from_spec(spec)
    sys.modules["sitecustomize"] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        if ours is not None:
            sys.modules["sitecustomize"] = ours
        raise


try:
    _load_shadowed()
finally:
    try:
        from nvsnap_hooks import bootstrap

        bootstrap.start()
    except Exception:  # the engine comes first; a process without hooks is found by its missing registration
        pass
