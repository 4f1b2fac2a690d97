"""As much of torch as the stand-ins and the hooks' adapters for them touch."""

from types import SimpleNamespace


class device:
    def __init__(self, type):
        self.type = type


class Tensor(list):
    def __eq__(self, other):
        return Tensor(value == other for value in self)

    __hash__ = None

    def all(self):
        return all(list(self))

    def tolist(self):
        return list(self)


def ones(count, device=None, dtype=None):
    return Tensor([1] * count)


version = SimpleNamespace(hip=None)
cuda = SimpleNamespace(is_available=lambda: False)
