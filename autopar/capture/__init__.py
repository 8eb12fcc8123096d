"""Captures an unmodified model: `torch.export` of its forward, normalized, with repeated layers folded into one block.

Start with `export`. `tracing` exports the model, `convert` turns the exported program into a flat graph, `normalize` rewrites
it to the operations that rules know, `fold_layers` finds repeated layers. `models` has the bundled models. Imports `ir` and
torch.
"""

from autopar.capture.export import LOSS_OUTSIDE, capture, current_autocast

__all__ = ["LOSS_OUTSIDE", "capture", "current_autocast"]
