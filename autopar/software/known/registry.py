"""The software that is known, by name."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import AutoparError
from autopar.software.known.accelerate import ACCELERATE
from autopar.software.known.deepspeed import DEEPSPEED
from autopar.software.known.megatron import MEGATRON
from autopar.software.known.torchtitan import TORCHTITAN
from autopar.software.known.transformers import TRANSFORMERS
from autopar.software.record import Software


def known_software() -> Mapping[str, Software]:
    """All of them, in the order in which files are tried."""
    return {each.name: each for each in (TORCHTITAN, MEGATRON, ACCELERATE, TRANSFORMERS, DEEPSPEED)}


def software_named(name: str) -> Software:
    """The software of this name. AutoparError where there is none."""
    found = known_software().get(name)
    if found is None:
        raise AutoparError(f"--for {name[:40]}: write autopar, {', '.join(known_software())}")
    return found
