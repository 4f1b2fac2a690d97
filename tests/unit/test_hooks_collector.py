"""What an engine froze out of the collector's sight is found and collected all the same, and stays frozen."""

from __future__ import annotations

import json

from hooks_support import HOOKS, run


def test_a_cycle_that_was_frozen_while_in_use_is_collected() -> None:
    code = """
        import gc, json, weakref
        from nvsnap_hooks import collector

        class Held: pass

        held = Held()
        held.itself = held
        gone = weakref.ref(held)
        kept = Held()
        gc.freeze()
        found = collector.instances(Held)
        del held, found[:]
        gc.collect()
        alone = gone() is not None
        collector.collect()
        print(json.dumps([alone, gone() is None, collector.instances(Held) == [kept], gc.get_freeze_count() > 0]))
    """
    found = run(code, {"PYTHONPATH": str(HOOKS)})
    assert json.loads(found.stdout) == [True, True, True, True], found.stderr


def test_nothing_is_frozen_that_was_not() -> None:
    found = run(
        "import gc; from nvsnap_hooks import collector; collector.collect(); print(gc.get_freeze_count())",
        {"PYTHONPATH": str(HOOKS)},
    )
    assert found.stdout == "0\n", found.stderr
