"""Files of schedulers start torchrun on the nodes of a plan's cluster: their structure, and their schedulers' own schemas where
those lie (`SCHEMAS` below says how to get them)."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from torch import nn, zeros

import autopar
from autopar.cli import main
from autopar.cost_models.hardware.cluster import Cluster
from autopar.cost_models.hardware.cluster_file import presets
from autopar.errors import AutoparError
from autopar.launch.job import WRITERS, Launch, accelerator, job_of, node_devices, writer_named

SCHEMAS = (
    "pip install --target ../schedulers skypilot kubernetes-validate jsonschema, copy kubeflow.org_pytorchjobs.yaml (Kubeflow's "
    "training operator) and trainer.kubeflow.org_trainjobs.yaml (its Trainer) there, and set AUTOPAR_SCHEDULERS to that folder"
)
FOLDER = Path(os.environ.get("AUTOPAR_SCHEDULERS", "/nonexistent"))

JOBS = {
    "one node": ("dgx-h100:1", 1, 8),
    "sixteen": ("dgx-h100:16", 16, 8),
    "a rack of trays": ("gb200-nvl72:18", 18, 4),
    "amd": ("mi300x:2", 2, 8),
    "cpu": ("local:4", 1, 4),
}


def job(name: str) -> Launch:
    script = ("my train.py", "--data", "it's")
    return job_of(Cluster.parse(JOBS[name][0]), "Llama 3 8B", script, image="registry.example/train:1")


def documents(name: str, scheduler: str) -> dict[str, list[dict[str, Any]]]:
    files = writer_named(scheduler)(job(name))
    return {file: list(yaml.safe_load_all(text)) for file, text in files.items()}


@pytest.mark.parametrize("name", JOBS)
def test_nodes_and_devices_are_those_of_the_cluster(name: str) -> None:
    _, nodes, devices = JOBS[name]
    assert (job(name).nodes, job(name).devices) == (nodes, devices)
    assert re.fullmatch(r"[a-z]([a-z0-9-]{0,50}[a-z0-9])?", job(name).name)


def test_every_preset_has_whole_nodes() -> None:
    for preset in presets():
        cluster = Cluster.parse(f"{preset}:2")
        assert cluster.size % node_devices(cluster) == 0, preset


@pytest.mark.parametrize("name", JOBS)
def test_slurm(name: str, tmp_path: Path) -> None:
    """The shell reads it, the directives are Slurm's, and each node starts its part: with `srun` and `scontrol` played."""
    text = writer_named("slurm")(job(name))["job.slurm"]
    path = tmp_path / "job.slurm"
    path.write_text(text)
    subprocess.run(["bash", "-n", str(path)], check=True)
    lines = text.splitlines()
    directives = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH")]
    assert lines[0].startswith("#!") and lines[1].startswith("#SBATCH"), "directives stand before the first command"
    options = dict(each.partition("=")[::2] for each in directives)
    assert set(options) <= SBATCH and options["nodes"] == str(job(name).nodes) and options["ntasks-per-node"] == "1"
    folder = tmp_path / "bin"
    folder.mkdir()
    node = job(name).nodes - 1
    for program, body in {
        "scontrol": f"for i in $(seq 0 {node}); do echo host$i; done",
        "srun": f'shift; SLURM_NODEID={node} exec "$@"',
        "torchrun": 'printf "%s\\n" "$@" "OMP=$OMP_NUM_THREADS"',
    }.items():
        (folder / program).write_text(f"#!/bin/bash\n{body}\n")
        (folder / program).chmod(0o755)
    env = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "1234567", "SLURM_JOB_NODELIST": "host[0-1]"}
    said = subprocess.run(["bash", str(path)], env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said == [
        "--nnodes", str(job(name).nodes), "--nproc-per-node", str(job(name).devices), "--node-rank", str(node),
        "--master-addr", "host0", "--master-port", "24567", "my train.py", "--data", "it's", "OMP=1",
    ]  # fmt: skip


SBATCH = {"job-name", "nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task", "exclusive", "output"}
"""Of the options of sbatch, those that we write."""


@pytest.mark.parametrize("name", JOBS)
def test_kubernetes(name: str) -> None:
    service, batch = documents(name, "kubernetes")["kubernetes.yaml"]
    spec, pod = batch["spec"], batch["spec"]["template"]["spec"]
    assert spec["completions"] == spec["parallelism"] == job(name).nodes and spec["completionMode"] == "Indexed"
    assert service["spec"]["clusterIP"] == "None" and service["metadata"]["name"] == pod["subdomain"] == batch["metadata"]["name"]
    assert service["spec"]["selector"] == {"job-name": batch["metadata"]["name"]}
    (container,) = pod["containers"]
    ((resource, count),) = container["resources"]["limits"].items()
    assert count == job(name).devices and resource == {"amd": "amd.com/gpu", "cpu": "cpu"}.get(name, "nvidia.com/gpu")
    assert container["command"][-3:] == list(job(name).script)
    words = shlex.split(container["command"][2])
    assert f"{batch['metadata']['name']}-0.{pod['subdomain']}" in words and "$JOB_COMPLETION_INDEX" in words


@pytest.mark.parametrize("name", JOBS)
def test_kubeflow(name: str) -> None:
    files = documents(name, "kubeflow")
    (pytorch,), (train,) = files["pytorchjob.yaml"], files["trainjob.yaml"]
    replicas = pytorch["spec"]["pytorchReplicaSpecs"]
    assert sum(each["replicas"] for each in replicas.values()) == train["spec"]["trainer"]["numNodes"] == job(name).nodes
    assert pytorch["spec"]["nprocPerNode"] == str(train["spec"]["trainer"]["numProcPerNode"]) == str(job(name).devices)
    assert replicas["Master"]["replicas"] == 1
    for each in replicas.values():
        assert [container["name"] for container in each["template"]["spec"]["containers"]] == ["pytorch"]


@pytest.mark.parametrize("name", JOBS)
def test_skypilot(name: str) -> None:
    (task,) = documents(name, "skypilot")["skypilot.yaml"]
    assert task["num_nodes"] == job(name).nodes and task["envs"]["OMP_NUM_THREADS"] == "1"
    env = {"PATH": "/usr/bin:/bin", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2", "SKYPILOT_NODE_RANK": "0"}
    text = task["run"].replace("exec torchrun", "printf '%s\\n'")
    said = subprocess.run(["bash", "-c", text], env=env, capture_output=True, text=True, check=True).stdout.splitlines()
    assert said[-5:] == ["--master-port", "29500", *job(name).script] and "10.0.0.1" in said


def test_accelerators_have_the_names_of_skypilot() -> None:
    names = {"dgx-h100": "H100", "dgx-a100": "A100-80GB", "dgx-a100-40": "A100", "rtx-4090": "RTX4090", "l40s": "L40S",
             "dgx-v100": "V100-32GB", "gh200": "GH200", "rtx-a6000": "RTXA6000"}  # fmt: skip
    for preset, name in names.items():
        assert accelerator(job_of(Cluster.parse(f"{preset}:1"), "net", ("train.py",))) == name


def test_what_cannot_be_is_a_line() -> None:
    cluster = Cluster.parse("dgx-h100:2")
    with pytest.raises(AutoparError, match="--devices-per-node"):
        job_of(cluster, "net", ("train.py",), devices=3)
    with pytest.raises(AutoparError, match="by --image"):
        writer_named("kubernetes")(job_of(cluster, "net", ("train.py",)))
    with pytest.raises(AutoparError, match="several kinds"):
        job_of(Cluster.parse("dgx-h100:1+dgx-a100:1"), "net", ("train.py",))
    with pytest.raises(AutoparError, match="slurm, kubernetes, kubeflow, skypilot"):
        writer_named("pbs")
    with pytest.raises(AutoparError, match="printable"):
        job_of(cluster, "net", ("train.py\n#SBATCH --wrap=x",))


def test_the_command_writes_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = autopar.plan(nn.Linear(4, 4), "dgx-h100:1", (zeros(8, 4),), force="dp=8")
    plan.save(tmp_path / "plan.json")
    words = [
        "launch",
        str(tmp_path / "plan.json"),
        "-o",
        str(tmp_path / "out"),
        "--image",
        "train:1",
        "--script",
        "go.py --lr '3 4'",
    ]
    for scheduler in WRITERS:
        assert main([*words, "--for", scheduler, "--json"]) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["devices_per_node"] == 8 and said["nodes"] == 1
        for name, text in said["files"].items():
            assert (tmp_path / "out" / name).read_text() == text and "3 4" in text
    assert main([*words, "--for", "pbs"]) == 2
    assert "no such scheduler" in capsys.readouterr().err


# -- the schedulers' own schemas


def accepted(files: Any, code: str) -> None:
    """Run `code` on `files` in a process of its own, which has the packages of the schedulers and none of ours."""
    if not FOLDER.exists():
        pytest.skip(f"no schemas: {SCHEMAS}")
    done = subprocess.run(
        [sys.executable, "-c", f"import json, sys; files = json.load(sys.stdin)\n{code}"],
        input=json.dumps(files), env={**os.environ, "PYTHONPATH": str(FOLDER)}, capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]


def refuse_unknown(schema: Any) -> Any:
    """The schema as a strict server reads it: what it does not name is an error."""
    if isinstance(schema, list):
        return [refuse_unknown(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    out = {key: refuse_unknown(each) for key, each in schema.items()}
    if isinstance(out.get("properties"), dict) and "additionalProperties" not in out and out.get("type") == "object":
        out["additionalProperties"] = bool(out.get("x-kubernetes-preserve-unknown-fields"))
    return out


def test_kubernetes_by_its_schema() -> None:
    files = [each for name in JOBS for each in documents(name, "kubernetes")["kubernetes.yaml"]]
    accepted(
        files,
        "import kubernetes_validate as k8s\n"
        "for each in files: k8s.validate(each, k8s.latest_version(), strict=True)\n"
        "files[1]['spec']['typo'] = 1\n"
        "try: k8s.validate(files[1], k8s.latest_version(), strict=True)\n"
        "except k8s.ValidationError: pass\n"
        "else: raise SystemExit('a typo was taken')",
    )


@pytest.mark.parametrize("kind", ["kubeflow.org_pytorchjobs", "trainer.kubeflow.org_trainjobs"])
def test_kubeflow_by_its_definitions(kind: str) -> None:
    path = FOLDER / f"{kind}.yaml"
    if not path.exists():
        pytest.skip(f"no {path}: {SCHEMAS}")
    definition = yaml.safe_load(path.read_text())["spec"]
    files = [each for name in JOBS for (each,) in documents(name, "kubeflow").values()]
    files = [each for each in files if each["kind"] == definition["names"]["kind"]]
    versions = {f"{definition['group']}/{each['name']}": each for each in definition["versions"]}
    schema = refuse_unknown(versions[files[0]["apiVersion"]]["schema"]["openAPIV3Schema"])
    schema["properties"]["metadata"] = {"type": "object"}
    accepted(
        [schema, files],
        "import jsonschema\n"
        "schema, files = files\n"
        "for each in files: jsonschema.validate(each, schema)\n"
        "files[0]['spec']['typo'] = 1\n"
        "try: jsonschema.validate(files[0], schema)\n"
        "except jsonschema.ValidationError: pass\n"
        "else: raise SystemExit('a typo was taken')",
    )


def test_skypilot_by_its_schema() -> None:
    accepted(
        [documents(name, "skypilot")["skypilot.yaml"][0] for name in JOBS],
        "import jsonschema\n"
        "from sky.utils import schemas\n"
        "for each in files:\n"
        "    jsonschema.validate(each, schemas.get_task_schema())\n"
        "    jsonschema.validate(each['resources'], schemas.get_resources_schema())\n",
    )
