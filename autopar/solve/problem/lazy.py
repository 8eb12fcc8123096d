"""A table whose entries are computed when they are first read: a bound may need the first columns only."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

V = TypeVar("V")


class LazyTable(Mapping[str, V]):
    """`keys` in order; `compute` is called once for each key that is read."""

    def __init__(self, keys: Iterable[str], compute: Callable[[str], V]) -> None:
        self._keys, self._compute = dict.fromkeys(keys), compute
        self._known: dict[str, V] = {}

    def __getitem__(self, key: str) -> V:
        if key not in self._known:
            if key not in self._keys:
                raise KeyError(key)
            self._known[key] = self._compute(key)
        return self._known[key]

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
