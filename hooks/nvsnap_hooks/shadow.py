"""Something else in an attribute's place for the time of a call."""

from __future__ import annotations

import contextlib
import logging

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Any


@contextlib.contextmanager
def instead(owner: Any, **values: Any) -> Iterator[None]:
    """Attributes of an object, a class or a module. What was only inherited is inherited again afterwards."""
    before = {name: vars(owner)[name] for name in values if name in vars(owner)}
    for name, value in values.items():
        setattr(owner, name, value)
    try:
        yield
    finally:
        for name in values:
            if name in before:
                setattr(owner, name, before[name])
            else:
                delattr(owner, name)


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Nothing is logged below a warning, by any thread of this process."""
    before = logging.root.manager.disable
    logging.disable(max(before, logging.INFO))
    try:
        yield
    finally:
        logging.disable(before)
