"""Seconds and FLOPs of kernels on one device, as formulas of the local shapes; `kernels` has the same in plain code, with its
constants, since a plan prices some hundred thousand of them. Tests hold the two together."""

from __future__ import annotations

from autopar.cost_models.formulas import Formula

_TILES = "NVIDIA, Matrix Multiplication Background User's Guide: tile and wave quantization"
_FLASH = "FlashAttention-2, arXiv 2307.08691, figures 4 to 6"
_SHAPE = (("count", "products"), ("m", "rows"), ("n", "columns"), ("k", "inner dimension"))
_RATE = (("peak", "FLOP/s of the data sheet"), ("fraction", "share of it that large shapes reach"))
_HEADS = (("b", "batch"), ("h", "heads"), ("s", "queries"), ("t", "keys"), ("d", "width of a key"), ("e", "width of a value"))


def formulas() -> tuple[Formula, ...]:
    """Named after what they price."""
    return (*_products(), *_attention(), *_streams())


def _products() -> tuple[Formula, ...]:
    tile = (
        ("rows", "rows of a tile"),
        ("columns", "columns of a tile"),
        ("share", "share of the largest tile's rate that this tile's kernel reaches"),
        ("sms", "multiprocessors"),
        ("inner", "elements of the inner dimension that take as long as a tile's prologue and store"),
    )
    waves = "ceiling(count*ceiling(m/rows)*ceiling(n/columns)/sms)"
    return (
        Formula("compute.product.flops", "2*count*m*n*k", _SHAPE, "a multiply-add is two", "FLOPs"),
        Formula("compute.product.waves", waves, (*_SHAPE, *tile), _TILES, "waves of tiles"),
        Formula(
            "compute.product.efficiency",
            f"share*count*m*n/({waves}*sms*rows*columns)*k/(k + inner)",
            (*_SHAPE, *tile),
            f"{_TILES}; the kernel with the best tile is taken",
            "of the rate of large products",
        ),
        Formula(
            "compute.product",
            "2*count*m*n*k/(peak*fraction*efficiency)",
            (*_SHAPE, *_RATE, ("efficiency", "compute.product.efficiency of the best tile; 1 on a CPU")),
            "Williams, Waterman, Patterson 2009: roofline",
        ),
    )


def _attention() -> tuple[Formula, ...]:
    curve = (
        ("queries", "queries of one rank"),
        ("head", "width of a head"),
        ("a", "width at which half of the rate of endless heads is reached"),
        ("c", "queries at which half of the rate of endless sequences is reached"),
    )
    return (
        Formula(
            "compute.attention.flops",
            "seen*2*b*h*s*t*(d + e)",
            (*_HEADS, ("seen", "share of the scores that is not masked: 1, or 1/2 where causal")),
            "arXiv 2307.08691, section 4.1: products of queries with keys, and of scores with values",
            "FLOPs",
        ),
        Formula(
            "compute.attention.backward_flops",
            "5*forward/2",
            (("forward", "FLOPs of the forward, causal savings included"),),
            "Dao et al., arXiv 2205.14135: the scores again, and the gradients of queries, keys, values and scores",
            "FLOPs",
        ),
        Formula(
            "compute.attention.efficiency",
            "head/(head + a)*(128 + a)/128*queries/(queries + c)",
            curve,
            _FLASH,
            "of the rate of long sequences and heads of 128",
        ),
        Formula(
            "compute.attention",
            "flops/(peak*fraction*efficiency*pass_share)",
            (
                ("flops", "FLOPs of the pass"),
                *_RATE,
                ("efficiency", "compute.attention.efficiency; 1 on a CPU"),
                ("pass_share", "1 forward; backward the share of the forward's rate that it reaches"),
            ),
            _FLASH,
        ),
    )


def _streams() -> tuple[Formula, ...]:
    memory = (("bandwidth", "bytes per second of memory"), ("streams", "share of it that streaming kernels reach"))
    return (
        Formula("compute.stream", "traffic/(bandwidth*streams)", (("traffic", "bytes read and written"), *memory), "data sheet"),
        Formula(
            "compute.operation",
            "Max(arithmetic, traffic/(bandwidth*streams), kernels*launch)",
            (
                ("arithmetic", "seconds of compute.product or compute.attention, 0 for others"),
                ("traffic", "bytes read and written"),
                *memory,
                ("kernels", "kernels of the pass"),
                ("launch", "seconds below which no kernel ends"),
            ),
            "Williams, Waterman, Patterson 2009: roofline, with a floor for launches",
        ),
        Formula(
            "compute.operation.cpu",
            "Max(arithmetic, traffic/(bandwidth*streams) + elements*special) + kernels*launch",
            (
                ("arithmetic", "seconds of compute.product or compute.attention, 0 for others"),
                ("traffic", "bytes read and written"),
                *memory,
                ("elements", "elements of a transcendental function, twice as many in the backward; 0 for other operations"),
                ("special", "seconds of one of them"),
                ("kernels", "kernels of the pass"),
                ("launch", "seconds to start one"),
            ),
            "measured: a CPU starts nothing while it computes, and its transcendental functions are slower than its memory",
        ),
        Formula(
            "transfer.host",
            "moved/rate",
            (("moved", "bytes of what waits on the host"), ("rate", "bytes per second of the host link, of one device")),
            "data sheet of the host link; reading and writing have their own rates",
        ),
    )
