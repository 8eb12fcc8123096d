"""The constants of the cost model beside what a calibration measured: ours, measured, and their ratio. No threshold: whoever
reads the table judges."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.cost_models.calibrate.fit import Calibration, preset_of_device
from autopar.cost_models.calibrate.local_cluster import default_local_cluster
from autopar.cost_models.comm.collectives import collective_seconds
from autopar.cost_models.hardware.cluster import Cluster, preset_with_devices
from autopar.cost_models.hardware.device_specs import AxisLink, Device, Level


@dataclass(frozen=True, slots=True)
class Constant:
    """A figure of the cost model in its `unit`, ours and as it was measured."""

    name: str
    unit: str
    ours: float
    measured: float

    @property
    def ratio(self) -> float | None:
        """Return measured over ours; None where ours is 0."""
        return self.measured / self.ours if self.ours else None


def our_cluster(device: str, size: int) -> Cluster | None:
    """Return `size` devices as our constants describe them, by the driver's name of one (a CPU's ends in ``process``); None where
    no preset does."""
    if device.endswith(" process"):
        return default_local_cluster(size)
    preset = preset_of_device(device)
    return preset_with_devices(preset, size) if preset else None


def constants(ours: Cluster, found: Calibration) -> Iterator[Constant]:
    """Yield the rates of the device, then each collective's seconds. Kernels are timed alone: programs, to which our fractions
    are fitted, may reach less of the same device."""
    measured = found.cluster
    rates = dict(_rates(measured.device, [dtype for dtype, _ in measured.device.peak]))
    for (name, unit), rate in _rates(ours.device, [dtype for dtype, _ in measured.device.peak]):
        yield Constant(name, unit, rate, rates[name, unit])
    for way in ("read", "write"):
        if ours.host is not None and measured.host is not None:
            mine, seen = (getattr(each.host, f"{way}_bytes_per_second") for each in (ours, measured))
            yield Constant(f"host memory, {way}", "byte/s", mine, seen)
    size = measured.size
    if size < 2:
        return
    axis = AxisLink(size, (Level(ours.links[0], size),), ours.device.launch_seconds, ours.algorithms)
    for each in found.run.collectives:
        name = f"{each.name} of {each.work:.0f} bytes over {size}"
        yield Constant(name, "s", collective_seconds(each.name, each.work, axis), each.seconds)


def _rates(device: Device, dtypes: Sequence[str]) -> Iterator[tuple[tuple[str, str], float]]:
    main = "bfloat16" if device.kind == "cuda" else "float32"
    yield ("memory of the device", "byte"), float(device.memory_bytes)
    yield ("context and libraries", "byte"), float(device.base_bytes)
    yield ("streaming", "byte/s"), device.bandwidth_bytes_per_second * device.bandwidth_fraction
    yield ("one small kernel", "s"), device.launch_seconds
    for dtype in dtypes:
        yield (f"matrix products, {dtype}", "FLOP/s"), device.product_flops_per_second(dtype)
    yield (f"attention, {main}", "FLOP/s"), device.matrix_peak_flops_per_second(main) * device.attention_fraction
    yield (f"convolutions, {main}", "FLOP/s"), device.convolution_flops_per_second(main)
