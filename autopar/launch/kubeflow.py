"""Kubeflow's two forms of a job: PyTorchJob, of the training operator, and TrainJob, of Kubeflow Trainer. Both tell torchrun
where the nodes are by its variables (``PET_NNODES``, ``PET_NODE_RANK``, ...), so that the command has no options.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from autopar.launch.job import Launch, yaml_text
from autopar.launch.kubernetes import environment, pod_spec


def write_kubeflow(job: Launch) -> Mapping[str, str]:
    """``pytorchjob.yaml`` and ``trainjob.yaml``, either of them for ``kubectl apply``."""
    job.require_image("kubeflow")
    head = "kubectl apply -f {}; the image has torch, autopar and the script"
    return {
        "pytorchjob.yaml": yaml_text(head.format("pytorchjob.yaml") + "\nfor the training operator (v1)", _pytorch_job(job)),
        "trainjob.yaml": yaml_text(head.format("trainjob.yaml") + "\nfor Kubeflow Trainer (v2)", _train_job(job)),
    }


def _pytorch_job(job: Launch) -> dict[str, Any]:
    pod = {"spec": pod_spec(job, "pytorch", ["torchrun", *job.script])}  # the operator looks for a container of this name
    replicas = {"Master": 1, "Worker": job.nodes - 1}
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": job.name},
        "spec": {
            "nprocPerNode": str(job.devices),
            "pytorchReplicaSpecs": {
                name: {"replicas": count, "restartPolicy": "Never", "template": pod} for name, count in replicas.items() if count
            },
        },
    }


def _train_job(job: Launch) -> dict[str, Any]:
    return {
        "apiVersion": "trainer.kubeflow.org/v1alpha1",
        "kind": "TrainJob",
        "metadata": {"name": job.name},
        "spec": {
            "runtimeRef": {"name": "torch-distributed"},
            "trainer": {
                "image": job.image,
                "command": ["torchrun", *job.script],
                "env": environment(),
                "numNodes": job.nodes,
                "numProcPerNode": job.devices,
                "resourcesPerNode": {"limits": {job.resource: job.devices}},
            },
        },
    }
