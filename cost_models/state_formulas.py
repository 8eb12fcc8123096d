"""Bytes and seconds of parameters, gradients and optimizer state under ZeRO, as formulas; `state` has the same in plain code."""

from __future__ import annotations

from autopar.cost_models.formulas import Formula

_ZERO = "Rajbhandari et al., arXiv 1910.02054, section 3 and table 1"
_COUNT = (("P", "parameters of one device's model axes"), ("n", "ranks that share one copy of the state"))
_DTYPES = (
    ("compute", "bytes of a parameter in the compute dtype"),
    ("master", "bytes of a parameter in the master's dtype"),
    ("gradient", "bytes of a gradient"),
    ("moments", "bytes of the optimizer's moments of one parameter"),
)


def formulas() -> tuple[Formula, ...]:
    """``state.bytes.zero0`` to ``zero3``: what stands between steps; the paper's table for mixed precision; and seconds."""
    parameters = (*_COUNT, *_DTYPES)
    stored = {0: "master + gradient + moments", 1: "(master + gradient + moments)/n"}
    plain = tuple(
        Formula(
            f"state.bytes.zero{stage}",
            f"P*({stored[min(stage, 1)]})",
            parameters,
            f"{_ZERO}; gradients of ZeRO-1 stand sharded between backward and step, as FSDP2 has them",
            "bytes",
        )
        for stage in range(4)
    )
    mixed = {
        0: "compute + gradient + master + moments",
        1: "compute + gradient + (master + moments)/n",
        2: "compute + (gradient + master + moments)/n",
        3: "(compute + gradient + master + moments)/n",
    }
    paper = tuple(
        Formula(f"state.bytes.mixed.zero{stage}", f"P*({text})", parameters, f"{_ZERO}: 2, 2 and K = 12", "bytes")
        for stage, text in mixed.items()
    )
    return (*plain, *paper, *_seconds())


def _seconds() -> tuple[Formula, ...]:
    return (
        Formula(
            "state.wire",
            "P*(2*compute + gradient)*(1 - 1/n)",
            (*_COUNT, *_DTYPES),
            "arXiv 1910.02054, section 7.2: ZeRO-3 sends weights twice and gradients once (others: all but one of the weights)",
            "bytes that a rank sends in a step",
        ),
        Formula(
            "state.optimizer",
            "P*accesses*master/(shards*bandwidth*streams) + tensors*accesses/2*launch",
            (
                ("P", "trainable parameters of one device's model axes"),
                ("accesses", "times that an element is read or written: 20 for adamw, see `optimizer_named`"),
                ("master", "bytes of a parameter in the master's dtype"),
                ("shards", "ranks over which the state is cut"),
                ("bandwidth", "bytes per second of memory"),
                ("streams", "share of it that streaming kernels reach"),
                ("tensors", "tensors, each with kernels of its own (on a CPU; else 0)"),
                ("launch", "seconds of a pass over a small tensor: `Device.update_seconds`, or a launch"),
            ),
            "torch.optim's foreach implementation: each pass reads and writes memory once",
        ),
    )
