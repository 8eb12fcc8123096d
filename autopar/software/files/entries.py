"""The entries of a configuration file: dotted keys, values, and the lines on which they stand."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Any

from autopar.errors import AutoparError


class ConfigError(AutoparError):
    """A configuration file cannot be read, or says what cannot be; the message names file and line, and what to write."""


@dataclass(frozen=True, slots=True)
class Entry:
    """The value of a key, and its line (from 1)."""

    value: Any
    line: int


@dataclass(slots=True)
class Entries:
    """The entries of one file in its order. `style`: ``arguments`` (``--key value``), ``overrides`` (``key=value``), ``toml``,
    ``yaml`` or ``json``. `used` are the keys that somebody asked for."""

    path: str
    style: str
    text: str
    values: dict[str, Entry]
    used: set[str] = field(default_factory=set)

    def __contains__(self, key: str) -> bool:
        return key in self.values

    def error(self, key: str, message: str) -> ConfigError:
        """The error of a key, with its line."""
        return ConfigError(f"{self.path}:{self.values[key].line if key in self.values else 1}: {message}")

    def raw(self, *keys: str) -> Any:
        """The value of the first of `keys` that is there; None where none is."""
        for key in keys:
            self.used.add(key)
            if key in self.values:
                return self.values[key].value
        return None

    def whole(self, *keys: str, default: int = 0, least: int = 1) -> int:
        """A whole number of at least `least`."""
        value = self.raw(*keys)
        if value is None or value == "":
            return default
        key = next(each for each in keys if each in self.values)
        try:
            number = int(str(value).replace("_", ""))
            if number != float(str(value).replace("_", "")) or isinstance(value, bool):
                raise ValueError
        except (ValueError, OverflowError):
            raise self.error(key, f"{key} is {str(value)[:40]!r}: write a whole number of at least {least}") from None
        if number < least or number > 2**53:
            raise self.error(key, f"{key} is {str(number)[:30]}: write a whole number of at least {least}")
        return number

    def truth(self, *keys: str, default: bool = False) -> bool:
        """Whether a switch is on: a flag without value is."""
        value = self.raw(*keys)
        if value is None:
            return default
        word = str(value).lower()
        if word in ("true", "1", "yes", "on", ""):
            return True
        if word in ("false", "0", "no", "off", "none", "null"):
            return False
        key = next(each for each in keys if each in self.values)
        raise self.error(key, f"{key} is {str(value)[:40]!r}: write true or false")

    def word(self, *keys: str, of: Iterable[str] = (), default: str = "") -> str:
        """A word, one of `of` where these are given."""
        value = self.raw(*keys)
        if value is None:
            return default
        text, allowed = str(value), tuple(of)
        if allowed and text not in allowed:
            key = next(each for each in keys if each in self.values)
            raise self.error(key, f"{key} is {text[:40]!r}: write one of {', '.join(allowed)}")
        return text

    def check_known(self, sections: Mapping[str, Iterable[str]]) -> None:
        """ConfigError for a key of a section that is none of its keys, and for one that is nearly a key of another name.
        `sections`: keys by section (empty: keys outside of all sections, where only near misses are refused)."""
        for key in self.values:
            section, _, name = key.rpartition(".")
            known = list(sections.get(section, ()))
            if not known or name in known or key in self.used:
                continue
            near = get_close_matches(name, known, 1, 0.85)
            if near or section:
                remedy = f"write {near[0]}" if near else f"known are {', '.join(known[:12])}"
                raise self.error(key, f"{name[:60]} is no key{' of ' + section if section else ''}: {remedy}")


def flattened(data: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield (dotted key, value) of nested mappings; lists stay values."""
    for key, value in data.items():
        name = f"{prefix}.{key}" if prefix else str(key)
        if isinstance(value, Mapping) and value:
            yield from flattened(value, name)
        else:
            yield name, value
