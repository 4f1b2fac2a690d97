"""What an engine froze out of the collector's sight is collected all the same, and stays frozen."""

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
        gc.freeze()
        del held
        gc.collect()
        alone = gone() is not None
        collector.collect()
        print(json.dumps([alone, gone() is None, gc.get_freeze_count() > 0]))
    """
    found = run(code, {"PYTHONPATH": str(HOOKS)})
    assert json.loads(found.stdout) == [True, True, True], found.stderr


def test_nothing_is_frozen_that_was_not() -> None:
    found = run(
        "import gc; from nvsnap_hooks import collector; collector.collect(); print(gc.get_freeze_count())",
        {"PYTHONPATH": str(HOOKS)},
    )
    assert found.stdout == "0\n", found.stderr


def test_what_was_frozen_is_found_among_the_referrers() -> None:
    code = """
        import gc
        from nvsnap_hooks import collector

        class Held: pass

        held, holder = Held(), {}
        holder["it"] = held
        gc.freeze()
        print(any(found is holder for found in collector.referrers([held])), gc.get_freeze_count() > 0)
    """
    found = run(code, {"PYTHONPATH": str(HOOKS)})
    assert found.stdout == "True True\n", found.stderr


def test_what_came_later_is_frozen_where_the_engine_had_frozen_its_heap_and_only_there() -> None:
    code = """
        import gc
        from nvsnap_hooks import collector

        collector.referrers([[]])
        collector.freeze_again()
        before = gc.get_freeze_count()
        gc.freeze()
        collector.referrers([[]])
        later = [[] for _ in range(10000)]
        collector.freeze_again()
        print(before, gc.get_freeze_count() > 10000)
    """
    found = run(code, {"PYTHONPATH": str(HOOKS)})
    assert found.stdout == "0 True\n", found.stderr


def test_a_look_freezes_no_garbage() -> None:
    code = """
        import gc, weakref
        from nvsnap_hooks import collector

        class Held: pass

        gc.disable()
        gc.freeze()
        held = Held()
        held.itself = held
        gone = weakref.ref(held)
        del held
        collector.referrers([[]])
        print(gone() is None, gc.get_freeze_count() > 0)
    """
    found = run(code, {"PYTHONPATH": str(HOOKS)})
    assert found.stdout == "True True\n", found.stderr
