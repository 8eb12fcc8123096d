"""Adapters on frozen bases in 4 and 8 bits (QLoRA): linear layers of bitsandbytes and torchao, exactly as in one process.

Both packages are optional, and CONTRIBUTING says how the tests get them.
"""

from __future__ import annotations

import copy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.harness.comparison import training_differences
from support.harness.rank_pool import RankPool
from support.harness.training_loop import train
from torch import Tensor, nn

import autopar
from autopar.errors import CaptureError, StateError
from autopar.ops.quantized import with_plain_storage

WIDTH, HIDDEN = 128, 256
SLOW = partial(pytest.param, marks=pytest.mark.slow)


class Mixer(nn.Module):
    """A residual block, of which the layers are alike."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, HIDDEN), nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))  # type: ignore[no-any-return]


class Net(nn.Module):
    """Two of them before a head, with its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(Mixer() for _ in range(2)), nn.Linear(WIDTH, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return nn.functional.mse_loss(self.head(x), y)


def in_4_bits(layer: nn.Linear, **options: Any) -> nn.Module:
    """The layer as bitsandbytes quantizes it."""
    import bitsandbytes as bnb

    made = bnb.nn.Linear4bit(layer.in_features, layer.out_features, layer.bias is not None, **options)
    made.load_state_dict(layer.state_dict())
    return made.to("cpu")  # type: ignore[no-any-return]


def quantized_net(kind: str) -> Net:
    torch.manual_seed(0)
    net = Net()
    if kind == "int8":
        from torchao.quantization import Int8WeightOnlyConfig, quantize_

        quantize_(net.layers, Int8WeightOnlyConfig())
        return net
    options = {"quant_type": kind[:3], "compress_statistics": kind.endswith("double")}
    for layer in net.layers:
        layer.up, layer.down = in_4_bits(layer.up, **options), in_4_bits(layer.down, **options)  # type: ignore[arg-type]
    return net


def adapted(kind: str) -> Any:
    """With LoRA by peft, and a base that nobody trains."""
    import peft

    config = peft.LoraConfig(r=4, target_modules=["up", "down"], lora_dropout=0.0, init_lora_weights=False)
    net: Any = quantized_net(kind)
    net.is_loaded_in_4bit = kind != "int8"
    return peft.get_peft_model(net, config)


def batch_of(dtype: torch.dtype) -> dict[str, Tensor]:
    draw = torch.Generator().manual_seed(5)
    sizes = {"x": WIDTH, "y": 4}
    return {name: torch.randn(8, size, generator=draw, dtype=torch.float64).to(dtype) for name, size in sizes.items()}


def needs(kind: str) -> None:
    pytest.importorskip("peft")
    pytest.importorskip("torchao" if kind == "int8" else "bitsandbytes")


def training_on_ranks(kind: str, force: str, dtype: torch.dtype) -> Any:
    """On a rank: training, and the bytes of the shards that it holds of the base."""
    model = with_plain_storage(adapted(kind)).to(dtype)
    parallel = autopar.parallelize(model, "local:4", batch_of(dtype), force=force, cache=False, proof=True)
    found = train(parallel, [batch_of(dtype)] * 3)
    frozen = {name: each.to_local() for name, each in parallel.named_parameters() if not each.requires_grad}  # type: ignore[attr-defined]
    assert not any(each.grad is not None for each in parallel.parameters() if not each.requires_grad)
    held = sum(each.nbytes for name, each in frozen.items() if "layers" in name)
    return found, held, parallel.plan.document.replicated_ops


def habits_of_peft(kind: str, folder: str) -> list[float]:
    """On a rank: the loss of a call, of one without adapters, of one from a copy, and of one process that loads the adapters;
    that of one process that has trained as long."""
    import peft

    batch, alone = batch_of(torch.float32), adapted(kind)
    parallel = autopar.parallelize(adapted(kind), "local:4", batch, force="dp=2,tp=2,zero=3,pp=1", cache=False)
    for model in (parallel, alone):
        train(model, [batch] * 3)
    with pytest.raises(StateError, match="save_pretrained"):
        parallel.merge_adapter()
    with parallel.disable_adapter():
        bare = parallel(**batch).item()
    with alone.disable_adapter():
        expected = alone(**batch).item()
    assert bare == pytest.approx(expected, rel=1e-5)
    parallel.save_pretrained(folder)
    dist.barrier()
    again = peft.PeftModel.from_pretrained(adapted(kind).get_base_model(), folder, is_trainable=True)
    parallel.load_pretrained(folder)
    found = with_plain_storage(alone)
    found.load_state_dict(parallel.full_state())
    return [each(**batch).item() for each in (parallel, copy.deepcopy(parallel), again, found, alone)]


@pytest.mark.parametrize("kind", ["nf4", SLOW("int8")])
def test_adapters_are_saved_and_loaded_beside_the_package_itself(kind: str, tmp_path: Path, ranks: RankPool) -> None:
    needs(kind)
    for found in ranks.run(habits_of_peft, kind, str(tmp_path), timeout=240):
        assert found == pytest.approx([found[-1]] * 5, rel=1e-4)


@pytest.mark.parametrize(
    ("kind", "force", "shards"),
    [
        ("nf4", "dp=2,tp=2,zero=3,pp=1", 4),
        ("int8", "dp=4,zero=3", 4),
        *(SLOW(kind, "tp=4", 4) for kind in ("nf4", "int8", "nf4 double")),
        *(SLOW(kind, "pp=2,dp=2,zero=2", 4) for kind in ("nf4", "int8", "fp4")),
        SLOW("nf4", "dp=4,zero=0", 1),
    ],
)
def test_adapters_on_a_quantized_base_train_as_in_one_process(kind: str, force: str, shards: int, ranks: RankPool) -> None:
    """Base weights are in memory once, in 4 or 8 bits, with neither gradients nor state."""
    needs(kind)
    model = with_plain_storage(adapted(kind)).double()
    whole = sum(each.nbytes for name, each in model.named_parameters() if "layers" in name and not each.requires_grad)
    assert whole < 4 * WIDTH * HIDDEN * (1.2 if kind == "int8" else 0.7)
    expected = train(model, [batch_of(torch.float64)] * 3)
    for found, held, replicated in ranks.run(training_on_ranks, kind, force, torch.float64, timeout=240):
        assert not training_differences(found, expected) and not replicated
        assert held <= 1.1 * whole / shards


@pytest.mark.parametrize("kind", ["nf4", "int8", SLOW("nf4 double"), SLOW("fp4")])
def test_plain_storage_computes_what_the_package_does(kind: str) -> None:
    needs(kind)
    model, batch = adapted(kind), batch_of(torch.float32)
    plain = with_plain_storage(model)
    assert plain is not model and with_plain_storage(plain) is plain
    losses = [each(**batch) for each in (model, plain)]
    gradients = [torch.autograd.grad(loss, [p for p in model.parameters() if p.requires_grad]) for loss in losses]
    torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0)
    torch.testing.assert_close(gradients[1], gradients[0])


def test_what_cannot_be_captured_is_refused_in_a_line() -> None:
    bnb = pytest.importorskip("bitsandbytes")
    net, batch = Net(), batch_of(torch.float32)

    def refused(layer: nn.Module, words: str) -> None:
        net.layers[0].up = layer  # type: ignore[assignment]
        with pytest.raises(CaptureError, match=words) as error:
            autopar.plan(net, "local:2", batch)
        assert str(error.value).startswith("layers.0.up ") and "\n" not in str(error.value)

    refused(bnb.nn.Linear8bitLt(WIDTH, HIDDEN, has_fp16_weights=False), "load_in_4bit=True")
    refused(bnb.nn.Linear4bit(WIDTH, HIDDEN), r"not quantized yet.*model\.to\(device\)")
    refused(in_4_bits(nn.Linear(48, HIDDEN)), "llm_int8_skip_modules=\\['up'\\]")
    refused(bnb.nn.Embedding4bit(64, WIDTH), "quantized Embedding4bit")


def test_other_storage_of_torchao_is_refused() -> None:
    torchao = pytest.importorskip("torchao.quantization")
    net = Net()
    torchao.quantize_(net.layers, torchao.Int8DynamicActivationInt8WeightConfig())
    with pytest.raises(CaptureError, match=r"layers\.0\.up has a weight of the type Int8Tensor .*Int8WeightOnlyConfig"):
        autopar.plan(net, "local:2", batch_of(torch.float32))


def test_storage_is_priced_in_its_own_bytes() -> None:
    """A plan needs no weights: layers on the meta device, which bitsandbytes quantizes as they are loaded, have the sizes."""
    bnb = pytest.importorskip("bitsandbytes")
    net, batch = Net(), batch_of(torch.float32)
    for layer in net.layers:
        layer.up = bnb.nn.Linear4bit(WIDTH, HIDDEN, device="meta")  # type: ignore[assignment]
        layer.down = bnb.nn.Linear4bit(HIDDEN, WIDTH, bias=False, device="meta")  # type: ignore[assignment]
    net.layers.requires_grad_(False)
    predicted = autopar.plan(net, "local:2", batch, force="dp=2,zero=0,tp=1,pp=1").document.predicted
    memory = dict(predicted.memory)
    floats = sum(each.nbytes for each in (*net.head.parameters(), *(layer.up.bias for layer in net.layers)))
    assert memory["parameters"] == pytest.approx(4 * WIDTH * HIDDEN * (0.5 + 4 / 64) + floats, rel=0.01)
    assert memory["optimizer"] == 2 * sum(each.nbytes for each in net.head.parameters())
