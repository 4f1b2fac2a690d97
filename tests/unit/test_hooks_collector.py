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


def test_one_look_finds_all_kinds_whatever_it_is_for_and_forgets_what_is_gone() -> None:
    code = """
        import gc, json
        from nvsnap_hooks import collector

        class First: pass
        class Second: pass
        class Other: pass

        first, second, other, looks = First(), Second(), Other(), []
        get_referrers = gc.get_referrers
        gc.get_referrers = lambda *objects: looks.append(len(objects)) or get_referrers(*objects)
        with collector.one_look([First, Second]):
            holders = collector.referrers([other])
            found = [collector.instances(First) == [first], collector.instances(First, Second) == [first, second]]
            del first, holders
            found.append(collector.instances(First, Second) == [second])
            inside = list(looks)
            found.append(collector.instances(Other) == [other])  # not announced: a look of its own
        found.append(collector.instances(Second) == [second])
        print(json.dumps([found, inside, looks]))
    """
    found = run(code, {"PYTHONPATH": str(HOOKS)})
    assert json.loads(found.stdout) == [[True] * 5, [3], [3, 1, 1]], found.stderr
