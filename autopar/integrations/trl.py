"""trl's trainers of parallel models: supervised fine-tuning and direct preference optimization, with adapters of peft or without.

>>> from autopar.integrations.trl import SFTTrainer
>>> trainer = SFTTrainer(model=model, args=args, train_dataset=data, peft_config=lora, cluster="dgx-h100:8")

As with `integrations.transformers.Trainer`, all processes are one device. The reference of a preference is the same weights with
their adapters off, or a second parallel model beside the first.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MethodType
from typing import Any

import torch
import torch.nn.functional as F
import trl
from torch import nn
from trl.trainer.utils import FusedCausalLMOutput

from autopar.api import parallelize as make_parallel
from autopar.cost_models.hardware.cluster import Cluster
from autopar.integrations.transformers import Trainer
from autopar.runtime.parallel import Parallel
from autopar.runtime.pretrained.adapters import is_adapted


class _ScoredTrainer(Trainer):
    """A trainer whose loss is made of what the model returns for each token."""

    scores: tuple[str, ...]
    """The fields of `FusedCausalLMOutput` that its loss and metrics read, as `outputs` of `autopar.parallelize`."""

    def __init__(
        self,
        model: Any = None,
        args: Any = None,
        *,
        cluster: str | Cluster,
        parallelize: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        if args is not None:  # trl's default is on: the plan decides what is recomputed
            args.gradient_checkpointing = args.activation_checkpointing = False
        options = {"outputs": self.scores} | dict(parallelize or {})
        super().__init__(model, args, cluster=cluster, parallelize=options, **keywords)

    def _make_parallel(self, model: nn.Module, cluster: str | Cluster, options: dict[str, Any]) -> None:
        _score_tokens(model)
        super()._make_parallel(model, cluster, options)
        if is_adapted(self.plain_skeleton):
            object.__setattr__(self.model, "__class__", _adapted_class(type(self.plain_skeleton)))


class SFTTrainer(_ScoredTrainer, trl.SFTTrainer):  # type: ignore[misc, unused-ignore]
    """trl's SFTTrainer of a parallel model; see `integrations.transformers.Trainer` for `cluster` and `parallelize`."""

    scores = ("log_probs:gradient", "entropy", "is_top1", "label_mask")


class DPOTrainer(_ScoredTrainer, trl.DPOTrainer):  # type: ignore[misc, unused-ignore]
    """trl's DPOTrainer of a parallel model. A `ref_model` is parallelized first, and the model beside it; with adapters there is
    none."""

    scores = ("log_probs:gradient", "entropy", "mean_logits", "is_top1", "label_mask")
    ref_model: Any

    def _make_parallel(self, model: nn.Module, cluster: str | Cluster, options: dict[str, Any]) -> None:
        if self.ref_model is not None:
            model.train()
            reference = self.ref_model.eval().requires_grad_(False)
            _score_tokens(reference)
            further = {name: each for name, each in options.items() if name not in ("force", "plan")}
            self.ref_model = make_parallel(reference, cluster, self._example(), **further)
            options["beside"] = self.ref_model
        adapted: Any = model
        adapters = [name for name in ("default", "ref") if name in getattr(adapted, "peft_config", ())]
        if len(adapters) > 1:  # trl's copy of an adapter that goes on training, which the first program has to hold
            adapted.base_model.set_adapter(adapters)
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(parameter.requires_grad and ".ref." not in name)
        super()._make_parallel(model, cluster, options)
        if len(adapters) > 1:
            self.model.set_adapter("default")


def _score_tokens(model: Any) -> None:
    """Give a causal model the forward that trl calls, from its logits: trl's own computes them in tiles, by an autograd function
    that no program can take apart."""
    inner = model.get_base_model() if is_adapted(model) else model
    inner.forward = MethodType(_scored_forward, inner)


def _scored_forward(self: Any, *args: Any, fused_lm_head: bool = False, labels: Any = None, **kwargs: Any) -> Any:
    """The log-probability of each label, and what trl's metrics are made of; without `fused_lm_head` the model's own forward."""
    if not fused_lm_head:
        return type(self).forward(self, *args, **kwargs, **({} if labels is None else {"labels": labels}))
    result = type(self).forward(self, *args, **kwargs)
    logits, labels = result.logits[:, :-1].float(), labels[:, 1:]
    mask = labels != -100
    target = labels.clamp(min=0)
    log_softmax = F.log_softmax(logits, dim=-1)
    log_probs = log_softmax.gather(-1, target.unsqueeze(-1)).squeeze(-1).masked_fill(~mask, 0)
    with torch.no_grad():
        return FusedCausalLMOutput(
            log_probs=log_probs,
            entropy=-(log_softmax.exp() * log_softmax).sum(-1).masked_fill(~mask, 0),
            mean_logits=logits.mean(-1).masked_fill(~mask, 0),
            is_top1=(logits.argmax(-1) == target) & mask,
            label_mask=mask,
            aux_loss=getattr(result, "aux_loss", None),
        )


def _adapted_class(kind: type) -> type:
    """The class of a parallel PeftModel, which is one to ``isinstance``: trl asks whether it can turn adapters off."""
    return type("AdaptedParallel", (Parallel,), {"__class__": property(lambda self: kind)})
