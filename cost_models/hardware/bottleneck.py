"""The bottleneck of heterogeneous devices and links in a synchronous step, as one device or link."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, replace
from typing import Any

from autopar.cost_models.hardware.device_specs import Device


def bottleneck_device(devices: list[Device]) -> Device:
    """Return the device with the slowest matrix products and memory system, the smallest memory, and the dtypes of all."""
    dtypes = [dtype for dtype, _ in devices[0].peak if all(dtype in dict(device.peak) for device in devices)]
    compute = min(devices, key=lambda device: device.product_flops_per_second("bfloat16"))
    memory = min(devices, key=lambda device: device.bandwidth_bytes_per_second * device.bandwidth_fraction)
    return replace(
        compute,
        name="+".join(dict.fromkeys(device.name for device in devices)),
        peak=tuple((dtype, min(dict(device.peak)[dtype] for device in devices)) for dtype in dtypes),
        measured_peak=_of_all(devices, min),
        memory_bytes=min(device.memory_bytes for device in devices),
        bandwidth_bytes_per_second=memory.bandwidth_bytes_per_second,
        bandwidth_fraction=memory.bandwidth_fraction,
        launch_seconds=max(device.launch_seconds for device in devices),
        base_bytes=max(device.base_bytes for device in devices),
        communicator_bytes=max(device.communicator_bytes for device in devices),
        memory_margin=max(device.memory_margin for device in devices),
        held_bytes=max(device.held_bytes for device in devices),
    )


def _of_all(devices: list[Device], which: Callable[[list[float]], float]) -> tuple[tuple[str, float], ...]:
    """Return the measured peaks of the dtypes that were measured on all of them."""
    peaks = [dict(device.measured_peak) for device in devices]
    return tuple((dtype, which([each[dtype] for each in peaks])) for dtype in peaks[0] if all(dtype in each for each in peaks))


def fastest_device(devices: list[Device]) -> Device:
    """Return a device at least as good as each of them in every figure, for lower bounds."""
    compute = max(devices, key=lambda device: device.product_flops_per_second("bfloat16"))
    dtypes = [dtype for dtype, _ in compute.peak]
    return replace(
        compute,
        peak=tuple((dtype, max(device.peak_flops_per_second(dtype) for device in devices)) for dtype in dtypes),
        measured_peak=_of_all(devices, max),
        memory_bytes=max(device.memory_bytes for device in devices),
        bandwidth_bytes_per_second=max(device.bandwidth_bytes_per_second for device in devices),
        bandwidth_fraction=max(device.bandwidth_fraction for device in devices),
        matmul_fraction=max(device.matmul_fraction for device in devices),
        attention_fraction=max(device.attention_fraction for device in devices),
        product_bytes_per_second=max(device.product_bytes_per_second for device in devices),
        causal_attention_fraction=max(device.attention_share(False) for device in devices),
        convolution_fraction=max(device.convolution_fraction or device.matmul_fraction for device in devices),
        vector_bits=min(device.vector_bits for device in devices),
        launch_seconds=min(device.launch_seconds for device in devices),
        base_bytes=min(device.base_bytes for device in devices),
        communicator_bytes=min(device.communicator_bytes for device in devices),
        memory_margin=min(device.memory_margin for device in devices),
        held_bytes=min(device.held_bytes for device in devices),
        fresh_page_bytes_per_second=0.0,
    )


def bottleneck_note(devices: list[tuple[int, Device]]) -> str:
    """Write the note of a plan for a heterogeneous cluster; `devices` are (count, device). Empty where all are of one kind."""
    names = list(dict.fromkeys(device.name for _, device in devices))
    if len(names) == 1:
        return ""
    compute = min(devices, key=lambda each: each[1].product_flops_per_second("bfloat16"))[1]
    memory = min(devices, key=lambda each: each[1].memory_bytes)[1]
    counted = " and ".join(f"{sum(size for size, device in devices if device.name == name)} x {name}" for name in names)
    return (
        f"{counted}: without a pipeline work is divided evenly, so each step waits for the slowest ({compute.name}), and the "
        f"plan fits the smallest memory ({memory.name}, {memory.memory_bytes / 2**30:.4g} GiB)"
    )


def bottleneck_of(objects: Any, keep: frozenset[str] | set[str] = frozenset()) -> Any:
    """Return one object for several of the same class: the smallest of each rate and size, the largest of latencies and
    oversubscription. Fields in `keep` are those of the first."""
    out: dict[str, Any] = {}
    for field in fields(objects[0]):
        values = [getattr(part, field.name) for part in objects]
        if field.name in keep or len(set(values)) == 1:
            out[field.name] = values[0]
        elif field.name == "measured":
            out[field.name] = ()  # no table is of several links: latency, bandwidth and factors are
        elif isinstance(values[0], str):
            out[field.name] = "+".join(dict.fromkeys(map(str, values)))
        else:
            larger = field.name.endswith("_seconds") or field.name == "oversubscription"
            out[field.name] = max(values) if larger else min(values)
    return type(objects[0])(**out)
