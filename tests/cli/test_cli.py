"""The command line: documents, exit statuses, and one clear line for every bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from support.plans.pipeline_plans import with_candidate

import autopar
from autopar.capture.models import load_model
from autopar.cli import main
from autopar.cli.console import size
from autopar.ir.plan import Pipeline
from autopar.ir.plan_file.document import ClusterInfo
from autopar.plan_inputs import registry
from autopar.verification.differences import tolerance
from autopar.verification.sharding import sharding_force, untested

Run = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """(status, stdout, stderr) of a command."""

    def call(*argv: Any) -> tuple[int, str, str]:
        try:
            status = main([str(word) for word in argv])
        except SystemExit as end:  # argparse
            status = int(end.code or 0)
        said = capsys.readouterr()
        return status, said.out, said.err

    return call


@pytest.fixture(scope="module")
def plan_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of the smallest model, made by the command."""
    path = tmp_path_factory.mktemp("plans") / "plan.json"
    assert main(["plan", "mlp", "--cluster", "local:4", "--batch", "32", "--force", "dp=2,tp=2,zero=3", "-o", str(path)]) == 0
    return path


def test_plan_prints_one_document(run: Run, tmp_path: Path) -> None:
    status, out, err = run("plan", "mlp", "--cluster", "local:2", "--batch", 8, "--force", "pp=1", "--no-cache", "--json")
    assert status == 0
    document = json.loads(out)
    assert document["schema_version"] == 2 and document["model"]["source"] == "mlp"
    assert document["batch"]["global"] == 8
    assert document["predicted"]["step_seconds"] > 0 and document["predicted"]["peak_memory_bytes"] > 0
    assert all(document["baselines"][name]["step_seconds"] > 0 for name in ("ddp", "fsdp"))
    assert document["search"]["status"] in ("OPTIMAL", "FEASIBLE")
    assert "grid: " in err and "OPTIMAL" in err and "gap" in err  # what is solved, and the certificate


def test_force_is_obeyed(plan_file: Path) -> None:
    document = json.loads(plan_file.read_text())
    assert {axis["name"]: axis["size"] for axis in document["mesh"]["axes"]} == {"dp": 2, "tp": 2}
    assert document["parallelism"]["zero"] == 3
    assert set(document["replicated_share"]) >= {"tp"}


@pytest.mark.parametrize("view", [None, "ops", "memory", "comm", "program"])
def test_inspect(run: Run, plan_file: Path, view: str | None) -> None:
    words = ["inspect", plan_file, *([f"--{view}"] if view else [])]
    status, out, _ = run(*words)
    assert status == 0 and out.strip()
    status, out, _ = run(*words, "--json")
    assert status == 0 and isinstance(json.loads(out), dict)
    if view == "program":
        assert "class Program" in json.loads(out)["program"]


def test_inspect_memory_is_the_issues_table(run: Run, plan_file: Path) -> None:
    """Every kind by its name, the sum, and the operation at the peak; the numbers are those of the plan."""
    predicted = json.loads(plan_file.read_text())["predicted"]
    _, out, _ = run("inspect", plan_file, "--memory")
    kinds = [
        "parameters",
        "gradients",
        "optimizer state",
        "saved activations of the micro-batches in flight",
        "all-gathered parameters",
    ]
    kinds += ["temporaries", "communication buffers", "allocator slack", "framework base", "peak"]
    rows = [line.strip() for line in out.splitlines()]
    assert all(any(row.startswith(kind) for row in rows) for kind in kinds)
    document = json.loads(run("inspect", plan_file, "--memory", "--json")[1])
    (stage,) = document["stages"]
    assert stage["memory"] == document["memory"] == predicted["memory"]
    assert stage["peak_bytes"] == sum(stage["memory"].values()) == predicted["peak_memory_bytes"]
    assert document["memory_bytes"] > stage["peak_bytes"]
    assert stage["phase"] in ("forward", "backward") and stage["operation"]
    assert f"the peak is in the {stage['phase']} of" in out and stage["operation"] in out


def test_inspect_memory_of_a_pipeline_shows_every_stage(run: Run, tmp_path: Path) -> None:
    """GPT-2 on two stages; and a plan that does not describe its cluster shows what the file says."""
    loaded = load_model("gpt2-tiny", 8, None)
    plan = autopar.plan(loaded.model, "local:2", loaded.example_inputs, force="dp=2", name="gpt2-tiny")
    mesh = replace(plan.candidate.mesh, axes=tuple(replace(axis, size=1) for axis in plan.candidate.mesh.axes))
    candidate = replace(plan.candidate, mesh=mesh, micro_batches=2, pipeline=Pipeline(2))
    document = plan.document
    path = tmp_path / "plan.json"
    for described in (document.cluster, ClusterInfo(document.cluster.name, document.cluster.devices)):
        with_candidate(plan, candidate, cluster=described, predicted=document.predicted).save(str(path))
        _, out, _ = run("inspect", path, "--memory")
        found = json.loads(run("inspect", path, "--memory", "--json")[1])
        assert ("stage 1" in out) == bool(described.description) == (len(found["stages"]) == 2)
        assert found["memory"] == document.predicted.memory


def test_inspect_comm_counts_the_dtypes_of_state(run: Run, tmp_path: Path) -> None:
    """Parameters are gathered in the compute dtype, gradients reduced in the masters': bfloat16 halves the first only."""
    found = {}
    for dtype in ("float32", "bf16"):
        path = tmp_path / f"{dtype}.json"
        run("plan", "mlp", "--cluster", "local:4", "--batch", 32, "--force", "dp=2,tp=2,zero=3", "--dtype", dtype, "-o", path)
        found[dtype] = json.loads(run("inspect", path, "--comm", "--json")[1])["state"]
    assert found["bf16"] and len(found["bf16"]) == len(found["float32"])
    for half, whole in zip(found["bf16"], found["float32"], strict=True):
        assert half["gradient_bytes"] == whole["gradient_bytes"] == whole["parameter_bytes"] == 2 * half["parameter_bytes"] > 0


def test_the_table_says_what_of_the_memory_may_be_taken(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    _, out, _ = run("plan", "mlp", "--cluster", "local:2", "--batch", 8, "--force", "pp=1", "--memory-margin", 0.25, "-o", path)
    capacity = json.loads(path.read_text())["predicted"]["memory_capacity_bytes"]
    (line,) = [line for line in out.splitlines() if line.strip().startswith("memory")]
    assert f"of {size(capacity)} per device at the peak, margin 25 %: {size(int(0.75 * capacity))} may be taken" in line
    assert "of which a margin of 25 % stays free" in run("inspect", path, "--memory")[1]
    for wrong in ("1", "-0.1", "x"):
        status, _, err = run("plan", "mlp", "--cluster", "local:2", "--memory-margin", wrong)
        assert status == 2 and "is not a share from 0 to below 1" in err and err.count("\n") == 1


SEQUENCE_FIRST = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
    def forward(self, x):
        return self.layer(x).square().sum((0, 2)).mean()
def make():
    return Model(), {"x": torch.randn(8, 8, 4)}
"""


def test_where_inputs_have_the_batch(run: Run, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text(SEQUENCE_FIRST)
    model = f"{tmp_path / 'net.py'}:make"
    for said in ("1", "x=1"):
        status, out, err = run(
            "plan", model, "--cluster", "local:2", "--force", "dp=2", "--batch-dim", said, "--json", "--no-cache"
        )
        assert status == 0, err
        assert json.loads(out)["graph"]["interface"]["arguments"][0]["batch_dim"] == 1
        assert run("doctor", model, "--batch-dim", said)[0] == 0
    for wrong in ("x", "-1", "x=", "1,2", "=1", "²"):
        status, _, err = run("plan", model, "--cluster", "local:2", "--batch-dim", wrong)
        assert status == 2 and len(err.strip().splitlines()) == 1, err


def test_inspect_comm_compares_with_parameter_servers(run: Run, plan_file: Path) -> None:
    """All of a device's gradients in one piece; one server is a bottleneck that the ring does not have."""
    gradients = json.loads(run("inspect", plan_file, "--comm", "--json")[1])["gradients"]
    methods = {each["method"].partition(",")[0]: each for each in gradients}
    assert methods["all-reduce"]["relative"] == 1 < methods["one parameter server"]["relative"]
    assert len({each["bytes"] for each in methods.values()}) == 1
    _, out, _ = run("inspect", plan_file, "--comm")
    assert "one parameter server" in out


@pytest.mark.parametrize("command", ["models", "clusters"])
def test_listing(run: Run, command: str) -> None:
    assert run(command)[0] == 0
    names = {entry["name"] for entry in json.loads(run(command, "--json")[1])[command]}
    expected = {
        "models": {"gpt2", "gpt2-xl", "llama3-8b", "llama3-70b", "llama3-405b", "qwen3-8b", "bert-large", "vit-huge"},
        "clusters": {"dgx-a100", "dgx-h100", "dgx-h200", "dgx-b200", "local"},
    }
    assert expected[command] <= names


def test_export(run: Run, plan_file: Path, tmp_path: Path) -> None:
    status, out, _ = run("export", plan_file, tmp_path / "out", "--json")
    assert status == 0
    assert {"train.py", "plan.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
    assert json.loads(out)["run"].startswith("torchrun --nproc-per-node 4")


@pytest.mark.slow  # the README's own `autopar verify` and the plan below stay
@pytest.mark.usefixtures("forked_ranks")
def test_verify_passes(run: Run) -> None:
    words = ["--force", "tp=2", "--dtype", "float64"]
    status, out, err = run("verify", "convnet", "--cluster", "local:2", "--batch", 8, "--json", *words)
    assert status == 0, err
    assert json.loads(out)["passed"] is True


def test_a_loss_is_compared_within_its_own_dtype() -> None:
    """GPT-2 in float64 still makes a float32 loss, whose parts add up in another order."""
    for dtype, loss in ((torch.float64, 1e-9), (torch.float32, 1e-5)):
        assert tolerance("loss", "float64", dtype) == loss
        assert {tolerance(what, "float64", dtype) for what in ("gradients", "parameters")} == {1e-9}
    assert tolerance("loss", "bfloat16", torch.float32) == 5e-2


@pytest.mark.usefixtures("forked_ranks")
def test_verify_of_a_plan(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    assert run("plan", "mlp", "--cluster", "local:2", "--batch", 32, "--force", "dp=2,zero=3", "-o", path)[0] == 0
    status, out, err = run("verify", "mlp", "--cluster", "local:2", "--plan", path)
    assert status == 0, err
    assert "equal" in out


@pytest.mark.usefixtures("forked_ranks")
def test_verify_of_a_plan_that_shards_nothing(run: Run) -> None:
    """It said *equal*."""
    status, out, err = run("verify", "mlp", "--cluster", "local:1", "--batch", 8)
    assert status == 0, err
    assert "nothing was tested" in out and "take --cluster local:4" in out and "\nequal in" not in out


@pytest.mark.parametrize(("batch", "force"), [(8, "dp=2"), (7, "tp=2")])
def test_what_would_shard_it(batch: int, force: str) -> None:
    loaded = load_model("mlp", batch)
    plan = autopar.plan(loaded.model, "local:2", loaded.example_inputs, force=force, time_limit_seconds=3)
    assert sharding_force(plan.graph, 2, registry()) == force
    assert not untested(plan.graph, plan.candidate, registry())


MODELS = {
    "control": "def forward(self, x):\n        return self.a(x).sum() if x.sum() > 0 else self.a(x).mean()",
    "syntax": "def forward(self, x) return x",
    "plain": "def forward(self, x):\n        return self.a(x).sum()",
}


def factory(folder: Path, kind: str) -> str:
    """A model file of the user's."""
    path = folder / f"{kind}.py"
    path.write_text(
        "import torch\n\nclass Net(torch.nn.Module):\n    def __init__(self):\n        super().__init__()\n"
        f"        self.a = torch.nn.Linear(8, 8)\n\n    {MODELS[kind]}\n\n"
        "def make():\n    return Net(), {'x': torch.randn(8, 8)}\n"
    )
    return f"{path}:make"


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        ([], 2, "COMMAND"),
        (["frobnicate"], 2, "frobnicate"),
        (["plan", "mlp"], 2, "--cluster"),
        (["plan", "mlp", "--cluster", "local:4", "--batch", "0"], 2, "--batch"),
        (["plan", "nonesuch", "--cluster", "local:4"], 2, "nonesuch"),
        (["plan", "missing.json", "--cluster", "local:4"], 2, "missing.json"),
        (["plan", "missing.py:make", "--cluster", "local:4"], 2, "missing.py"),
        (["plan", "FOLDER/plain.py:nothing", "--cluster", "local:4"], 2, "nothing"),
        (["plan", "FOLDER/syntax.py:make", "--cluster", "local:4"], 2, "syntax.py"),
        (["plan", "FOLDER/control.py:make", "--cluster", "local:4"], 2, "control.py:9"),
        (["plan", "mlp", "--cluster", "nowhere:4"], 2, "nowhere"),
        (["plan", "mlp", "--cluster", "local:x"], 2, "local"),
        (["plan", "mlp", "--cluster", "none.yaml"], 2, "none.yaml"),
        (["plan", "mlp", "--cluster", "local:4", "--dtype", "int3"], 2, "int3"),
        (["plan", "mlp", "--cluster", "local:4", "--force", "tp=x"], 2, "tp=x"),
        (["plan", "mlp", "--cluster", "local:4", "--force", "qq=2"], 2, "qq"),
        (["plan", "mlp", "--cluster", "local:4", "--force", "zero=4"], 2, "zero=4"),
        (["plan", "mlp", "--cluster", "local:4", "--force", "tp=3"], 2, "3"),
        (["plan", "mlp", "--cluster", "local:4", "--batch", "6", "--force", "dp=4"], 2, "6"),
        (["plan", "mlp", "--cluster", "local:4", "-o", "/proc/nonesuch/plan.json"], 2, "/proc/nonesuch"),
        (["inspect", "none.json"], 2, "none.json"),
        (["inspect", "FOLDER/truncated.json"], 2, "truncated.json"),
        (["export", "FOLDER/truncated.json", "out"], 2, "truncated.json"),
        (["verify", "mlp", "--cluster", "dgx-h100:1"], 2, "local:4"),
        (["verify", "convnet", "--plan", "FOLDER/plan.json"], 2, "plan"),
        (["verify", "mlp", "--plan", "FOLDER/plan.json", "--batch", "7"], 2, "32"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_bad_input_is_one_line(
    run: Run, tmp_path: Path, plan_file: Path, words: list[str], status: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for kind in MODELS:
        factory(tmp_path, kind)
    (tmp_path / "plan.json").write_bytes(plan_file.read_bytes())
    (tmp_path / "truncated.json").write_bytes(plan_file.read_bytes()[:1000])
    found, out, err = run(*(word.replace("FOLDER", str(tmp_path)) for word in words))
    lines = [line for line in err.splitlines() if line.startswith("autopar: error: ")]
    assert found == status, (out, err)
    assert len(lines) == 1 and said in lines[0] and "Traceback" not in err, err
    assert out == ""


def test_a_model_that_cannot_fit_is_infeasible(run: Run, tmp_path: Path) -> None:
    """On a cluster of two devices of 4 MiB; what is short and what would do are in the line."""
    local = next(entry for entry in json.loads(run("clusters", "--json")[1])["clusters"] if entry["name"] == "local")
    local["links"][-1]["devices"] = 2
    local["device"].update(memory_bytes=4 * 2**20, base_bytes=0)
    (tmp_path / "small.yaml").write_text(yaml.safe_dump({**local, "name": "small", "size": 2}))
    status, out, err = run("plan", "mlp", "--cluster", tmp_path / "small.yaml", "--batch", 512, "--json")
    assert status == 3, err
    assert json.loads(out)["error"]["exit_status"] == 3
    first, *changes = err[err.index("autopar: error: ") :].splitlines()
    assert "short of" in first and any("devices: then" in line for line in changes), err
