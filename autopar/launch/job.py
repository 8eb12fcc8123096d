"""The job that a scheduler starts (so many nodes, so many processes on each, a script), and the schedulers by name with the files
of each: a batch script of Slurm (one task a node, which starts torchrun); an indexed Job of Kubernetes (a pod a node, with the
headless Service by which pods find the first one); Kubeflow's two forms of a job; a task of SkyPilot, which finds the nodes in a
cloud or on Kubernetes."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import yaml

from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError
from autopar.solve.space.grid import devices_per_node

PORT = 29500
"""The port of the first node, at which ranks meet."""

ENVIRONMENT: Mapping[str, str] = {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
"""One thread a process, as plans are priced and torchrun does by default where there are several; lines of logs at once."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A run of `script` by torchrun on `nodes` nodes of `devices` processes each.

    name: of lower-case letters, digits and hyphens, as Kubernetes has them.
    device: its name, such as ``H100 SXM 80GB``; `kind`: ``cuda`` (ROCm's too) or ``cpu``.
    image: of a container; empty where none was named.
    """

    name: str
    nodes: int
    devices: int
    device: str
    kind: str
    script: tuple[str, ...]
    image: str = ""

    @property
    def torchrun(self) -> str:
        """The command of one node but for its own number and the address of the first one."""
        return f"torchrun --nnodes {self.nodes} --nproc-per-node {self.devices}"

    @property
    def resource(self) -> str:
        """The devices by the name that Kubernetes has for them."""
        if self.kind == "cpu":
            return "cpu"
        return "amd.com/gpu" if self.device.startswith("MI") else "nvidia.com/gpu"

    def require_image(self, scheduler: str) -> None:
        """Raise AutoparError where no image was named."""
        if not self.image:
            raise AutoparError(
                f"--for {scheduler} starts containers: name their image, which has torch, autopar and the script, by --image"
            )


Writer = Callable[[Launch], Mapping[str, str]]
"""From a job to the text of each file by its name."""


def job_of(cluster: Cluster, model: str, script: tuple[str, ...], *, name: str = "", image: str = "", devices: int = 0) -> Launch:
    """Return the job of a plan's cluster. `devices` of a node, where the cluster does not say it (0)."""
    if any(not part.isprintable() for part in (*script, image)):
        raise AutoparError("the script, its arguments and the image have to be printable characters")
    per_node = devices or node_devices(cluster)
    if per_node > cluster.size or cluster.size % per_node:
        raise AutoparError(
            f"{cluster.size} devices are no whole nodes of {per_node}: say how many a node has by --devices-per-node"
        )
    return Launch(
        _label(name or model), cluster.size // per_node, per_node, cluster.device.name, cluster.device.kind, script, image
    )


def node_devices(cluster: Cluster) -> int:
    """The devices of a node: of ``preset:nodes`` by that number (a rack of NVLink is several nodes), else those of the innermost
    links."""
    if len({group.device.name for group in cluster.groups}) > 1:
        raise AutoparError(f"the nodes of {cluster.name} are of several kinds, and a job has one: write it by hand")
    preset = _PRESET.fullmatch(cluster.name)
    if preset and cluster.device.kind != "cpu" and cluster.size % int(preset[1]) == 0:
        return cluster.size // int(preset[1])
    return min(devices_per_node(cluster), cluster.size)


_PRESET = re.compile(r"[\w-]+:([1-9]\d{0,5})", re.ASCII)


def _label(text: str) -> str:
    """A name that Kubernetes takes for hosts too, with the number of a node behind it."""
    label = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")[:40].rstrip("-")
    return label if label[:1].isalpha() else f"train-{label}".rstrip("-")


def yaml_text(head: str, *documents: Mapping[str, object]) -> str:
    """The documents of one YAML file below a comment."""
    return "\n".join(f"# {line}" for line in head.splitlines()) + "\n" + yaml.safe_dump_all(documents, sort_keys=False)


_ACCELERATORS = {"A100 SXM 80GB": "A100-80GB", "V100 SXM2 32GB": "V100-32GB"}
"""SkyPilot's names of devices of which there are several sizes."""

_SKY = "sky launch skypilot.yaml, in the folder of the script, which is copied to the nodes; torch and autopar have to be there"
_KUBECTL = "kubectl apply -f {}; the image has torch, autopar and the script"


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
    return {"kubernetes.yaml": yaml_text(_KUBECTL.format("kubernetes.yaml"), service, batch)}


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


def write_kubeflow(job: Launch) -> Mapping[str, str]:
    """``pytorchjob.yaml``, of the training operator, and ``trainjob.yaml``, of Kubeflow Trainer, either of them for ``kubectl
    apply``. Both tell torchrun where the nodes are by its variables (``PET_NNODES``, ``PET_NODE_RANK``, ...), so that the command
    has no options."""
    job.require_image("kubeflow")
    return {
        "pytorchjob.yaml": yaml_text(_KUBECTL.format("pytorchjob.yaml") + "\nfor the training operator (v1)", _pytorch_job(job)),
        "trainjob.yaml": yaml_text(_KUBECTL.format("trainjob.yaml") + "\nfor Kubeflow Trainer (v2)", _train_job(job)),
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
    return {"skypilot.yaml": yaml_text(_SKY, task)}


def accelerator(job: Launch) -> str:
    """The device by SkyPilot's name: ``H100``, ``A100-80GB``, ``RTX4090``, ``RTXA6000``."""
    words = job.device.split()
    return _ACCELERATORS.get(job.device) or ("".join(words[:2]) if words[0] == "RTX" else words[0])


WRITERS: Mapping[str, Writer] = {
    "slurm": write_slurm, "kubernetes": write_kubernetes, "kubeflow": write_kubeflow, "skypilot": write_skypilot,
}  # fmt: skip


def writer_named(name: str) -> Writer:
    """The writer of a scheduler's files. AutoparError where there is none."""
    if name not in WRITERS:
        raise AutoparError(f"--for {name[:40]}: no such scheduler; write one of {', '.join(WRITERS)}")
    return WRITERS[name]
