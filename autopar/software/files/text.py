"""The text of a configuration in each style, and what a change would be in somebody's own file."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from difflib import unified_diff
from typing import Any

import yaml

from autopar.software.files.entries import Entries

_LEFT_OPEN = ("-1", "auto")
"""Values that leave a knob to the software: it finds the new one itself."""
COMMENT = {"arguments": "#", "overrides": "#", "toml": "#", "yaml": "#"}


def text_of(style: str, values: Mapping[str, Any], head: str = "") -> str:
    """The file: `values` by dotted key, those that are None left out. `head` is a comment, where the style has any."""
    present = {key: value for key, value in values.items() if value is not None}
    lines = [f"{COMMENT[style]} {line}" for line in head.splitlines()] if style in COMMENT else []
    if style == "arguments":
        lines += [_argument(key, value) for key, value in present.items()]
    elif style == "overrides":
        lines += [f"{key}={_plain(value)}" for key, value in present.items()]
    elif style == "json":
        lines.append(json.dumps(_nested(present), indent=2))
    elif style == "yaml":
        lines.append(yaml.safe_dump(_nested(present), sort_keys=False).rstrip())
    else:
        for section, entries in _nested(present).items():
            lines += ["", f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in entries.items())]
    return "\n".join(lines).lstrip("\n") + "\n"


def _argument(key: str, value: Any) -> str:
    return f"--{key}" if value is True else f"--{key} {_plain(value)}"


def _plain(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ",".join(map(str, value)) + "]"
    return str(value).lower() if isinstance(value, bool) else str(value)


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for key, value in values.items():
        *sections, name = key.split(".")
        place = out
        for section in sections:
            place = place.setdefault(section, {})
        place[name] = value
    return out


def changed_text(entries: Entries, values: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """The text of somebody's file with the values that differ from `now`, which are those that the file amounts to as this
    package would write them: what both agree on stays as it is written."""
    changes = {key: value for key, value in values.items() if value != now.get(key)}
    if entries.style == "json":
        return _changed_json(entries, changes)
    lines = entries.text.splitlines()
    added: dict[str, list[str]] = {}
    for key, value in changes.items():
        entry = entries.values.get(key)
        if entry is not None and str(entry.value) in _LEFT_OPEN and value is not None:
            continue
        if entry is not None:
            at = entry.line - 1
            lines[at] = _replaced(lines[at], key, value, entries.style)
        elif value is not None:
            added.setdefault(key.rpartition(".")[0], []).append(_line(key, value, entries.style))
    for section, new in added.items():
        lines = _with_lines_of(lines, section, new, entries)
    before = entries.text.splitlines()
    kept = [line for line in lines if line.strip(" \\") or line in before]
    return "\n".join(kept) + "\n"


def normal_text(entries: Entries) -> str:
    """The text that a change is compared with: JSON is laid out anew, all else is as it is written."""
    return json.dumps(json.loads(entries.text), indent=2) + "\n" if entries.style == "json" else entries.text


def _changed_json(entries: Entries, changes: Mapping[str, Any]) -> str:
    data = json.loads(entries.text)
    for key, value in changes.items():
        *sections, name = key.split(".")
        place = data
        for section in sections:
            place = place.setdefault(section, {}) if isinstance(place, dict) else {}
        if value is None:
            place.pop(name, None)
        elif str(place.get(name)) not in _LEFT_OPEN:
            place[name] = value
    return json.dumps(data, indent=2) + "\n"


def _with_lines_of(lines: list[str], section: str, new: list[str], entries: Entries) -> list[str]:
    """The lines with new ones of a section: after those that it has, or at the end."""
    if entries.style in ("arguments", "overrides") or not section:
        if entries.style == "arguments" and lines and lines[-1].strip():
            lines = [*lines[:-1], lines[-1].rstrip(" \\") + " \\"] if "\\" in entries.text else lines
        return (
            [*lines, *(f"    {line} \\" for line in new[:-1]), f"    {new[-1]}"]
            if entries.style == "arguments"
            else [*lines, *new]
        )
    if entries.style == "toml":
        head = next((at for at, line in enumerate(lines) if line.strip().startswith(f"[{section}]")), None)
        return [*lines, "", f"[{section}]", *new] if head is None else [*lines[: head + 1], *new, *lines[head + 1 :]]
    head = next((at for at, line in enumerate(lines) if line.startswith(f"{section}:")), None)
    indented = [f"  {line}" for line in new]
    return [*lines, f"{section}:", *indented] if head is None else [*lines[: head + 1], *indented, *lines[head + 1 :]]


def _line(key: str, value: Any, style: str) -> str:
    if style == "arguments":
        return _argument(key, value)
    if style == "overrides":
        return f"{key}={_plain(value)}"
    name = key.rpartition(".")[2]
    return f"{name}: {_plain(value)}" if style == "yaml" else f"{name} = {json.dumps(value)}"


def _replaced(line: str, key: str, value: Any, style: str) -> str:
    """The line with another value of the key; without the argument where the value is None."""
    name = key.rpartition(".")[2] if style not in ("arguments", "overrides") else key
    if style == "arguments":
        pattern = rf"--{re.escape(key)}(?:[= ]+(?!--)[^\s\\]+)?"
        return re.sub(pattern, "" if value is None else _argument(key, value).replace("\\", ""), line, count=1)
    if style == "overrides":
        return re.sub(rf"({re.escape(key)}\s*=\s*)(\[[^\]]*\]|[^\s]+)", lambda found: found[1] + _plain(value), line, count=1)
    mark = "=" if style == "toml" else ":"
    new = json.dumps(value) if style in ("json", "toml") else _plain(value)
    pattern = rf"(\"?{re.escape(name)}\"?\s*{mark}\s*)(\"[^\"]*\"|\[[^\]]*\]|[^,}}\s#]+)"
    return re.sub(pattern, lambda found: found[1] + new, line, count=1)


def difference(entries: Entries, changed: str, title: str) -> str:
    """The unified diff of somebody's file and what it would be."""
    before, after = normal_text(entries).splitlines(), changed.splitlines()
    return "\n".join(unified_diff(before, after, entries.path, title, lineterm="", n=0))
