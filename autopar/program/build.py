"""The way from a plan to a running program: the one place that lowers a candidate, renders its text and loads it."""

from __future__ import annotations

from types import ModuleType

from autopar.errors import PlanError
from autopar.ir.graph import Graph
from autopar.ir.plan import Candidate
from autopar.passes.lower import lower
from autopar.program.load import load_program
from autopar.program.source import render


def program_text(graph: Graph, candidate: Candidate, *, uneven: bool = False) -> str:
    """The source of the program that trains `graph` as `candidate` says. PlanError where they do not fit each other. `uneven`:
    see `lower`."""
    return render(lower(graph, candidate, uneven=uneven))


def build_program(graph: Graph, candidate: Candidate, *, uneven: bool = False) -> ModuleType:
    """The program as a module: its class ``Program`` takes a `MeshHandle`."""
    text = program_text(graph, candidate, uneven=uneven)
    try:
        return load_program(text)
    except (SyntaxError, RecursionError, MemoryError) as error:  # arguments that are nested too deeply
        raise PlanError(f"the program of this plan is no Python ({str(error)[:80]}): plan the model again") from None
