"""A table whose entries are made when they are first read: a bound from the first columns may be all that is asked of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TypeVar

V = TypeVar("V")


class Lazy(Mapping[str, V]):
    """`keys` in order; `make` is called once for each that is read."""

    def __init__(self, keys: Iterable[str], make: Callable[[str], V]) -> None:
        self._keys, self._make = dict.fromkeys(keys), make
        self._made: dict[str, V] = {}

    def __getitem__(self, key: str) -> V:
        if key not in self._made:
            if key not in self._keys:
                raise KeyError(key)
            self._made[key] = self._make(key)
        return self._made[key]

    def __contains__(self, key: object) -> bool:
        return key in self._keys

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __len__(self) -> int:
        return len(self._keys)
