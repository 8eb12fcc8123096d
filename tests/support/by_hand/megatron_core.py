"""Megatron-core's own layers on a CPU: where they ask for a GPU (its device, random numbers, a mask), plain torch answers."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state, tensor_parallel
from megatron.core.fusions import fused_softmax
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import reduce_from_tensor_model_parallel_region
from megatron.core.transformer import utils
from megatron.core.transformer.transformer_config import TransformerConfig
from pytest import MonkeyPatch
from torch import Tensor, nn

WIDTH, TOKENS, EXAMPLES, VOCABULARY = 32, 16, 2, 64


def without_gpu(patch: MonkeyPatch) -> None:
    tracker = SimpleNamespace(fork=lambda *_: contextlib.nullcontext(), is_initialized=lambda: True)
    patch.setattr(tensor_parallel, "get_cuda_rng_tracker", lambda *_, **__: tracker)
    patch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    for module in (utils, fused_softmax):
        patch.setattr(module, "get_default_causal_mask", lambda n: torch.ones(n, n).triu(1).bool(), raising=False)


def configuration(tokens_cut: bool = False) -> TransformerConfig:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2, create_gloo_process_groups=False)
    kernels = ("masked_softmax_fusion", "bias_dropout_fusion", "bias_activation_fusion", "gradient_accumulation_fusion")
    return TransformerConfig(
        num_layers=2, hidden_size=WIDTH, num_attention_heads=4, use_cpu_initialization=True, sequence_parallel=tokens_cut,
        tensor_model_parallel_size=2, attention_dropout=0.0, hidden_dropout=0.0, **dict.fromkeys(kernels, False),
    )  # fmt: skip


def cut_parameters(module: nn.Module) -> dict[str, dict[str, str]]:
    """What Megatron marks as shards."""
    cut = {name: each for name, each in module.named_parameters() if getattr(each, "tensor_model_parallel", False)}
    return {name: {"tp": f"S({each.partition_dim})"} for name, each in cut.items()}


class Language(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        spec = get_gpt_layer_local_spec()
        self.model = GPTModel(configuration(), spec, VOCABULARY, TOKENS, position_embedding_type="learned_absolute")

    def forward(self, ids: Tensor, positions: Tensor, labels: Tensor) -> Tensor:
        return self.model(ids, positions, None, labels=labels).sum() / 100


def gpt() -> Any:
    module, ids = Language(), torch.randint(VOCABULARY, (EXAMPLES, TOKENS))
    inputs = {"ids": ids, "positions": torch.arange(TOKENS).repeat(EXAMPLES, 1), "labels": ids.clone()}
    return module, inputs, {"placements": cut_parameters(module)}


class Products(nn.Module):
    """Two of Megatron's products after a norm; tokens may be cut."""

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        options = {"config": config, "init_method": nn.init.normal_, "bias": True}
        self.norm, self.cut = nn.LayerNorm(WIDTH), config.sequence_parallel
        self.up = ColumnParallelLinear(WIDTH, 2 * WIDTH, gather_output=False, **options)
        self.down = RowParallelLinear(2 * WIDTH, WIDTH, input_is_parallel=True, skip_bias_add=False, **options)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        out = x + self.down(F.gelu(self.up(self.norm(x))[0]))[0]
        loss = (out - target).square().sum() / 100
        return reduce_from_tensor_model_parallel_region(loss) if self.cut else loss


def products(tokens_cut: bool, summed: tuple[str, ...] = ()) -> Any:
    """`summed`: parameters whose gradients the trainer sums over the ranks that have tokens, as ``finalize_model_grads`` does."""
    module = Products(configuration(tokens_cut))
    group = parallel_state.get_tensor_model_parallel_group()

    def finish() -> None:
        for name, each in module.named_parameters():
            if name.startswith(summed):
                dist.all_reduce(each.grad, group=group)

    place = {"dp": "S(1)", **({"tp": "S(0)"} if tokens_cut else {})}
    inputs = {name: torch.randn(TOKENS, EXAMPLES, WIDTH) for name in ("x", "target")}
    places = {**dict.fromkeys(inputs, place), **cut_parameters(module)}
    return module, inputs, {"placements": places, "after_backward": finish if summed else None}
