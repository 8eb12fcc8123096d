"""The accelerator of accelerate for parallel models: the usual loop, with one changed import and a cluster.

>>> from autopar.integrations.accelerate import Accelerator
>>> accelerator = Accelerator(cluster="dgx-h100:8")
>>> model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

All processes are one device to it: the loader's batch is the global batch, and losses are those of one process.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NoReturn

import accelerate
import torch
import torch.distributed as dist
from accelerate.state import PartialState
from accelerate.utils import ProfileKwargs
from torch import nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

from autopar.api import parallelize as make_parallel
from autopar.cost_models.hardware.cluster import Cluster
from autopar.errors import AutoparError
from autopar.integrations.first_batch import first_batch
from autopar.integrations.one_device import (
    MovedOptimizer,
    first_on_ranks,
    inner_optimizer,
    loss_scaler,
    on_ranks,
    present_as_one_device,
    read_on_every_rank,
    refuse,
    wait_for_all,
)
from autopar.runtime.parallel import Parallel


class Accelerator(accelerate.Accelerator):  # type: ignore[misc, unused-ignore]
    """An accelerator whose models are parallel. `cluster` is that of `autopar.parallelize`, `parallelize` its further options
    (``{"force": "tp=4"}``). `prepare` plans the model with the first batch of the data loader beside it where that is a
    dictionary, else with `example_inputs`."""

    def __init__(
        self,
        *,
        cluster: str | Cluster,
        parallelize: Mapping[str, Any] | None = None,
        example_inputs: Any = None,
        mixed_precision: str | None = None,
        cpu: bool = False,
        **keywords: Any,
    ) -> None:
        refuse({
            f"mixed_precision={mixed_precision!r}": (mixed_precision == "fp8", 'take "bf16"'),
            "fsdp_plugin": (keywords.get("fsdp_plugin"), 'the plan shards the model: take parallelize={"force": "zero=3"}'),
            "deepspeed_plugin": (keywords.get("deepspeed_plugin"), 'take parallelize={"force": "zero=3"}'),
            "parallelism_config": (keywords.get("parallelism_config"), 'take parallelize={"force": "tp=4"}'),
            "dynamo_backend": (keywords.get("dynamo_backend"), 'take parallelize={"compile": True}'),
        })  # fmt: skip
        self.cluster, self.example_inputs = cluster, example_inputs
        half = mixed_precision if mixed_precision in ("bf16", "fp16") else None
        self.options = ({"precision": half} if half else {}) | dict(parallelize or {})
        PartialState(cpu=cpu)
        present_as_one_device()
        super().__init__(mixed_precision="no", cpu=cpu, **keywords)
        read_on_every_rank(self)
        if half == "fp16":
            self.scaler = loss_scaler(self)

    # -- one device

    @property
    def process_index(self) -> int:
        """0 of `num_processes` 1 on every rank, since all read the same data. `is_main_process` is true on rank 0."""
        return 0

    @property
    def is_last_process(self) -> bool:
        """The main process, which is the only one."""
        return bool(self.is_main_process)

    on_main_process = on_last_process = on_process = on_ranks("is_main_process")
    on_local_main_process = on_local_process = on_ranks("is_local_main_process")
    main_process_first = first_on_ranks("is_main_process")
    local_main_process_first = first_on_ranks("is_local_main_process")

    def wait_for_everyone(self) -> None:
        """Wait for all ranks."""
        wait_for_all()

    def check_trigger(self) -> bool:
        """Return whether any rank has set the trigger, and unset it."""
        if dist.is_initialized():
            flag = torch.tensor(int(super().check_trigger()), device=self.device)
            dist.all_reduce(flag, dist.ReduceOp.MAX)
            return bool(flag)
        return bool(super().check_trigger())

    def init_trackers(self, *args: Any, **kwargs: Any) -> None:
        """Start trackers on rank 0."""
        if self.is_main_process:
            super().init_trackers(*args, **kwargs)

    @contextmanager
    def profile(self, profile_handler: ProfileKwargs | None = None) -> Iterator[Any]:
        """Profile as accelerate does; rank 0 writes its trace."""
        handler = profile_handler or self.profile_handler or ProfileKwargs()
        if self.is_main_process or handler.output_trace_dir is None:
            with super().profile(handler) as profiler:
                yield profiler
            return
        with super().profile(replace(handler, output_trace_dir=None)) as profiler:
            yield profiler
        self.wait_for_everyone()

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Prepare as accelerate does; an optimizer that was made from the plain model gets the parameters of the parallel one."""
        models = [each for each in args if isinstance(each, nn.Module) and not isinstance(each, Parallel)]
        if len(models) > 1:
            raise AutoparError(
                "one call of prepare takes one model: prepare each that trains with its own optimizer and example_inputs, and "
                "leave out what does not (a frozen teacher), which may stay plain"
            )
        if models:
            parallel = self._parallelize(models[0], args)
            args = tuple(parallel if each is models[0] else each for each in args)
        return super().prepare(*args, device_placement=device_placement)

    def _parallelize(self, model: nn.Module, args: tuple[Any, ...]) -> Parallel:
        example = self.example_inputs
        if example is None:
            loader = next((each for each in args if isinstance(each, DataLoader)), None)
            example = first_batch(loader) if loader is not None else None
            if not isinstance(example, Mapping):
                raise AutoparError(
                    "prepare plans the model with a batch of the data loader beside it, which must be a dictionary of arguments: "
                    "pass Accelerator(example_inputs=...), the arguments of one call"
                )
            example = dict(example)
        before = MovedOptimizer(model)
        parallel = make_parallel(model, self.cluster, example_inputs=example, **self.options)
        for optimizer in args:
            if isinstance(optimizer, Optimizer):
                before.move(optimizer, parallel)
        return parallel

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Clip by the norm of all gradients of the parallel model that has these parameters, whatever the plan."""
        parameters = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        ids = {id(each) for each in parameters}
        for model in self._models:
            own = {id(each) for each in model.parameters()} if isinstance(model, Parallel) else set()
            if ids and ids == own:
                self.unscale_gradients()
                norm: torch.Tensor = model.clip_grad_norm_(max_norm, norm_type)
                return norm
            if ids & own:
                raise AutoparError("these are some of a parallel model's parameters: clip all of them, model.parameters()")
        other: torch.Tensor = super().clip_grad_norm_(parameters, max_norm, norm_type)
        return other

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Unscale as accelerate does, also where the precision is the plan's."""
        several = optimizer if isinstance(optimizer, (tuple, list)) else [optimizer]
        for each in self._optimizers if optimizer is None else several:
            if self.scaler is not None:
                self.scaler.unscale_(inner_optimizer(each))

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        """The plain model's state dict, with full tensors on every rank (all ranks must call)."""
        return model.full_state() if isinstance(model, Parallel) else super().get_state_dict(model, unwrap)

    def save_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        raise AutoparError(
            "save_state keeps one rank's shards of the optimizer: save accelerator.get_state_dict(model), and the optimizer with "
            "autopar.integrations.one_device.save_optimizer(folder, model, optimizer.optimizer)"
        )

    def load_state(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused."""
        raise AutoparError(
            "load_state reads one rank's shards of the optimizer: load a full state with model.load_state_dict(state), and the "
            "optimizer with autopar.integrations.one_device.load_optimizer(folder, model, optimizer.optimizer)"
        )
