"""The schedulers by name."""

from __future__ import annotations

from collections.abc import Mapping

from autopar.errors import AutoparError
from autopar.launch.job import Writer
from autopar.launch.kubeflow import write_kubeflow
from autopar.launch.kubernetes import write_kubernetes
from autopar.launch.skypilot import write_skypilot
from autopar.launch.slurm import write_slurm

WRITERS: Mapping[str, Writer] = {
    "slurm": write_slurm, "kubernetes": write_kubernetes, "kubeflow": write_kubeflow, "skypilot": write_skypilot,
}  # fmt: skip


def writer_named(name: str) -> Writer:
    """The writer of a scheduler's files. AutoparError where there is none."""
    if name not in WRITERS:
        raise AutoparError(f"--for {name[:40]}: no such scheduler; write one of {', '.join(WRITERS)}")
    return WRITERS[name]
