"""Shares of a cluster's figures that programs reach, learnt from measured steps: the line ``tuned`` of its file."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import yaml

from autopar.cost_models.hardware.cluster_parser import MOST_FRACTION, parse_dataclass
from autopar.cost_models.hardware.device_specs import Device, Link
from autopar.errors import ClusterError

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
