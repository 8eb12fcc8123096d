"""The proof of a plan's program: its text is written, and judged by the checker."""

from __future__ import annotations

from autopar.checker.certificate import Certificate, certify
from autopar.errors import PlanError
from autopar.ir.plan_file.plan_file import Plan
from autopar.program.build import program_text


def prove_program(plan: Plan) -> Certificate:
    """The certificate of the text that ranks run under a plan."""
    text = program_text(plan.graph, plan.candidate)
    return certify(text, plan.graph, plan.candidate, plan.to_json(), plan.document.optimizer)


def require_proof(plan: Plan) -> None:
    """PlanError where the program is not proven equal to the model."""
    certificate = prove_program(plan)
    if not certificate.holds:
        raise PlanError(f"the program is {certificate.line()}; run it without proof=True, and report this line")
