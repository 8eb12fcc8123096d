"""YAML files of clusters: the presets, and the units in keys (``memory_gib`` in a file is `memory_bytes` in the code)."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from autopar.errors import ClusterError
from autopar.files import read_text

GIB = 1024**3
_UNITS = {
    "_tflops": (1e12, ""),
    "_gib": (GIB, "_bytes"),
    "_mib": (1024**2, "_bytes"),
    "_gb_per_second": (1e9, "_bytes_per_second"),
    "_us": (1e-6, "_seconds"),
}
"""Ending of a key: factor, and the ending of the same key in the code's units."""


_LARGEST = 1e18
"""The largest figure, in the units of a file; all those of a cluster are far below it."""


def preset_path(name: str) -> Path:
    return Path(__file__).parent / "presets" / f"{name}.yaml"


@lru_cache(maxsize=1)
def presets() -> tuple[str, ...]:
    """Return the bundled cluster names, to be followed by ``:nodes`` (``local``: by ``:processes``)."""
    return tuple(sorted(path.stem for path in preset_path("any").parent.glob("*.yaml")))


def nonnegative(value: object, key: str) -> float:
    """Return a finite number of at least 0; ValueError names the key."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= _LARGEST:
        shown = repr(value)[:40] if isinstance(value, str) else str(value)[:40]
        raise ValueError(f"{key} is {shown}: write a number of at least 0, at most {_LARGEST:g}")
    return float(value)


def in_code_units(data: Any, path: str = "") -> Any:
    """Convert human units in keys (``memory_gib: 80``) to those of the code (``memory_bytes``). ValueError names the key."""
    if isinstance(data, list):
        return [in_code_units(item, f"{path}[{index}]") for index, item in enumerate(data)]
    if not isinstance(data, dict):
        return data
    out: dict[str, Any] = {}
    for key, item in data.items():
        where = f"{path}.{key}" if path else str(key)
        ending = next((ending for ending in _UNITS if str(key).endswith(ending)), None)
        if ending is None:
            out[str(key)] = in_code_units(item, where)
            continue
        factor, spelling = _UNITS[ending]
        name = str(key).removesuffix(ending) + spelling
        if name in data:
            raise ValueError(f"{where} is given twice, also as {name}: take one out")
        if isinstance(item, dict):
            out[name] = {k: nonnegative(v, f"{where}.{k}") * factor for k, v in item.items()}
        else:
            out[name] = nonnegative(item, where) * factor
    return out


_HUMAN = {
    "peak": "_tflops", "measured_peak": "_tflops",
    "memory_bytes": "_gib", "base_bytes": "_gib", "held_bytes": "_gib", "capacity_bytes": "_gib",
}  # fmt: skip


def _ending(key: str) -> str:
    """Return what `key` of the code ends with in human units; empty where it has none."""
    endings = {"_bytes_per_second": "_gb_per_second", "_seconds": "_us", "_bytes": "_mib"}
    return _HUMAN.get(key) or next((human for ending, human in endings.items() if key.endswith(ending)), "")


def human_key(key: str) -> str:
    """Return the key in human units: ``memory_gib`` for ``memory_bytes``."""
    ending = _ending(key)
    return key.removesuffix(_UNITS[ending][1]) + ending if ending else key


def in_human_units(data: Any) -> Any:
    """Convert to human units, the inverse of `in_code_units`, to six digits; nothing that is empty, None, or an optional zero."""
    if isinstance(data, list | tuple):
        return [in_human_units(item) for item in data]
    if not isinstance(data, dict):
        return data
    out: dict[str, Any] = {}
    for key, item in data.items():
        ending = _ending(key)
        if not item and item is not False and key not in _KEPT:
            continue
        factor, spelling = _UNITS.get(ending, (1, ""))
        name = key.removesuffix(spelling) + ending if ending else key
        if ending and isinstance(item, dict):
            out[name] = {k: float(f"{v / factor:.6g}") for k, v in item.items()}
        else:
            out[name] = float(f"{item / factor:.6g}") if ending else in_human_units(item)
    return out


_KEPT = ("launch_seconds", "latency_seconds", "base_bytes", "communicator_bytes")
"""Written even where they are 0."""


@lru_cache(maxsize=1)
def _fabrics() -> dict[str, Any]:
    return read_yaml(Path(__file__).parent / "fabrics.yaml")


def _with_fabric(link: dict[str, Any]) -> dict[str, Any]:
    """Lay a link over the network that it names as `fabric`. ValueError where the name is unknown."""
    name = link.get("fabric")
    if name is None:
        return link
    if not isinstance(name, str) or name not in _fabrics():
        raise ValueError(f"links has fabric {str(name)[:40]!r}: write one of {', '.join(_fabrics())}")
    return _with_fabric(_fabrics()[name]) | {key: value for key, value in link.items() if key != "fabric"}


def with_base(data: dict[str, Any]) -> dict[str, Any]:
    """Lay a file's content over that of the preset that it names as `like`: keys of a device, host or NVMe one by one, links as
    a whole, in which a name stands for the preset's link, and `fabric` for a network. ValueError where a name is unknown."""
    if isinstance(links := data.get("links"), list):
        data["links"] = [_with_fabric(link) if isinstance(link, dict) else link for link in links]
    if "like" not in data:
        return data
    base = data.pop("like")
    if base not in presets() or base == "local":
        raise ValueError(f"like is {base!r}: write one of {', '.join(name for name in presets() if name != 'local')}")
    merged = with_base(read_yaml(preset_path(str(base))))
    links = {link["name"]: link for link in merged["links"]}
    for key, value in data.items():
        if key == "links" and isinstance(value, list):
            if unknown := [link for link in value if isinstance(link, str) and link not in links]:
                raise ValueError(f"links has {unknown[0]!r}: write a link, or the name of one of {base}: {', '.join(links)}")
            value = [links[link] if isinstance(link, str) else link for link in value]
        elif isinstance(value, dict) and isinstance(merged.get(key), dict):
            value = merged[key] | value
        merged[key] = value
    return merged


SAFE_LOADER: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""libyaml reads in a tenth of the time of Python; each rank reads the cluster twice before its first step."""
_MOST_CHARACTERS = 30_000
_DEEPEST = 30
"""Limits of a cluster file. Aliases could make a small one large beyond all memory, and nesting takes PyYAML long."""


def _check_tokens(text: str, path: Path) -> None:
    depth = 0
    for token in yaml.scan(text, Loader=SAFE_LOADER):
        if isinstance(token, yaml.AliasToken):
            raise ClusterError(f"cluster file {path}: write it without aliases (*name)")
        depth += isinstance(token, _OPENS) - isinstance(token, _CLOSES)
        if depth > _DEEPEST:
            raise ClusterError(f"cluster file {path} is nested too deeply: `autopar calibrate` writes one to begin with")


_OPENS = (yaml.BlockSequenceStartToken, yaml.BlockMappingStartToken, yaml.FlowSequenceStartToken, yaml.FlowMappingStartToken)
_CLOSES = (yaml.BlockEndToken, yaml.FlowSequenceEndToken, yaml.FlowMappingEndToken)


def read_yaml(path: Path) -> dict[str, Any]:
    """Return the file's content in the code's units. ClusterError names file and fault."""
    try:
        text = read_text(path, ClusterError, "cluster file", 4 * _MOST_CHARACTERS)
        if len(text) > _MOST_CHARACTERS:
            raise ClusterError(f"cluster file {path}: write it in at most {_MOST_CHARACTERS} characters")
        _check_tokens(text, path)
        data = yaml.load(text, Loader=SAFE_LOADER)
    except yaml.YAMLError as error:
        where = f" in line {mark.line + 1}" if (mark := getattr(error, "problem_mark", None)) else ""
        fault = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise ClusterError(
            f"cluster file {path} is not YAML{where}: {fault}; `autopar calibrate` writes one to begin with"
        ) from None
    except (ValueError, AttributeError, TypeError, OverflowError) as error:  # of PyYAML, for a value that its tag cannot be
        raise ClusterError(f"cluster file {path} has a value that is none: {str(error)[:100]}; correct it") from None
    if not isinstance(data, dict):
        raise ClusterError(f"cluster file {path}: expected keys name, device, links and size; `autopar calibrate` writes one")
    data.pop("source", None)
    try:
        content: dict[str, Any] = in_code_units(data)
    except ValueError as error:
        raise ClusterError(f"cluster file {path}: {error}") from None
    return content
