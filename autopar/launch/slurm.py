"""A batch script of Slurm: one task a node, which starts torchrun."""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from autopar.launch.job import ENVIRONMENT, Launch


def write_slurm(job: Launch) -> Mapping[str, str]:
    """``job.slurm``, for ``sbatch``."""
    devices = f"--cpus-per-task={job.devices}" if job.kind == "cpu" else f"--gpus-per-node={job.devices}"
    directives = [
        f"--job-name={job.name}", f"--nodes={job.nodes}", "--ntasks-per-node=1", devices, "--exclusive", "--output=%x-%j.out",
    ]  # fmt: skip
    node = f'{job.torchrun} --node-rank "$SLURM_NODEID" --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT"'
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH {directive}" for directive in directives),
        "# sbatch job.slurm; the account, partition and time are yours to add, as in `sbatch --time=24:00:00 job.slurm`",
        "set -euo pipefail",
        *(f"export {name}={shlex.quote(value)}" for name, value in ENVIRONMENT.items()),
        # not `head -n 1`: it ends before scontrol does, which pipefail takes for a failure
        'MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | sed -n 1p)',
        "MASTER_PORT=$((20000 + SLURM_JOB_ID % 10000))  # another one for each job, which may share the first node",
        "export MASTER_ADDR MASTER_PORT",
        f"srun --kill-on-bad-exit=1 bash -c 'exec {node} \"$@\"' torchrun {shlex.join(job.script)}",
    ]
    return {"job.slurm": "\n".join(lines) + "\n"}
