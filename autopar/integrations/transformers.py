"""The Trainer of transformers for parallel models: trains, evaluates with logits, predicts, saves what ``from_pretrained`` reads,
and resumes, also under another plan.

>>> from autopar.integrations.transformers import Trainer
>>> trainer = Trainer(model=model, args=args, train_dataset=data, cluster="dgx-h100:8")

All processes are one device to it: `per_device_train_batch_size` is the global batch, and losses are those of one process.
"""

from __future__ import annotations

import inspect
import logging
import os
import random
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy
import torch
import transformers
from torch import nn
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import seed_worker

from autopar.api import parallelize as make_parallel
from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError
from autopar.integrations.first_batch import first_batch
from autopar.integrations.one_device import (
    MovedOptimizer,
    inner_optimizer,
    load_optimizer,
    load_weights,
    loss_scaler,
    present_as_one_device,
    read_on_every_rank,
    refuse,
    save_optimizer,
    wait_for_all,
)
from autopar.runtime.parallel import Parallel
from autopar.runtime.pretrained.adapters import adapter_state, is_adapted

LOGGER = logging.getLogger("autopar")

_RANDOM_STATE = "rng_state.pth"
_SCHEDULER = "scheduler.pt"


class Trainer(transformers.Trainer):
    """A Trainer of a parallel model. `cluster` is that of `autopar.parallelize`, `parallelize` its further options (``{"force":
    "tp=4"}``). The model is planned with the first batch of the training data, else of the evaluation data; `trainer.model` is
    the parallel model."""

    model: Any
    lr_scheduler: Any

    def __init__(
        self,
        model: nn.Module | None = None,
        args: transformers.TrainingArguments | None = None,
        *rest: Any,
        cluster: str | Cluster,
        parallelize: Mapping[str, Any] | None = None,
        **keywords: Any,
    ) -> None:
        args = transformers.TrainingArguments(output_dir="tmp_trainer") if args is None else args
        names = inspect.signature(transformers.Trainer.__init__).parameters
        _refuse(args, {"model": model} | dict(zip(list(names)[3:], rest, strict=False)) | keywords)
        if rest:
            super().__init__(model, args, *rest, **keywords)
        else:
            super().__init__(model=model, args=args, **keywords)
        plain = self.model  # trl has made it of a name, or added adapters
        self.parameters_before = MovedOptimizer(plain)
        self._set_signature_columns_if_needed()
        self.decay_names = super().get_decay_parameter_names(plain)
        options = {"precision": "bf16" if args.bf16 else "fp16"} if args.bf16 or args.fp16 else {}
        self._make_parallel(plain, cluster, options | {"optimizer": "adamw"} | dict(parallelize or {}))

    def _make_parallel(self, model: nn.Module, cluster: str | Cluster, options: dict[str, Any]) -> None:
        """Replace the plain model everywhere."""
        model.train(self.train_dataset is not None)
        parallel = make_parallel(model, cluster, example_inputs=self._example(), **options)
        parallel.reseed(self.args.seed)
        if self.args.process_index == 0:
            size = self.args.per_device_train_batch_size
            LOGGER.warning("all processes are one device: per_device_train_batch_size=%d is the global batch", size)
        self.model_flops = 6 * sum(each.numel() for each in self.parameters_before.parameters.values())
        self.plain_skeleton = parallel.plain.skeleton if parallel.plain is not None else model
        inner: Any = self.plain_skeleton
        inner = inner.get_base_model() if is_adapted(inner) else inner
        parallel.__dict__["_get_name"] = inner._get_name  # label smoothing knows causal models by it
        if self.optimizer is not None:
            self.parameters_before.move(self.optimizer, parallel)
        del self.parameters_before
        self.model = self.model_wrapped = self.callback_handler.model = parallel

    def _evaluation_loader(self) -> Any:
        if self.eval_dataset is None:
            raise AutoparError("a Trainer plans with a batch of its data: pass train_dataset or eval_dataset")
        many = isinstance(self.eval_dataset, dict)
        return self.get_eval_dataloader(next(iter(self.eval_dataset)) if many else None)

    def _example(self) -> dict[str, Any]:
        """The arguments with which `compute_loss` calls the model for the first batch."""
        batch = first_batch(self.get_train_dataloader() if self.train_dataset is not None else self._evaluation_loader())
        self.accelerator.free_memory()
        items = self._get_num_items_in_batch([batch], self.args.device)
        try:
            self.compute_loss(_CallRecorder(), dict(self._prepare_inputs(batch)), num_items_in_batch=items)  # type: ignore[arg-type]
        except _CalledError as call:
            return call.keywords
        raise AutoparError("compute_loss does not call the model that it is given: call it, so that it can be planned for")

    # -- one device

    def create_accelerator_and_postprocess(self) -> None:
        self.args._setup_devices  # noqa: B018  (joins the process group)
        present_as_one_device()
        self.args._n_gpu = min(self.args._n_gpu, 1)
        super().create_accelerator_and_postprocess()
        read_on_every_rank(self.accelerator)
        if self.args.fp16:
            self.accelerator.scaler = loss_scaler(self.accelerator)

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        return super()._build_accelerator_args(**kwargs) | {"mixed_precision": "no"}  # the plan has the precision

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The parallel model is where it computes; the plain one may be larger than a device."""

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super()._get_dataloader(*args, **kwargs)
        plain = getattr(loader, "base_dataloader", loader)
        if isinstance(plain.worker_init_fn, partial):  # workers of all ranks make the same batches
            plain.worker_init_fn = partial(seed_worker, num_workers=self.args.dataloader_num_workers, rank=0)
        return loader

    # -- the step

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        return self.decay_names

    def _unscale(self) -> None:
        if self.accelerator.scaler is not None:
            self.accelerator.scaler.unscale_(inner_optimizer(self.optimizer))

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        self._unscale()
        return self.model.clip_grad_norm_(self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is not None:
            return grad_norm
        self._unscale()
        return self.model.clip_grad_norm_(float("inf"))

    def floating_point_ops(self, inputs: dict[str, Any]) -> int:
        main = inputs.get(getattr(self.plain_skeleton, "main_input_name", "input_ids"))
        return self.model_flops * main.numel() if isinstance(main, torch.Tensor) else 0

    def prediction_step(
        self, model: nn.Module, inputs: dict[str, Any], prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Any, Any, Any]:
        """A call with labels returns what the plain model does beside its loss, too."""
        if ignore_keys is None:
            ignore_keys = getattr(self.plain_skeleton.config, "keys_to_ignore_at_inference", ["past_key_values"])
        asked = () if prediction_loss_only else self._result_names(ignore_keys)
        with self.model.returning(*asked):
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)

    def _result_names(self, ignored: list[str]) -> list[str]:
        """The fields of the model's result that training leaves out."""
        interface = self.model.plan.graph.interface
        left_out = interface.left_out if interface is not None else ()
        return [name for name in dict.fromkeys(path.split(".")[0] for path in left_out) if name not in ignored]

    # -- files

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Write what ``from_pretrained`` reads, on rank 0 (all ranks must call)."""
        parallel: Parallel = self.model
        adapted = parallel.plain is not None and is_adapted(parallel.plain.skeleton)
        state = adapter_state(parallel.state, parallel.plain) if adapted else parallel.full_state()  # type: ignore[arg-type]
        if self.args.should_save:
            self._save(output_dir, state)
        wait_for_all()
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        parallel, self.model = self.model, self.plain_skeleton
        try:
            super()._save(output_dir, state_dict)
        finally:
            self.model = parallel

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        wait_for_all()

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_optimizer(output_dir, self.model, inner_optimizer(self.optimizer))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, _SCHEDULER))

    def _save_rng_state(self, output_dir: str) -> None:
        """Python's, numpy's and torch's states, which are equal on all ranks. The streams of the parallel model restart from the
        step, here and where the run is resumed, so that they belong to no plan."""
        self._restart_streams()
        if self.args.should_save:
            states = {"python": random.getstate(), "numpy": numpy.random.get_state(), "cpu": torch.get_rng_state()}
            torch.save(states, os.path.join(output_dir, _RANDOM_STATE))

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        path = os.path.join(checkpoint, _RANDOM_STATE)
        if os.path.isfile(path):
            with safe_globals():  # type: ignore[no-untyped-call, unused-ignore]
                states = torch.load(path, weights_only=True)
            random.setstate(states["python"])
            numpy.random.set_state(states["numpy"])
            torch.set_rng_state(states["cpu"])
        self._restart_streams()

    def _restart_streams(self) -> None:
        self.model.reseed(self.args.seed + 7919 * self.state.global_step)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        if is_adapted(self.plain_skeleton):
            self.model.load_pretrained(resume_from_checkpoint)
        else:
            load_weights(resume_from_checkpoint, self.model)

    def _load_best_model(self) -> None:
        self._load_from_checkpoint(str(self.state.best_model_checkpoint))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not os.path.isfile(os.path.join(checkpoint, _SCHEDULER)):
            return
        load_optimizer(checkpoint, self.model, inner_optimizer(self.optimizer))
        self.lr_scheduler.load_state_dict(torch.load(os.path.join(checkpoint, _SCHEDULER), weights_only=True))


class _CalledError(Exception):
    """A call of the model."""

    def __init__(self, keywords: dict[str, Any]) -> None:
        self.keywords = keywords


class _CallRecorder:
    """A model that only says how it is called."""

    def __call__(self, **keywords: Any) -> Any:
        raise _CalledError(keywords)


def _refuse(args: transformers.TrainingArguments, given: Mapping[str, Any]) -> None:
    """Raise an AutoparError for what a parallel model decides otherwise."""
    model = given.get("model")
    shards = 'the plan shards the model: leave it out, or force it with parallelize={"force": "zero=3"}'
    refuse({
        "model_init": (given.get("model_init") is not None or model is None, "pass the model"),
        "fp16_full_eval or bf16_full_eval": (args.fp16_full_eval or args.bf16_full_eval, "take bf16=True"),
        "fsdp": (args.fsdp, shards),
        "deepspeed": (args.deepspeed, shards),
        "parallelism_config": (args.parallelism_config, 'force degrees with parallelize={"force": "tp=4"}'),
        "gradient_checkpointing": (
            getattr(args, "activation_checkpointing", False) or getattr(args, "gradient_checkpointing", False),
            "leave it out: the plan decides what is recomputed",
        ),
        "torch_compile": (args.torch_compile, 'take parallelize={"compile": True}'),
        "neftune_noise_alpha": (args.neftune_noise_alpha, "hooks do not run in the program: add the noise inside the model"),
        "auto_find_batch_size": (args.auto_find_batch_size, "the plan fits the memory, or says by how much it does not"),
        "use_liger_kernel": (args.use_liger_kernel, "leave it out: its kernels are not captured"),
    })  # fmt: skip
