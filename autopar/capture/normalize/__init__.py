"""Normalizes a flat graph: rewrites it to the operations that rules, cost models and passes know.

Start with the list `REWRITES`: each rewrite is one function from graph to graph. Add a normalization there. Imports `ir` and the
helpers of `capture.flat`.
"""

from __future__ import annotations

from autopar.capture.flat import FlatGraph, drop_dead
from autopar.capture.normalize.attention import grouped_heads, mask_recovery
from autopar.capture.normalize.linear import linears
from autopar.capture.normalize.lookups import bags, dense_gradients, mask_assignments, whole_indices
from autopar.capture.normalize.losses import constant_terms, cross_entropy, full_means, mean_losses, token_log_probs
from autopar.capture.normalize.mathematics import complex_writes, real_products, written_out
from autopar.capture.normalize.random import random_numbers
from autopar.capture.normalize.simplify import (
    broadcasts,
    casts,
    detaches,
    equal_casts,
    factories,
    group_norms,
    no_ops,
    reshapes,
    squeezes,
)
from autopar.capture.normalize.unflatten import unflatten
from autopar.capture.normalize.writes import buffers_as_they_were, copies, filled, result_copies

REWRITES = (
    detaches,
    casts,
    equal_casts,
    copies,
    filled,
    complex_writes,
    reshapes,
    squeezes,
    no_ops,
    group_norms,
    factories,
    random_numbers,
    broadcasts,
    whole_indices,
    mask_assignments,
    drop_dead,
    mask_recovery,
    grouped_heads,
    drop_dead,
    real_products,
    reshapes,
    no_ops,
    written_out,
    bags,
    dense_gradients,
    token_log_probs,
    drop_dead,
    cross_entropy,
    linears,
    mean_losses,
    full_means,
    constant_terms,
    unflatten,
    reshapes,
    no_ops,
    drop_dead,
    result_copies,
    buffers_as_they_were,
)


def normalize(flat: FlatGraph) -> FlatGraph:
    """The graph after all rewrites, in order."""
    for rewrite in REWRITES:
        flat = rewrite(flat)
    return flat
