"""One call of a solver through OR-tools, which only this file knows: a `LinearModel` in, the numbers of its solution out.

MathOpt's core takes and gives protocol buffers. Its Python layer makes objects of all that comes back, dual values, reduced
costs and the basis too: a third of the time of the search went there.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, Literal

import numpy
from ortools.math_opt import callback_pb2, model_parameters_pb2, model_pb2, parameters_pb2, result_pb2, solution_pb2
from ortools.math_opt.core.python import solver as math_opt

from autopar.solve.ilp.linear_model import LinearModel, Outcome, Status

SolverName = Literal["highs", "scip", "glop"]

_KINDS = {"highs": "SOLVER_TYPE_HIGHS", "scip": "SOLVER_TYPE_GSCIP", "glop": "SOLVER_TYPE_GLOP"}

_ONE_THREAD = {"threads": 1}
"""HiGHS takes half of the cores otherwise, in threads that a forked copy of this process has not and would wait for."""

_LONGEST_SECONDS = 1e6
"""A protocol buffer of a duration takes no infinity."""

_INFEASIBLE = (result_pb2.TERMINATION_REASON_INFEASIBLE, result_pb2.TERMINATION_REASON_INFEASIBLE_OR_UNBOUNDED)


def call_solver(
    model: LinearModel,
    solver: SolverName,
    relaxed: bool,
    relative_gap: float,
    nodes: int | None = None,
    time_limit_seconds: float | None = None,
) -> Outcome | None:
    """Minimise the objective of a model; `relaxed` drops integrality. It ends without an optimum at limits: so many `nodes` of an
    integer program (None: no limit), a count that is the same on every machine, and the user's time limit. None where the solver
    gave up for numerical reasons (HiGHS' model status "unknown", which OR-tools reports as an error)."""
    parameters = parameters_pb2.SolveParametersProto()
    parameters.highs.int_options.update(_ONE_THREAD)
    if time_limit_seconds is not None:
        parameters.time_limit.FromTimedelta(timedelta(seconds=max(0.05, min(time_limit_seconds, _LONGEST_SECONDS))))
    if relaxed and solver == "highs":
        # its presolve of flows takes longer than the simplex method without it: 11.4 and 6.6 s in all of T5-11B's
        parameters.presolve = parameters_pb2.EMPHASIS_OFF
    if not relaxed:
        parameters.relative_gap_tolerance = relative_gap
        if nodes is not None:
            parameters.node_limit = nodes
    initializer, callbacks = parameters_pb2.SolverInitializerProto(), callback_pb2.CallbackRegistrationProto()
    kind = getattr(parameters_pb2, _KINDS[solver])
    arguments = _proto(model, relaxed), kind, initializer, parameters, _without_duals(), None, callbacks, None, None
    try:
        response = math_opt.solve(*arguments)
    except Exception as error:
        if type(error).__name__ == "StatusNotOk":
            return None
        raise
    return _result(response)


def _without_duals() -> Any:
    """Dual values and reduced costs of no constraint and no variable."""
    out = model_parameters_pb2.ModelSolveParametersProto()
    out.dual_values_filter.filter_by_ids = True
    out.reduced_costs_filter.filter_by_ids = True
    return out


def _result(response: Any) -> Outcome:
    ending = response.termination
    if ending.reason in _INFEASIBLE:
        return Outcome(Status.INFEASIBLE, (), float("inf"), float("inf"))
    bound = ending.objective_bounds.dual_bound if ending.HasField("objective_bounds") else -float("inf")
    primal = response.solutions[0].primal_solution if response.solutions else None
    if primal is None or primal.feasibility_status != solution_pb2.SOLUTION_STATUS_FEASIBLE:
        return Outcome(Status.TIMEOUT, (), float("inf"), bound)
    values, objective = tuple(primal.variable_values.values), primal.objective_value  # ids ascend, as variables do
    status = Status.OPTIMAL if ending.reason == result_pb2.TERMINATION_REASON_OPTIMAL else Status.FEASIBLE
    return Outcome(status, values, objective, min(bound, objective))


def _proto(model: LinearModel, relaxed: bool) -> model_pb2.ModelProto:
    """The model as a protocol buffer, filled from arrays: fifty times faster than one call per term."""
    proto = model_pb2.ModelProto()
    columns, rows = range(model.variables), range(model.constraints)
    proto.variables.ids.extend(columns)
    proto.variables.lower_bounds.extend(model.lower)
    proto.variables.upper_bounds.extend(model.upper)
    proto.variables.integers.extend([False] * model.variables if relaxed else model.integer)
    priced = [column for column in columns if model.cost[column]]
    proto.objective.linear_coefficients.ids.extend(priced)
    proto.objective.linear_coefficients.values.extend(model.cost[column] for column in priced)
    proto.linear_constraints.ids.extend(rows)
    proto.linear_constraints.lower_bounds.extend(model.row_lower)
    proto.linear_constraints.upper_bounds.extend(model.row_upper)
    row = numpy.asarray(model.entry_row, dtype=numpy.int64)
    column = numpy.asarray(model.entry_column, dtype=numpy.int64)
    order = numpy.lexsort((column, row))
    proto.linear_constraint_matrix.row_ids.extend(row[order].tolist())
    proto.linear_constraint_matrix.column_ids.extend(column[order].tolist())
    proto.linear_constraint_matrix.coefficients.extend(numpy.asarray(model.entry_value)[order].tolist())
    return proto
