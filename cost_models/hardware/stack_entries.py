"""The constants that a training framework reaches on a device generation, at most three each, from ``software_stacks.yaml``; and
which communication it overlaps and how it lays out optimizer state, which are facts of its code (`software_traits`,
``state_layouts.yaml``).

The physics is in the other files; the constants say which share of it a framework's kernels and launches reach. They were fitted
(``tests/benchmarks/fit_stacks.py``) on published runs, never on a single row or source; the YAML says on how many.

`TunedRates` are shares of a cluster's figures that programs reach, learnt from measured steps: the line ``tuned`` of its file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import yaml

from autopar.cost_models.hardware.cluster_file import SAFE_LOADER
from autopar.cost_models.hardware.cluster_parser import MOST_FRACTION, parse_dataclass, parse_overlap, parse_state_layout
from autopar.cost_models.hardware.device_specs import Device, Link
from autopar.cost_models.hardware.software_traits import Overlap, StateLayout
from autopar.errors import ClusterError

CONSTANTS = ("matmul", "memory", "attention", "network")
"""Share of the peak FLOP/s that large matrix products reach, share of the memory bandwidth that streaming kernels reach, share of
the peak that long attention reaches, and the factor on every link's bandwidth. A stack may have three of them; the rest is the
cluster's."""

FIELDS = {"matmul": "matmul_fraction", "memory": "bandwidth_fraction", "attention": "attention_fraction"}
"""The field of a device that each of them replaces."""

MAX_CONSTANTS = 3
DEFAULT_STACK = "autopar"


@dataclass(frozen=True, slots=True)
class SoftwareStack:
    """A software stack on one device generation; `how` tells where its constants come from. `compiled`: those of compiled
    programs, where they have an entry of their own."""

    name: str
    generation: str
    constants: tuple[tuple[str, float], ...]
    how: str
    compiled: bool = False


def _read(file: str) -> Any:
    return yaml.load((Path(__file__).parent / file).read_text(), Loader=SAFE_LOADER)


@lru_cache(maxsize=1)
def software_stacks() -> tuple[tuple[SoftwareStack, ...], Mapping[str, Overlap]]:
    """Return all entries, and what each stack overlaps (a fact of the software, not fitted). ClusterError where an entry has more
    than three constants."""
    data = _read("software_stacks.yaml")
    entries = tuple(_stack(entry) for entry in data["stacks"])
    return entries, {name: parse_overlap(overlap, f"overlap.{name}") for name, overlap in data["overlap"].items()}


@lru_cache(maxsize=1)
def host_launch_seconds() -> Mapping[str, float]:
    """Return the host's seconds for one launch per stack (`launch_us` of the file)."""
    return {name: each * 1e-6 for name, each in _read("software_stacks.yaml")["launch_us"].items()}


@lru_cache(maxsize=1)
def state_layouts() -> Mapping[str, StateLayout]:
    """Return the optimizer state layout per stack, from ``state_layouts.yaml``: facts of its code, nothing of it is fitted."""
    return {name: parse_state_layout(entry, name) for name, entry in _read("state_layouts.yaml").items()}


def _stack(entry: Mapping[str, Any]) -> SoftwareStack:
    constants = tuple((name, float(entry[name])) for name in CONSTANTS if name in entry)
    name = f"{entry['stack']} on {entry['generation']}"
    if len(constants) > MAX_CONSTANTS:
        raise ClusterError(f"software_stacks.yaml: {name} has {len(constants)} constants; at most {MAX_CONSTANTS} are allowed")
    if not entry.get("how"):
        raise ClusterError(f"software_stacks.yaml: {name} does not say how its constants were obtained")
    compiled = bool(entry.get("compiled", False))
    return SoftwareStack(str(entry["stack"]), str(entry["generation"]), constants, str(entry["how"]), compiled)


def stack_for(name: str, generation: str, compiled: bool = False) -> SoftwareStack | None:
    """Return the nearest entry: this stack on this generation, else our own programs there; of two, the one of programs that are
    compiled or not."""
    fit = [stack for stack in software_stacks()[0] if stack.generation == generation and stack.name in (name, DEFAULT_STACK)]
    return max(fit, key=lambda stack: (stack.name == name, stack.compiled == compiled), default=None)


def other_constants(name: str, generation: str, compiled: bool = False) -> str:
    """Say whose constants price a stack that has no entry of its own on a device generation, in words; empty where it has one."""
    nearest = stack_for(name, generation, compiled)
    if nearest is not None and nearest.name == name:
        return ""
    whose = f"those of {nearest.name}" if nearest is not None else "the estimates of the cluster's file"
    return f"no constants of {name or 'an unnamed stack'} on {generation or 'an unknown generation'}: {whose}"


def planner_fractions(generation: str, compiled: bool = False) -> dict[str, float]:
    """Return what our own programs reach on a device generation, as fields of a device; empty where nothing is known of it."""
    stack = stack_for(DEFAULT_STACK, generation, compiled)
    return {FIELDS[name]: share for name, share in stack.constants if name in FIELDS} if stack is not None else {}


_RATES = (
    "matmul_fraction", "attention_fraction", "causal_attention_fraction", "convolution_fraction", "bandwidth_fraction",
    "product_bytes_per_second", "update_bytes_per_second", "fresh_page_bytes_per_second",
)  # fmt: skip
_SECONDS = ("launch_seconds", "host_launch_seconds", "transcendental_seconds", "update_seconds")
_LINE = re.compile(r"^tuned:.*\n?(?:[ \t]+.*\n?)*", re.MULTILINE)
LEAST, MOST = 0.05, 20.0


@dataclass(frozen=True, slots=True)
class TunedRates:
    """Shares that ``autopar tune`` found. `device`: of all rates of the devices, launches among them; `network`: of the bandwidth
    of links (not of collectives that were measured: tables by size stay)."""

    device: float = 1.0
    network: float = 1.0

    def times(self, other: TunedRates) -> TunedRates:
        """Return the shares of one after the other, as far as a file may have them."""
        pairs = ((self.device, other.device), (self.network, other.network))
        return TunedRates(*(min(MOST, max(LEAST, first * second)) for first, second in pairs))

    def of_device(self, device: Device) -> Device:
        """Return the device at its share."""
        return _scaled(device, self.device)

    def of_links(self, links: tuple[Link, ...]) -> tuple[Link, ...]:
        """Return the links at theirs."""
        return tuple(link.scaled(self.network) for link in links)


def _scaled(device: Device, share: float) -> Device:
    rates = {name: getattr(device, name) * share for name in _RATES}
    rates |= {name: min(MOST_FRACTION, rate) for name, rate in rates.items() if name.endswith("_fraction")}
    seconds = {name: getattr(device, name) / share for name in _SECONDS}
    peak = tuple((dtype, rate * share) for dtype, rate in device.measured_peak)
    return replace(device, **rates, **seconds, measured_peak=peak)


def parse_tuned(data: object) -> TunedRates:
    """Read the entry ``tuned`` of a cluster's file; none is whole shares. ClusterError where it is none."""
    if data is None:
        return TunedRates()
    rates: TunedRates = parse_dataclass(TunedRates, data, "tuned", {})
    for name, share in (("device", rates.device), ("network", rates.network)):
        if not LEAST <= share <= MOST:
            raise ClusterError(f"tuned.{name} is {share:g}: write a share from {LEAST:g} to {MOST:g}, 1 where nothing is known")
    return rates


def tuned_of(text: str) -> TunedRates:
    """Return the shares in the text of a cluster's file."""
    return parse_tuned(_mapping(text).get("tuned"))


def with_tuned_line(text: str, rates: TunedRates, how: str) -> str:
    """Return the text of a cluster's file with this line instead of the one that it had, and all else as it was written."""
    line = f"tuned: {{device: {rates.device:.4g}, network: {rates.network:.4g}}}  # {how}\n"
    rest = _LINE.sub("", text)
    out = rest + ("" if rest.endswith("\n") or not rest else "\n") + line
    before = {key: value for key, value in _mapping(text).items() if key != "tuned"}
    if {key: value for key, value in _mapping(out).items() if key != "tuned"} == before and "tuned" in _mapping(out):
        return out
    return yaml.safe_dump(before, sort_keys=False, width=128) + line  # a file in braces, or with an end mark


def _mapping(text: str) -> Mapping[str, Any]:
    try:
        data = yaml.safe_load(text)
    except yaml.YAMLError:
        return {}
    return data if isinstance(data, Mapping) else {}
