"""An indexed Job of Kubernetes, a pod a node, and the headless Service by which pods find the first one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.launch.job import ENVIRONMENT, PORT, Launch, yaml_text

_HEAD = "kubectl apply -f kubernetes.yaml; the image has torch, autopar and the script"


def write_kubernetes(job: Launch) -> Mapping[str, str]:
    """``kubernetes.yaml``, for ``kubectl apply``."""
    job.require_image("kubernetes")
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,  # ranks meet before a pod is ready
            "selector": {"job-name": job.name},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }
    node = f'{job.torchrun} --node-rank "$JOB_COMPLETION_INDEX" --master-addr {job.name}-0.{job.name} --master-port {PORT}'
    command = ["bash", "-c", f'exec {node} "$@"', "torchrun", *job.script]
    batch = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name},
        "spec": {
            "completions": job.nodes,
            "parallelism": job.nodes,
            "completionMode": "Indexed",
            "backoffLimit": 0,  # a rank that fails ends them all: none can go on without it
            "template": {"spec": {"subdomain": job.name, **pod_spec(job, "train", command), "restartPolicy": "Never"}},
        },
    }
    return {"kubernetes.yaml": yaml_text(_HEAD, service, batch)}


def pod_spec(job: Launch, container: str, command: list[str]) -> dict[str, Any]:
    """A pod of one container on one node, with shared memory for loaders and NCCL (a container has 64 MiB by default)."""
    return {
        "containers": [
            {
                "name": container,
                "image": job.image,
                "command": command,
                "env": environment(),
                "resources": {"limits": {job.resource: job.devices}},
                "volumeMounts": [{"name": "shared-memory", "mountPath": "/dev/shm"}],
            }
        ],
        "volumes": [{"name": "shared-memory", "emptyDir": {"medium": "Memory"}}],
    }


def environment() -> list[dict[str, str]]:
    """The variables of every process, as a container has them."""
    return [{"name": name, "value": value} for name, value in ENVIRONMENT.items()]
