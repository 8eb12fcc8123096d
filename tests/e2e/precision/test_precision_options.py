"""What is captured for a precision: the model's own dtypes, 16 bits over float32, FSDP2's policy; and autocast."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

from autopar.capture import capture
from autopar.cli.commands.plan import precision_asked
from autopar.cli.parser import build_parser
from autopar.errors import AutoparError
from autopar.ir.graph import Graph
from autopar.ir.plan import Precision
from autopar.precision import compute_dtype_of, precision_of, with_reduction


class Islands(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.up(x.to(self.up.weight.dtype)).float()).square().mean()  # type: ignore[no-any-return]


def dtypes(graph: Graph) -> dict[str, str]:
    return {name: parameter.value.dtype for name, parameter in graph.parameters().items()}


def test_a_model_of_two_dtypes_keeps_both() -> None:
    model = Islands()
    model.up.bfloat16()
    precision = precision_of(None, model)
    assert precision == Precision("bfloat16", "bfloat16") and compute_dtype_of(precision, model) is None
    found = dtypes(capture(model, (torch.randn(4, 8),), compute_dtype=compute_dtype_of(precision, model)))
    assert found["up.weight"] == "bfloat16" and found["norm.weight"] == "float32"
    assert compute_dtype_of(Precision("bfloat16", "float32"), model) == "bfloat16"
    assert compute_dtype_of(Precision(), Islands()) == "float32"


def test_names_and_policies() -> None:
    model, half = Islands(), MixedPrecisionPolicy(torch.float16, torch.float32)
    assert precision_of("fp16", model) == precision_of(half, model) == Precision("float16", "float32")
    assert precision_of(MixedPrecisionPolicy(), model) == Precision()
    narrow = Precision("bfloat16", "float32", reduce="bfloat16")
    assert precision_of(MixedPrecisionPolicy(torch.bfloat16), model) == narrow, "FSDP2 reduces in param_dtype then"
    assert precision_of(MixedPrecisionPolicy(reduce_dtype=torch.bfloat16), model) == Precision(reduce="bfloat16")
    assert with_reduction(Precision("bfloat16"), "bf16") == narrow and with_reduction(narrow, "fp32").reduction == "float32"
    refused = (("mxfp8", "fp8"), ("int8", "fp16"), (MixedPrecisionPolicy(reduce_dtype=torch.int8), "summed|not known"),
               (MixedPrecisionPolicy(output_dtype=torch.bfloat16), "output_dtype"))  # fmt: skip
    for wrong, said in refused:
        with pytest.raises(AutoparError, match=said):
            precision_of(wrong, model)


def test_the_active_autocast_is_captured_unless_told() -> None:
    model, x = Islands(), torch.randn(4, 8)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        active, none = capture(model, (x,)), capture(model, (x,), autocast="")
    told = capture(model, (x,), autocast="bfloat16")
    assert active == told and none == capture(model, (x,)) != told
    assert {n.outputs[0].dtype for b in told.blocks for n in b.nodes if n.op == "aten.linear"} == {"bfloat16"}
    assert set(dtypes(told).values()) == {"float32"}


def test_the_reduce_dtype_of_the_command_line() -> None:
    words = ["plan", "mlp", "--cluster", "local:2", "--dtype", "bf16"]
    said = ([], ["--reduce-dtype", "bf16"], ["--reduce-dtype", "int8"])
    plain, narrow, wrong = (build_parser().parse_args([*words, *more]) for more in said)
    assert precision_asked(plain, Islands()) == Precision("bfloat16", "float32")
    assert precision_asked(narrow, Islands()) == Precision("bfloat16", "float32", reduce="bfloat16")
    with pytest.raises(AutoparError, match="reduce dtype 'int8' is not known: write one of"):
        precision_asked(wrong, Islands())
