"""A mesh from its axes: ``mesh_of(dp=2, tp=4)``, outermost first."""

from __future__ import annotations

from autopar.ir.mesh import Axis, Mesh


def mesh_of(**axes: int) -> Mesh:
    return Mesh(tuple(Axis(name, size) for name, size in axes.items()))
