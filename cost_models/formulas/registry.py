"""Every formula of the cost models by name. A module with formulas has a tuple `FORMULAS` and is listed in `_FORMULAS` below."""

from __future__ import annotations

from autopar.cost_models.formulas import collective_formulas, compute_formulas
from autopar.cost_models.formulas.formula import Formula

_FORMULAS = (*collective_formulas.FORMULAS, *compute_formulas.FORMULAS)
_BY_NAME = {each.name: each for each in _FORMULAS}


def formula_names() -> tuple[str, ...]:
    """The names of all formulas."""
    return tuple(_BY_NAME)


def formula(name: str) -> Formula:
    """The formula of that name; KeyError lists near names."""
    try:
        return _BY_NAME[name]
    except KeyError:
        near = [known for known in _BY_NAME if known.startswith(name.partition(".")[0])]
        raise KeyError(f"no formula {name!r}; there are {', '.join(near or _BY_NAME)}") from None
