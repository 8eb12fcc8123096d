"""A task of SkyPilot, which finds the nodes in a cloud or on Kubernetes."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from autopar.launch.job import ENVIRONMENT, PORT, Launch, yaml_text

_ACCELERATORS = {"A100 SXM 80GB": "A100-80GB", "V100 SXM2 32GB": "V100-32GB"}
"""SkyPilot's names of devices of which there are several sizes."""

_HEAD = "sky launch skypilot.yaml, in the folder of the script, which is copied to the nodes; torch and autopar have to be there"


def write_skypilot(job: Launch) -> Mapping[str, str]:
    """``skypilot.yaml``, for ``sky launch``."""
    first = '"$(echo "$SKYPILOT_NODE_IPS" | sed -n 1p)"'
    node = f'--node-rank "$SKYPILOT_NODE_RANK" --master-addr {first} --master-port {PORT}'
    task: dict[str, Any] = {
        "name": job.name,
        "num_nodes": job.nodes,
        "resources": {"cpus": f"{job.devices}+"} if job.kind == "cpu" else {"accelerators": f"{accelerator(job)}:{job.devices}"},
        "workdir": ".",
        "envs": dict(ENVIRONMENT),
        "run": f"exec {job.torchrun} {node} {shlex.join(job.script)}\n",
    }
    if job.image:
        task["resources"]["image_id"] = f"docker:{job.image}"
    return {"skypilot.yaml": yaml_text(_HEAD, task)}


def accelerator(job: Launch) -> str:
    """The device by SkyPilot's name: ``H100``, ``A100-80GB``, ``RTX4090``, ``RTXA6000``."""
    words = job.device.split()
    return _ACCELERATORS.get(job.device) or ("".join(words[:2]) if words[0] == "RTX" else words[0])
