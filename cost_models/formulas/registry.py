"""Every formula of the cost models by name: those of kernels stand here, those of collectives in `collective_formulas`; a new one
is an entry in one of their tuples."""

from __future__ import annotations

from autopar.cost_models.formulas import collective_formulas
from autopar.cost_models.formulas.formula import Formula

_RATE = (("peak", "FLOP/s of the data sheet"), ("fraction", "share of it that large shapes reach"))
_MEMORY = (
    ("arithmetic", "seconds of compute.product or compute.attention, 0 for others"),
    ("traffic", "bytes read and written"),
    ("bandwidth", "bytes per second of memory"),
    ("streams", "share of it that streaming kernels reach"),
)

KERNELS = (
    Formula(
        "compute.product",
        "2*count*m*n*k/(peak*fraction*efficiency)",
        (
            ("count", "products"),
            ("m", "rows"),
            ("n", "columns"),
            ("k", "inner dimension"),
            *_RATE,
            ("efficiency", "share of the rate of large products that the best tile reaches; 1 on a CPU"),
        ),
        "Williams, Waterman, Patterson 2009: roofline; NVIDIA, Matrix Multiplication Background User's Guide: tiles and waves",
    ),
    Formula(
        "compute.attention",
        "flops/(peak*fraction*efficiency*pass_share)",
        (
            ("flops", "FLOPs of the pass"),
            *_RATE,
            ("efficiency", "share of the rate of long sequences and heads of 128 that this shape reaches; 1 on a CPU"),
            ("pass_share", "1 forward; backward the share of the forward's rate that it reaches"),
        ),
        "FlashAttention-2, arXiv 2307.08691, figures 4 to 6; github.com/Dao-AILab/flash-attention, pull request 2688",
    ),
    Formula(
        "compute.operation",
        "Max(arithmetic, traffic/(bandwidth*streams), kernels*launch)",
        (*_MEMORY, ("kernels", "kernels of the pass"), ("launch", "seconds below which no kernel ends")),
        "Williams, Waterman, Patterson 2009: roofline, with a floor for launches",
    ),
    Formula(
        "compute.operation.cpu",
        "arithmetic + traffic/(bandwidth*streams) + elements*special + kernels*launch",
        (
            *_MEMORY,
            ("elements", "elements of a transcendental function, twice as many in the backward; 0 for other operations"),
            ("special", "seconds of one of them"),
            ("kernels", "kernels of the pass"),
            ("launch", "seconds to start one"),
        ),
        "measured: a CPU starts nothing while it computes, packs the operands of its products before it multiplies (Goto, van de "
        "Geijn 2008), and its transcendental functions are slower than its memory",
    ),
    Formula(
        "compute.fresh_pages",
        "work + fresh/pages",
        (
            ("work", "seconds of compute.operation.cpu"),
            ("fresh", "bytes of new tensors of 32 MiB and more"),
            ("pages", "bytes per second at which the system maps new pages"),
        ),
        "mallopt(3), M_MMAP_THRESHOLD: freed memory of large tensors is not used again; measured",
    ),
)
"""Formulas for the seconds of kernels on one device. compute/kernels.py computes the same in plain code, since a plan prices some
hundred thousand kernels; tests check the two against each other, and `autopar explain --formulas` prints these."""


FORMULAS = {each.name: each for each in (*collective_formulas.FORMULAS, *KERNELS)}
"""By name."""


def formula(name: str) -> Formula:
    """The formula of that name; KeyError lists near names."""
    try:
        return FORMULAS[name]
    except KeyError:
        near = [known for known in FORMULAS if known.startswith(name.partition(".")[0])]
        raise KeyError(f"no formula {name!r}; there are {', '.join(near or FORMULAS)}") from None
