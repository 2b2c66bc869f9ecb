"""What calls of `generate` leave for later calls of the same shape: buffers and graphs, a few a model."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

T = TypeVar("T")


class Kept(Generic[T]):
    """Things with a key, the last used of each model; they go with the model.

    Args:
        most: How many a model.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._of_model: WeakKeyDictionary[Any, OrderedDict[Hashable, T]] = WeakKeyDictionary()

    @contextmanager
    def borrowed(self, model: Any, key: Hashable, make: Callable[[], T]) -> Iterator[T]:
        """Yield what is kept under this key, or what `make` returns, and keep it afterwards.

        It is nobody else's meanwhile: a second thread makes its own. After an error it is not kept.
        """
        kept = self._of_model.setdefault(model, OrderedDict())
        thing = kept.pop(key, None)
        if thing is None:
            thing = make()
        yield thing
        kept[key] = thing
        while len(kept) > self._most:
            kept.popitem(last=False)
