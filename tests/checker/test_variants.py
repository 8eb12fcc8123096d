"""Further programs of one model, for other lengths and batches, are proven as the first one is, and read the weights where it
stores them."""

from __future__ import annotations

import re
from functools import cache

import pytest
from support.plans.forced_plans import bundled_graph, forced_search

from autopar.capture.models import load_model
from autopar.checker.certificate import certify
from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate
from autopar.ir.plan_file.plan_file import Plan
from autopar.plan_inputs import registry
from autopar.planning import make_plan
from autopar.program import build
from autopar.program.build import check_proof, program_text
from autopar.variants.planner import plan_variant

CLUSTER = "local:4"


@cache
def first(name: str, force: str) -> Plan:
    loaded = load_model(name, 16)
    assert isinstance(loaded.example_inputs, dict)
    return make_plan(loaded.model, CLUSTER, loaded.example_inputs, force=force, graph=bundled_graph(name, 16))


def variant(name: str, force: str, batch: int, length: int) -> tuple[Graph, Candidate]:
    return plan_variant(bundled_graph(name, batch, length), first(name, force), Cluster.parse(CLUSTER), registry())


@pytest.mark.parametrize(
    ("name", "force"),
    [("gpt2-tiny", "dp=2,tp=2"), *(pytest.param(*each, marks=pytest.mark.slow) for each in (
        ("llama-tiny", "dp=4,zero=3"), ("llama-tiny", "pp=2,dp=2"), ("mixtral-tiny", "dp=2,ep=2")))],
)  # fmt: skip
@pytest.mark.parametrize(("batch", "length"), [(16, 24), (8, 16), (7, 16), (1, 16)])
def test_other_lengths_and_batches(name: str, force: str, batch: int, length: int) -> None:
    plan, further = first(name, force), variant(name, force, batch, length)
    beside = program_text(plan.graph, plan.candidate)
    uneven = further[1].batch % further[1].mesh.size_of("dp") != 0
    found = certify(program_text(*further, uneven=uneven), *further, first=beside)
    assert found.holds, found.line()
    assert any("all ranks run this program" in says for _, says in found.assumptions)
    assert any("or one less" in says for _, says in found.assumptions) == uneven
    check_proof(plan, further, uneven, required=True)


def test_examples_of_uneven_shards_where_there_are_none() -> None:
    """Only programs for uneven shards are told how many examples their rank has."""
    plan = first("gpt2-tiny", "dp=2,tp=2")
    text = program_text(plan.graph, plan.candidate)
    wrong = re.sub(r"B = \w+\.shape\[0\]", "B = self.mesh.own_examples", text, count=1)
    assert wrong != text and not certify(wrong, plan.graph, plan.candidate).holds


def test_weights_that_lie_elsewhere() -> None:
    """The same program stored in another way is right by itself, and wrong on the weights of the first."""
    further = variant("gpt2-tiny", "dp=2,tp=2", 16, 24)
    other = forced_search(bundled_graph("gpt2-tiny", 16), "dp=4", cluster=Cluster.parse(CLUSTER))
    text = program_text(*further)
    elsewhere = program_text(other.graph, other.candidate)
    found = certify(text, *further, first=elsewhere)
    assert certify(text, *further).holds and not found.holds
    assert "is stored with places" in found.line()


def test_what_is_not_proven_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a warning, or an error where a proof is required; also where it is the checker that fails."""
    plan = first("gpt2-tiny", "dp=2,tp=2")
    wrong = re.sub(r"B = \w+\.shape\[0\]", "B = self.mesh.own_examples", program_text(plan.graph, plan.candidate), count=1)
    monkeypatch.setattr(build, "program_text", lambda *_, **__: wrong)
    with pytest.warns(UserWarning, match=r"GPT2LMHeadModel is not proven \(line \d+\): .* `autopar verify` compares them"):
        check_proof(plan, required=False)
    with pytest.raises(PlanError, match="not proven .*; run it without proof=True, and report this line"):
        check_proof(plan, required=True)
    monkeypatch.setattr(build, "why_not_proven", lambda *_, **__: 1 / 0)
    with pytest.warns(UserWarning, match="not proven: ZeroDivisionError in the checker"):
        check_proof(plan, required=False)
    with pytest.raises(ZeroDivisionError):
        check_proof(plan, required=True)
