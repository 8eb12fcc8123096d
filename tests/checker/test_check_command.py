"""``autopar check``, and what it refuses of texts: everything but known operations, names and literals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from support.plans.drawn_candidates import drawn_candidate
from support.plans.forced_plans import bundled_graph

from autopar.checker.certificate import certify
from autopar.cli import main
from autopar.ir.mesh import Axis, Mesh
from autopar.ir.plan import Candidate
from autopar.program.build import program_text

MESH = Mesh((Axis("dp", 2), Axis("tp", 2)))


@pytest.fixture(scope="module")
def program() -> tuple[str, Candidate]:
    candidate = drawn_candidate(bundled_graph("gpt2-tiny"), MESH, 1)
    return program_text(bundled_graph("gpt2-tiny"), candidate), candidate


FORWARD, BLOCK = "    def forward(self, hidden):", "class GPT2Block(BlockModule)"
ODD = {
    "import os": ("import torch\n", "import torch\nimport os\n"),
    "another name of a module": ("import torch.nn.functional as F", "import torch.nn.functional as G"),
    "a call of a builtin": ("wte = ", 'wte = open("/etc/passwd")\n        wte_ = '),
    "an attribute of a module": ("wte = ", "wte = torch.serialization.load\n        wte_ = "),
    "a statement": ("        return ", "        print(1)\n        return "),
    "a branch on a rank": ("        return ", "        if self.mesh.tp.coordinate:\n            wte = 1\n        return "),
    "a decorator": ("class GPT2Block", "@torch.compile\nclass GPT2Block"),
    "a method": (FORWARD, f"    def __init__(self, *args):\n        pass\n\n{FORWARD}"),
    "a class that hides a module": (BLOCK, f"class C(BlockModule):\n    zero = 0\n\n\n{BLOCK}"),
    "an operation that writes": (".unsqueeze(0)", ".unsqueeze_(0)"),
    "an unknown operation": (".unsqueeze(0)", ".item()"),
    "an expression of code": ('mesh_axes = {"dp": 2', 'mesh_axes = {"dp": 1 + 1'),
    "no Python": ("class Program(Base):", "class Program(Base"),
    "another mesh": ('mesh_axes = {"dp": 2', 'mesh_axes = {"dp": 4'),
    "a program that does not train": ("    precision =", "    forward_only = True\n    precision ="),
}  # fmt: skip


@pytest.mark.parametrize("name", ODD)
def test_texts_that_are_refused(name: str, program: tuple[str, Candidate]) -> None:
    text, candidate = program
    old, new = ODD[name]
    assert old in text
    graph = bundled_graph("gpt2-tiny")
    assert certify(text, graph, candidate).holds
    refused = certify(text.replace(old, new, 1), graph, candidate)
    assert not refused.holds and not refused.claims
    assert refused.refused is not None and len(refused.line().splitlines()) == 1


def test_certificates_are_functions_of_their_text(program: tuple[str, Candidate]) -> None:
    text, candidate = program
    graph = bundled_graph("gpt2-tiny")
    first, second = (certify(text, graph, candidate, b"plan").to_json() for _ in range(2))
    assert first == second
    document = json.loads(first)
    assert {each["claim"] for each in document["claims"]} == {
        "gate", "equal", "types", "gradients", "random", "branches", "loss", "order", "state"
    }  # fmt: skip
    assert document["memory_bound_bytes"][0] > 0 and document["graph"]["fingerprint"] == graph.fingerprint


@pytest.mark.slow
def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    main(["plan", "gpt2-tiny", "--cluster", "local:4", "--force", "dp=2,tp=2", "-o", str(plan)])
    assert "proven equal to the model on dp=2 x tp=2" in capsys.readouterr().out
    assert main(["check", str(plan), "-o", str(tmp_path / "certificate.json")]) == 0
    assert json.loads((tmp_path / "certificate.json").read_text())["holds"]
    main(["export", str(plan), str(tmp_path / "out")])
    assert json.loads((tmp_path / "out" / "certificate.json").read_text())["holds"]
    capsys.readouterr()
    assert main(["check", str(tmp_path / "out")]) == 0
    program = tmp_path / "out" / "program.py"
    program.write_text(program.read_text().replace('"I -> R"', '"R -> I"', 1))
    assert main(["check", str(tmp_path / "out")]) == 1
    assert "not proven (line " in capsys.readouterr().out
