"""The simulated driver as the core sees it: a GPU read through NVML into values, and steps done on it through NVML.

Small and straight on purpose: the tests of the core must not lean on `agent.nvml`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import importlib
import itertools
from collections.abc import Iterator
from typing import Any

from agent.mig import node, plan, profile
from tests.mig import oracle

pynvml: Any = importlib.import_module("pynvml")
_COMPUTE_SELECTORS = range(pynvml.NVML_COMPUTE_INSTANCE_PROFILE_COUNT)


class Driver:
    """One GPU with MIG on. `offers` grow by compute profiles as GPU instances are seen alive."""

    def __init__(self, handle: Any, architecture: str) -> None:
        self.handle = handle
        self.architecture = architecture
        self.uuid = str(pynvml.nvmlDeviceGetUUID(handle))
        self._compute: dict[int, tuple[node.ComputeOffer, ...]] = {}
        self._infos = oracle.profile_infos(handle)
        self._places = {info.id: oracle.placements(handle, info.id) for _, info in self._infos}
        self._models: dict[int, node.GpuInstance] = {}

    def offers(self) -> tuple[node.ProfileOffer, ...]:
        """Return what the GPU offers."""
        return tuple(
            node.ProfileOffer(
                profile=profile.parse(info.name.removeprefix("MIG ")),
                index=node.ProfileIndex(selector),
                id=node.ProfileId(info.id),
                slices=info.sliceCount,
                memory_bytes=info.memorySizeMB * 2**20,
                multiprocessors=info.multiprocessorCount,
                max_instances=info.instanceCount,
                placements=tuple(node.Placement(start, size) for start, size in self._places[info.id]),
                engines=node.Engines(
                    info.copyEngineCount, info.decoderCount, info.encoderCount, info.jpegCount, info.ofaCount
                ),
                compute=self._compute.get(info.id),
            )
            for selector, info in self._infos
        )

    def learn_compute(self) -> None:
        """Make one instance of every profile and note what compute instances it offers."""
        for _, info in self._infos:
            start, size = self._places[info.id][0]
            made = oracle.create(self.handle, oracle.Spot(info.id, start, size))
            assert made is not None
            self._compute[info.id] = tuple(self._told(made))
            pynvml.nvmlGpuInstanceDestroy(made)

    def _told(self, instance: Any) -> Iterator[node.ComputeOffer]:
        for selector in _COMPUTE_SELECTORS:
            try:
                told = pynvml.nvmlGpuInstanceGetComputeInstanceProfileInfo(instance, selector, 0, version=2)
            except pynvml.NVMLError_NotSupported:
                continue
            count = ctypes.c_uint(0)
            pynvml.nvmlGpuInstanceGetComputeInstancePossiblePlacements(instance, told.id, None, ctypes.byref(count))
            array = (pynvml.c_nvmlComputeInstancePlacement_t * count.value)()
            pynvml.nvmlGpuInstanceGetComputeInstancePossiblePlacements(instance, told.id, array, ctypes.byref(count))
            yield node.ComputeOffer(
                profile=profile.parse(told.name.removeprefix("MIG ")),
                index=node.ProfileIndex(selector),
                id=node.ProfileId(told.id),
                slices=told.sliceCount,
                multiprocessors=told.multiprocessorCount,
                max_instances=told.instanceCount,
                placements=tuple(node.Placement(one.start, one.size) for one in array[: count.value]),
            )

    def observe(self) -> node.Gpu:
        """Read the GPU."""
        instances = []
        for offer in self.offers():
            for handle in self._alive(offer):
                info = pynvml.nvmlGpuInstanceGetInfo(handle)
                compute = tuple(self._compute_alive(handle, offer))
                place = node.Placement(info.placement.start, info.placement.size)
                instances.append(node.GpuInstance(info.id, offer.profile, offer.id, place, offer.memory_bytes, compute))
        mode = pynvml.nvmlDeviceGetMigMode(self.handle)
        return node.Gpu(
            index=0,
            uuid=self.uuid,
            pci_bus_id="00000000:10:1C.0",
            name=str(pynvml.nvmlDeviceGetName(self.handle)),
            model="",
            architecture=self.architecture,
            mode=node.ModeState(current=bool(mode[0]), pending=bool(mode[1])),
            offers=self.offers(),
            instances=tuple(sorted(instances, key=lambda one: one.placement)),
        )

    def _alive(self, offer: node.ProfileOffer) -> list[Any]:
        array = (pynvml.c_nvmlGpuInstance_t * offer.max_instances)()
        count = ctypes.c_uint(0)
        pynvml.nvmlDeviceGetGpuInstances(self.handle, offer.id, array, ctypes.byref(count))
        return list(array[: count.value])

    def _compute_alive(self, handle: Any, offer: node.ProfileOffer) -> Iterator[node.ComputeInstance]:
        for told in self._compute[offer.id]:
            array = (pynvml.c_nvmlComputeInstance_t * told.max_instances)()
            count = ctypes.c_uint(0)
            pynvml.nvmlGpuInstanceGetComputeInstances(handle, told.id, array, ctypes.byref(count))
            for compute in array[: count.value]:
                info = pynvml.nvmlComputeInstanceGetInfo_v2(compute)
                place = node.Placement(info.placement.start, info.placement.size)
                yield node.ComputeInstance(
                    info.id, told.profile, told.id, None, told.multiprocessors, told.slices, place
                )

    def perform(self, step: plan.Step) -> None:
        """Do a step; NVML's refusal is raised."""
        match step:
            case plan.CreateGpuInstance():
                place = pynvml.c_nvmlGpuInstancePlacement_t(step.placement.start, step.placement.size)
                pynvml.nvmlDeviceCreateGpuInstanceWithPlacement(self.handle, step.profile_id, ctypes.byref(place))
            case plan.CreateComputeInstance():
                handle = self._at(step.gpu_instance)
                number = pynvml.nvmlGpuInstanceGetInfo(handle).profileId
                [told] = [one for one in self._compute[number] if one.profile == step.profile]
                if step.start is None:
                    pynvml.nvmlGpuInstanceCreateComputeInstance(handle, told.id)
                else:
                    where = pynvml.c_nvmlComputeInstancePlacement_t(step.start, told.slices)
                    pynvml.nvmlGpuInstanceCreateComputeInstanceWithPlacement(handle, told.id, ctypes.byref(where))
            case plan.DestroyComputeInstance():
                handle = pynvml.nvmlDeviceGetGpuInstanceById(self.handle, step.gpu_instance_id)
                pynvml.nvmlComputeInstanceDestroy(pynvml.nvmlGpuInstanceGetComputeInstanceById(handle, step.id))
            case plan.DestroyGpuInstance():
                pynvml.nvmlGpuInstanceDestroy(pynvml.nvmlDeviceGetGpuInstanceById(self.handle, step.id))
            case _:
                raise AssertionError(f"{step} on a GPU whose mode is as wanted")

    def _at(self, place: node.Placement) -> Any:
        for offer in self.offers():
            for handle in self._alive(offer):
                info = pynvml.nvmlGpuInstanceGetInfo(handle)
                if (info.placement.start, info.placement.size) == (place.start, place.size):
                    return handle
        raise AssertionError(f"no GPU instance at {place}")

    def clear(self) -> None:
        """Destroy everything."""
        for instance in self.observe().instances:
            for compute in instance.compute:
                self.perform(plan.DestroyComputeInstance(instance.id, compute.id, compute.profile, instance.placement))
            self.perform(plan.DestroyGpuInstance(instance.id, instance.profile, instance.placement))

    def hold(
        self, spots: tuple[oracle.Spot, ...], numbers: Iterator[int] | None = None
    ) -> tuple[node.GpuInstance, ...]:
        """Return instances as if they were at `spots`, each with its default compute instance: reading them back
        from the driver for each of hundreds of thousands of layouts would take hours."""
        ids = itertools.count() if numbers is None else numbers
        return tuple(
            dataclasses.replace(
                self._like(spot.profile_id), id=next(ids), placement=node.Placement(spot.start, spot.size)
            )
            for spot in spots
        )

    def _like(self, number: int) -> node.GpuInstance:
        if number not in self._models:
            [offer] = [one for one in self.offers() if one.id == number]
            whole = node.Placement(0, offer.slices)
            compute = node.ComputeInstance(
                0, offer.profile, node.ProfileId(0), None, offer.multiprocessors, offer.slices, whole
            )
            self._models[number] = node.GpuInstance(0, offer.profile, offer.id, whole, 0, (compute,))
        return self._models[number]
