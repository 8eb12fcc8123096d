"""One call of a solver: beside OR-tools' own Python layer, which makes objects of everything that comes back."""

from __future__ import annotations

import random

import numpy
import pytest
from ortools.math_opt import model_parameters_pb2
from ortools.math_opt.python import mathopt

from autopar.solve.ilp import solver, solver_call
from autopar.solve.ilp.linear_model import INFINITY, LinearModel, Outcome, Status
from autopar.solve.ilp.solver import solve


def _model(seed: int, infeasible: bool = False) -> LinearModel:
    """A random covering problem: every row needs at least as much as some of its columns can give."""
    draw, model = random.Random(seed), LinearModel()
    columns = [model.binary() if draw.random() < 0.7 else model.variable(3.0) for _ in range(25)]
    model.minimise({column: draw.uniform(1.0, 2.0) for column in columns})
    for _ in range(15):
        terms = {column: draw.uniform(0.5, 2.0) for column in draw.sample(columns, 6)}
        most = sum(value * model.upper[column] for column, value in terms.items())
        model.row(terms, most * (1.1 if infeasible else 0.4), INFINITY)
    return model


def _by_mathopt(model: LinearModel, relaxed: bool) -> mathopt.SolveResult:
    given = mathopt.Model.from_model_proto(solver_call._proto(model, relaxed))
    parameters = mathopt.SolveParameters(relative_gap_tolerance=None if relaxed else 1e-6)
    return mathopt.solve(given, mathopt.SolverType.HIGHS, params=parameters)


@pytest.mark.parametrize("relaxed", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_numbers_are_those_of_mathopt(seed: int, relaxed: bool) -> None:
    model = _model(seed)
    found, oracle = solve(model, relaxed=relaxed), _by_mathopt(model, relaxed)
    assert found.status is Status.OPTIMAL and oracle.termination.reason is mathopt.TerminationReason.OPTIMAL
    assert found.objective == pytest.approx(oracle.objective_value(), rel=1e-9)
    assert found.values == pytest.approx(tuple(oracle.variable_values().values()), abs=1e-9)
    assert found.bound == pytest.approx(oracle.termination.objective_bounds.dual_bound, rel=1e-9)
    assert len(found.values) == model.variables  # zeros too, in the order of the variables


@pytest.mark.parametrize("seed", range(4))
def test_values_are_a_solution(seed: int) -> None:
    model = _model(seed)
    found = solve(model)
    rows = numpy.zeros(model.constraints)
    numpy.add.at(rows, model.entry_row, numpy.array(model.entry_value) * numpy.array(found.values)[model.entry_column])
    assert (rows >= numpy.array(model.row_lower) - 1e-6).all()
    assert numpy.dot(found.values, model.cost) == pytest.approx(found.objective, rel=1e-9)


@pytest.mark.parametrize("relaxed", [True, False])
@pytest.mark.parametrize("name", ["highs", "scip", "glop"])
def test_infeasible(name: solver_call.SolverName, relaxed: bool) -> None:
    if name == "glop" and not relaxed:
        return
    assert solve(_model(1, infeasible=True), solver=name, relaxed=relaxed).status is Status.INFEASIBLE


def test_no_time_is_no_solution() -> None:
    """A problem that takes longer than the least time limit ends without an error."""
    draw, model = random.Random(3), LinearModel()
    columns = [model.binary() for _ in range(400)]
    model.minimise({column: draw.uniform(1.0, 1.1) for column in columns})
    for _ in range(300):
        model.row({column: float(draw.randint(1, 9)) for column in draw.sample(columns, 80)}, 121.0, INFINITY)
    found = solve(model, time_limit_seconds=0.0)
    assert found.status in (Status.TIMEOUT, Status.FEASIBLE)
    assert found.bound <= found.objective


def test_a_solver_that_gives_up_is_followed_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """OR-tools says so by `StatusNotOk`, as it does of a model with a bound that is no number."""
    broken = _model(0)
    broken.lower[0] = float("nan")
    assert solver_call.call_solver(broken, "highs", True, 1e-6) is None
    original, names = solver_call.call_solver, list[str]()

    def call(model: LinearModel, name: solver_call.SolverName, *rest: object) -> Outcome | None:
        names.append(name)
        return None if name == "highs" else original(model, name, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(solver, "call_solver", call)
    assert solve(_model(0), relaxed=True).objective == pytest.approx(_by_mathopt(_model(0), True).objective_value(), rel=1e-6)
    assert solve(_model(0)).objective == pytest.approx(_by_mathopt(_model(0), False).objective_value(), rel=1e-5)
    assert names == ["highs", "glop", "highs", "scip"]


def test_dual_values_and_reduced_costs_are_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are as many numbers as rows and columns; nobody reads them."""
    answers = []
    original = solver_call.math_opt.solve

    class Watched:
        @staticmethod
        def solve(*given: object) -> object:
            answers.append(original(*given))
            return answers[-1]

    monkeypatch.setattr(solver_call, "math_opt", Watched)
    solve(_model(0), relaxed=True)
    monkeypatch.setattr(solver_call, "_without_duals", model_parameters_pb2.ModelSolveParametersProto)
    solve(_model(0), relaxed=True)
    without, with_duals = (each.solutions[0].dual_solution for each in answers)
    assert not without.dual_values.ids and not without.reduced_costs.ids
    assert len(with_duals.dual_values.ids) == 15 and len(with_duals.reduced_costs.ids) == 25


def test_columns_and_rows_in_bulk_are_those_added_one_by_one() -> None:
    bulk, single = LinearModel(), LinearModel()
    paid, flow = bulk.shares(4, integer=True), bulk.shares(4)
    bulk.row({paid[0]: 1.0, paid[1]: 0.0, paid[2]: 2.0}, 1.0, 3.0)
    bulk.at_least_each(paid, flow)
    assert paid == [single.binary() for _ in paid] and flow == [single.variable(1.0) for _ in flow]
    single.row([(paid[0], 1.0), (paid[2], 2.0)], 1.0, 3.0)
    for more, less in zip(paid, flow, strict=True):
        single.row([(more, 1.0), (less, -1.0)], 0.0, INFINITY)
    assert bulk == single
