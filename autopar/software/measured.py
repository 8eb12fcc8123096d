"""What was measured of recipes: ``data/measured_runs.csv``, runs that are shown beside the price of a recipe.

The file is drawn from the table of published runs, which planning does not read
(``python tests/benchmarks/store_measured_runs.py`` writes it again, and a test compares).
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

import msgspec

from autopar.cost_models.hardware.cluster import Cluster
from autopar.decoders.decoder import Architecture

_VOCABULARY = 0.02
"""Vocabularies are padded: they are equal to this share."""


@dataclass(frozen=True, slots=True)
class MeasuredRun:
    """A run of a `recipe` on `devices` of the name `device`, with the sizes of its decoder (as in `Architecture`)."""

    id: str
    software: str
    precision: str
    recipe: str
    device: str
    devices: int
    layers: int
    batch: int
    step_seconds: float
    hidden: int
    seq: int
    ffn: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    gated: bool
    experts: int
    top_k: int
    shared_ffn: int

    @property
    def tokens_per_second_per_device(self) -> float:
        return self.batch * self.seq / self.step_seconds / self.devices

    def is_of(self, decoder: Architecture) -> bool:
        """Whether the run is one of this decoder; key-value heads may be twice as many."""
        names = ("hidden", "seq", "ffn", "heads", "head_dim", "gated", "experts", "top_k", "shared_ffn")
        alike = all(getattr(self, name) == getattr(decoder, name) for name in names)
        heads = max(self.kv_heads, decoder.kv_heads) <= 2 * min(self.kv_heads, decoder.kv_heads)
        return alike and heads and abs(self.vocab - decoder.vocab) <= _VOCABULARY * decoder.vocab


def runs_of(decoder: Architecture, layers: int, cluster: Cluster, batch: int) -> tuple[MeasuredRun, ...]:
    """The runs of a model on a cluster, of every software and precision, those of the same batch first."""
    place = cluster.device.name, cluster.size, layers
    found = [run for run in stored_runs() if (run.device, run.devices, run.layers) == place and run.is_of(decoder)]
    return tuple(sorted(found, key=lambda run: (run.batch != batch, run.step_seconds)))


@lru_cache(maxsize=1)
def stored_runs() -> tuple[MeasuredRun, ...]:
    """All of the file, in the order of the table."""
    text = (files("autopar.software") / "data" / "measured_runs.csv").read_text(encoding="utf-8")
    return msgspec.convert(list(csv.DictReader(text.splitlines())), tuple[MeasuredRun, ...], strict=False)
