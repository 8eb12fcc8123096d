"""Every formula of the cost models by name. A module with formulas has a tuple `FORMULAS` and is listed in `FORMULAS` below."""

from __future__ import annotations

from autopar.cost_models.formulas import collective_formulas, compute_formulas
from autopar.cost_models.formulas.formula import Formula

FORMULAS = {each.name: each for each in (*collective_formulas.FORMULAS, *compute_formulas.FORMULAS)}
"""By name."""


def formula(name: str) -> Formula:
    """The formula of that name; KeyError lists near names."""
    try:
        return FORMULAS[name]
    except KeyError:
        near = [known for known in FORMULAS if known.startswith(name.partition(".")[0])]
        raise KeyError(f"no formula {name!r}; there are {', '.join(near or FORMULAS)}") from None
