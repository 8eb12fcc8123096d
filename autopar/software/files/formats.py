"""Readers of configuration files: arguments of a shell script or command line, overrides, TOML, YAML and JSON."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import yaml

from autopar.files import read_text
from autopar.software.files.entries import ConfigError, Entries, Entry, flattened

MOST_BYTES = 2**20
"""More than any configuration that people write."""
MOST_DEPTH = 40
"""Levels of nesting, of brackets and of blanks."""
_LISTS = ("recompute-modules", "compile.components", "components")
"""Arguments that are lists of words, of those that matter here."""


def read_entries(path: str) -> Entries:
    """The entries of a file, by its ending; of others, by what is in it. ConfigError where it cannot be read."""
    text = read_text(path, ConfigError, "the configuration", MOST_BYTES)
    _check_depth(path, text)
    suffix = Path(path).suffix.lower()
    if suffix == ".toml":
        return Entries(path, "toml", text, _toml(path, text))
    if suffix in (".yaml", ".yml"):
        return Entries(path, "yaml", text, _yaml(path, text))
    if suffix == ".json" or text.lstrip()[:1] == "{":
        return Entries(path, "json", text, _json(path, text))
    if re.search(r"(^|\s)--[A-Za-z]", text):
        return Entries(path, "arguments", text, _arguments(path, text))
    if re.search(r"^[+\s]*[A-Za-z_][\w.]*\.[\w.]+\s*=", text, re.M):
        return Entries(path, "overrides", text, _overrides(text))
    raise ConfigError(f"{path}:1: no configuration: write arguments (--key value), overrides (a.b=1), TOML, YAML or JSON")


def _check_depth(path: str, text: str) -> None:
    """ConfigError where brackets nest deeper than any parser should follow."""
    if not text.strip():
        raise ConfigError(f"{path}:1: the file is empty: write a configuration")
    depth = 0
    for number, line in enumerate(text.splitlines(), 1):
        depth += line.count("{") + line.count("[") - line.count("}") - line.count("]")
        opened = max(depth, line.count("[") + line.count("{"))
        if opened > 4 * MOST_DEPTH or len(line) - len(line.lstrip(" ")) > 8 * MOST_DEPTH:
            raise ConfigError(f"{path}:{number}: nested deeper than {MOST_DEPTH} levels: no configuration is, take it apart")


def _toml(path: str, text: str) -> dict[str, Entry]:
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        line = re.search(r"line (\d+)", str(error))
        said = str(error).partition(" (at")[0]
        at = line[1] if line else str(text.count("\n") + 1)
        raise ConfigError(f"{path}:{at}: not TOML: {said}; write key = value below a [section]") from None
    return _with_lines(text, data, r"(?m)^\s*\[+\s*{}\b", r"(?m)^\s*\"?{}\"?\s*=")


def _json(path: str, text: str) -> dict[str, Entry]:
    try:
        data = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f'{path}:{error.lineno}: not JSON: {error.msg}; write "key": value, separated by commas') from None
    except (RecursionError, ValueError) as error:
        raise ConfigError(f"{path}:1: not JSON: {str(error)[:80]}; write an object of keys") from None
    if not isinstance(data, dict):
        raise ConfigError(f'{path}:1: the file is a {type(data).__name__}: write an object of keys, {{"key": value}}')
    return _with_lines(text, data, r'"{}"\s*:', r'"{}"\s*:')


def _with_lines(text: str, data: dict[str, Any], section: str, key: str) -> dict[str, Entry]:
    """The entries with their lines: each part of a key is looked for after the part before it."""
    out = {}
    for name, value in flattened(data):
        at, parts = 0, name.split(".")
        for index, part in enumerate(parts):
            pattern = (section if index < len(parts) - 1 else key).format(re.escape(part))
            found = re.search(pattern, text[at:])
            at += found.start() if found else 0
        out[name] = Entry(value, text.count("\n", 0, at) + 1 + (text[at : at + 1] == "\n"))
    return out


def _yaml(path: str, text: str) -> dict[str, Entry]:
    tab = re.search(r"(?m)^ *\t", text)
    if tab:
        line = text.count("\n", 0, tab.start()) + 1
        raise ConfigError(f"{path}:{line}: a tab before a key: YAML indents with blanks, write two of them")
    out: dict[str, Entry] = {}

    def walk(node: yaml.Node, prefix: str) -> None:
        if not isinstance(node, yaml.MappingNode):
            return
        for key, value in node.value:
            name = f"{prefix}.{key.value}" if prefix else str(key.value)
            if isinstance(value, yaml.MappingNode) and value.value:
                walk(value, name)
            elif isinstance(value, yaml.ScalarNode):
                out[name] = Entry(
                    yaml.safe_load(value.value) if value.style is None and value.value else value.value, key.start_mark.line + 1
                )
            else:
                out[name] = Entry([each.value for each in getattr(value, "value", [])], key.start_mark.line + 1)

    try:
        root = yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        said = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ConfigError(f"{path}:{mark.line + 1 if mark else 1}: not YAML: {said}; write key: value") from None
    except RecursionError:
        raise ConfigError(f"{path}:1: nested too deeply: write keys on at most {MOST_DEPTH} levels") from None
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(f"{path}:1: no keys with values: write key: value, one a line")
    try:
        walk(root, "")
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"{path}:1: not YAML: {str(error).splitlines()[0][:80]}") from None
    return out


_TOKEN = re.compile(r"\"(?:[^\"\\]|\\.)*\"|'[^']*'|[^\s\"'()]+")
_VARIABLE = re.compile(r"\$\{?(\w+)(?::-([^}]*))?\}?")


def _arguments(path: str, text: str) -> dict[str, Entry]:
    """``--key value`` and ``--key=value`` anywhere in a script or command, with the script's own variables put in. Comments do
    not count, and of a key that is there twice the last one does, as for argparse."""
    variables: dict[str, str] = {}
    out: dict[str, Entry] = {}
    waiting = ""
    for number, line in enumerate(text.splitlines(), 1):
        code = re.sub(r"(^|\s)#.*", "", line)
        for name, value in re.findall(r"(?:^|[\s;])(?:export\s+)?(\w+)=([^\s(;]*)", code):
            variables[name] = _expanded(value.strip("\"'"), variables)
        for token in _TOKEN.findall(code):
            token = _expanded(token.strip("\"'"), variables)
            for word in token.split() or [token]:
                if policy := re.fullmatch(r"([a-z]+[-_][a-z]+):([a-z-]+)", word):  # a subcommand of tyro
                    out[policy[1].replace("-", "_")] = Entry(policy[2], number)
                    waiting = ""
                elif word.startswith("--") and len(word) > 2:
                    key, equals, value = word[2:].partition("=")
                    out[key] = Entry(value if equals else "", number)
                    waiting = "" if equals else key
                elif waiting and word not in ("\\", ";", "&&", "|"):
                    before = out[waiting].value
                    out[waiting] = Entry(f"{before} {word}".strip(), out[waiting].line)
                    waiting = waiting if waiting in _LISTS else ""
        waiting = waiting if code.rstrip().endswith("\\") else ""
    if not out:
        raise ConfigError(f"{path}:1: no arguments: write --key value")
    return out


def _expanded(text: str, variables: dict[str, str]) -> str:
    return _VARIABLE.sub(lambda found: variables.get(found[1], found[2] or ""), text)


_OVERRIDE = re.compile(
    r"(?:^|[\s\"'+])(?:cfg\.|config\.)?([A-Za-z_]\w*(?:\.\w+)+|mixed_precision)\s*=(?!=)\s*"
    r"(\[[^\]]*\]|\"[^\"]*\"|'[^']*'|\w+\([^()]*\)|[^\s\"'\\]+)"
)
"""The one key without a section that is a knob: the name of a precision, or a function that gives it."""


def _overrides(text: str) -> dict[str, Entry]:
    """``a.b=1``, one or several a line, as Hydra and Megatron Bridge take them; and ``cfg.a.b = 1`` of a recipe in Python."""
    out: dict[str, Entry] = {}
    for number, line in enumerate(text.splitlines(), 1):
        code = re.sub(r"(^|\s)#.*", "", line)
        for key, value in re.findall(
            _OVERRIDE,
            code,
        ):
            out[key] = Entry(_literal(value), number)
    return out


def _literal(text: str) -> Any:
    plain = text.strip("\"'")
    try:
        return yaml.safe_load(plain) if text == plain else plain
    except yaml.YAMLError:
        return plain
