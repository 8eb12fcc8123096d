"""``autopar launch``: files for a scheduler that start a program on the cluster of a plan."""

from __future__ import annotations

import argparse

from autopar.cli.console import Console
from autopar.cli.evaluation import cluster_of, with_plan
from autopar.errors import AutoparError
from autopar.files import make_folder, write_whole
from autopar.ir.plan_file.plan_file import Plan


@with_plan
def run(plan: Plan, arguments: argparse.Namespace, console: Console) -> int:
    """Writes the files, and says how to start them."""
    from autopar.launch.job import job_of, writer_named

    write = writer_named(arguments.scheduler)
    cluster = cluster_of(plan)
    if cluster is None:
        raise AutoparError(f"{arguments.plan} does not describe its cluster: plan again with `autopar plan`")
    job = job_of(
        cluster, plan.document.model.name, arguments.script, name=arguments.name, image=arguments.image,
        devices=arguments.devices_per_node,
    )  # fmt: skip
    files = write(job)
    folder = make_folder(arguments.output)
    for name, text in files.items():
        write_whole(folder / name, text)
        console.text(f"written to {folder / name}")
        console.text(next(line.lstrip("# ") for line in text.splitlines() if line.startswith("# ")))
    console.document(
        {"scheduler": arguments.scheduler, "nodes": job.nodes, "devices_per_node": job.devices, "files": dict(files)}
    )
    return 0
