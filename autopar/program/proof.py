"""The proof of a plan's program: its text is written, and judged by the checker."""

from __future__ import annotations

from autopar.checker.certificate import Certificate, certify
from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate
from autopar.ir.plan_file.plan_file import Plan
from autopar.program.build import program_text


def prove_program(plan: Plan) -> Certificate:
    """The certificate of the text that ranks run under a plan."""
    text = program_text(plan.graph, plan.candidate)
    return certify(text, plan.graph, plan.candidate, plan.to_json(), plan.document.optimizer)


def require_proof(plan: Plan, further: tuple[Graph, Candidate] | None = None, uneven: bool = False) -> None:
    """PlanError where the program is not proven equal to the model; or a `further` one, of calls of another kind, which shares
    the weights of the plan's."""
    if further is None:
        certificate = prove_program(plan)
    else:
        text = program_text(*further, uneven=uneven)
        certificate = certify(text, *further, first=program_text(plan.graph, plan.candidate))
    if not certificate.holds:
        raise PlanError(f"the program is {certificate.line()}; run it without proof=True, and report this line")
