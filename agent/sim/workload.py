"""What a simulated GPU measures: memory, activity, power and the rest, moving over time.

Everything is worked out from the state, the seed and the time: nothing is stored while it moves, two
processes that ask at the same moment see the same, and a test that sets the clock knows what comes.
Figures belong together: an instance's activity is that of its processes, the GPU's that of its
instances by their share of multiprocessors, power and temperature follow activity, energy is power
summed up, and counters only grow.
"""

from __future__ import annotations

import dataclasses
import math
import zlib

from agent.sim import machine, state

MIB = 1024 * 1024
_IDLE_INSTANCE_MIB = 9.0  # a 1g in use by nobody, as seen on driver 590; a 2g has 17, a 3g 26
_IDLE_SLICE_MIB = 8.5
_PROCESS_SWING = 0.15
_MEMORY_SWING = 0.05


@dataclasses.dataclass(frozen=True, slots=True)
class Board:
    """Typical data-sheet figures of a board: limits in watts, clocks in MHz. Not measured by anybody
    here; good enough to move."""

    idle_watts: float
    limit_watts: float
    graphics_mhz: int
    memory_mhz: int
    nvlinks: int
    nvlink_version: int
    pcie_generation: int
    hbm: bool


_BOARDS = {
    "v100": Board(40, 300, 1530, 877, 6, 2, 3, True),
    "t4": Board(10, 70, 1590, 5001, 0, 0, 3, False),
    "t4g": Board(10, 70, 1590, 5001, 0, 0, 3, False),
    "a10g": Board(18, 300, 1710, 6251, 0, 0, 4, False),
    "l4": Board(13, 72, 2040, 6251, 0, 0, 4, False),
    "l40s": Board(35, 350, 2520, 9001, 0, 0, 4, False),
    "a100": Board(52, 400, 1410, 1593, 12, 3, 4, True),
    "a800": Board(52, 400, 1410, 1593, 8, 3, 4, True),
    "a30": Board(28, 165, 1440, 1215, 4, 3, 4, True),
    "h100": Board(70, 700, 1980, 2619, 18, 4, 5, True),
    "h200": Board(75, 700, 1980, 3201, 18, 4, 5, True),
    "b200": Board(140, 1000, 1965, 3996, 18, 5, 5, True),
    "gb200": Board(140, 1200, 2062, 3996, 18, 5, 5, True),
    "b300": Board(170, 1400, 2032, 3996, 18, 5, 6, True),
    "gb300": Board(170, 1400, 2032, 3996, 18, 5, 6, True),
    "rtxpro6000": Board(32, 600, 2430, 12481, 0, 0, 5, False),
    "rtxpro4500": Board(15, 165, 2430, 12481, 0, 0, 5, False),
}
_PCIE_FORM_LINKS = 0


def board(gpu: machine.Gpu, /) -> Board:
    """Return the figures of the board nearest to this GPU's model."""
    name = gpu.model.model_key.partition(".")[0].partition("-")[0]
    found = _BOARDS.get(name)
    if found is None:
        found = _BOARDS["a100" if gpu.model.architecture == "Ampere" else "h100"]
    if gpu.model.form_factor.startswith("PCIe") and found.nvlinks:
        found = dataclasses.replace(found, nvlinks=_PCIE_FORM_LINKS, limit_watts=min(found.limit_watts, 350))
    return found


class Figures:
    """The figures of one node's GPUs at a moment `now` (Unix seconds, the node's clock)."""

    def __init__(self, node: machine.Machine) -> None:
        self._machine = node

    def _wave(self, key: int, now: float) -> float:
        draw = zlib.crc32(f"{self._machine.spec.seed}/{key}".encode())
        period = 20 + draw % 41
        return math.sin(2 * math.pi * (now / period + (draw >> 8) % 1000 / 1000))

    # --- processes and memory

    def process_activity(self, process: state.Process, now: float, /) -> float:
        """Return how busy a process keeps its compute instance, 0..1."""
        return min(1.0, max(0.0, process.activity * (1 + _PROCESS_SWING * self._wave(process.pid, now))))

    def process_memory(self, process: state.Process, now: float, /) -> int:
        """Return what a process has allocated, in bytes."""
        return int(process.memory_mib * (1 - _MEMORY_SWING * (0.5 + 0.5 * self._wave(process.pid + 1, now)))) * MIB

    def instance_memory(self, gpu: machine.Gpu, instance: state.GpuInstance, now: float, /) -> tuple[int, int]:
        """Return total and used bytes of a GPU instance."""
        profile = gpu.profile(instance.profile)
        total = profile.memory_mib * MIB
        used = int(_IDLE_INSTANCE_MIB + _IDLE_SLICE_MIB * (profile.slices - 1)) * MIB
        used += sum(self.process_memory(p, now) for p in gpu.state.processes if p.gpu_instance == instance.id)
        return total, min(used, total)

    def memory(self, gpu: machine.Gpu, now: float, /) -> tuple[int, int, int]:
        """Return total, reserved and used bytes of the whole GPU; what the driver reserves is not in used."""
        total = gpu.model.memory_mib * MIB
        reserved = int(gpu.model.memory_mib * 0.0075) * MIB
        now_state = gpu.state
        if now_state.mig:
            used = sum(self.instance_memory(gpu, gi, now)[1] for gi in now_state.instances.values())
        else:
            used = sum(self.process_memory(p, now) for p in now_state.processes)
        return total, reserved, min(used, total - reserved)

    def bar1(self, gpu: machine.Gpu, instance: state.GpuInstance | None, /) -> tuple[int, int]:
        """Return total and used bytes of BAR1, of an instance or the GPU: the power of two above its memory."""
        whole = (
            256
            if gpu.model.memory_mib <= 24 * 1024 and not gpu.model.mig_capable
            else 1 << (gpu.model.memory_mib - 1).bit_length()
        )
        if instance is None:
            return whole * MIB, min(whole, 1 + 2 * len(gpu.state.processes)) * MIB
        share = max(1, whole * instance.size // gpu.model.memory_slices - 1)
        users = sum(p.gpu_instance == instance.id for p in gpu.state.processes)
        return share * MIB, min(share, 2 * users) * MIB

    # --- activity

    def instance_activity(self, gpu: machine.Gpu, instance: state.GpuInstance, now: float, /) -> float:
        """Return how busy a GPU instance is, 0..1: its compute instances by their multiprocessors."""
        profile = gpu.profile(instance.profile)
        part = profile.multiprocessors / gpu.model.multiprocessors
        sum_of = sum(
            self.process_activity(p, now) * gpu.share(p) for p in gpu.state.processes if p.gpu_instance == instance.id
        )
        return min(1.0, sum_of / part) if part else 0.0

    def activity(self, gpu: machine.Gpu, now: float, /) -> float:
        """Return how busy the whole GPU is, 0..1."""
        return min(1.0, sum(self.process_activity(p, now) * gpu.share(p) for p in gpu.state.processes))

    # --- power, heat, clocks

    def power_mw(self, gpu: machine.Gpu, now: float, /) -> int:
        """Return what the board draws, in milliwatts."""
        figures = board(gpu)
        watts = figures.idle_watts * (1 + 0.01 * self._wave(gpu.index, now))
        watts += (figures.limit_watts - figures.idle_watts) * 0.9 * self.activity(gpu, now)
        return int(1000 * min(watts, figures.limit_watts))

    def energy_mj(self, gpu: machine.Gpu, now: float, /) -> int:
        """Return the millijoules drawn since the driver was loaded."""
        figures = board(gpu)
        span = (figures.limit_watts - figures.idle_watts) * 0.9
        busy = self.busy_seconds(gpu, now)
        up = max(0.0, now - self._machine.store.node.booted)
        return int(1000 * (figures.idle_watts * up + span * busy))

    def busy_seconds(self, gpu: machine.Gpu, now: float, /) -> float:
        """Return the seconds of full activity since the driver was loaded: what counters grow by."""
        busy = gpu.state.activity_seconds
        return busy + sum(p.activity * gpu.share(p) * max(0.0, now - p.started) for p in gpu.state.processes)

    def temperature(self, gpu: machine.Gpu, now: float, /) -> int:
        """Return the GPU's temperature in Celsius."""
        return int(29 + gpu.index % 4 + self._wave(gpu.index + 7, now) + 42 * self.activity(gpu, now))

    def memory_temperature(self, gpu: machine.Gpu, now: float, /) -> int | None:
        """Return the temperature of the memory in Celsius, None on parts without HBM."""
        return self.temperature(gpu, now) + 6 if board(gpu).hbm else None

    def clock_mhz(self, gpu: machine.Gpu, domain: int, now: float, /) -> int:
        """Return the clock of a domain: graphics 0, SM 1, memory 2, video 3."""
        figures = board(gpu)
        if domain == 2:  # NVML's number
            return figures.memory_mhz
        busy = self.activity(gpu, now) > 0
        top = figures.graphics_mhz if domain != 3 else figures.graphics_mhz * 9 // 10
        return top if busy else 345

    def pcie_kib(self, gpu: machine.Gpu, counter: int, now: float, /) -> int:
        """Return PCIe throughput in KiB/s: 0 transmitted, 1 received."""
        return int(self.activity(gpu, now) * (900_000 if counter == 0 else 1_500_000)) + 20

    def pcie_bytes(self, gpu: machine.Gpu, counter: int, now: float, /) -> int:
        """Return the bytes moved over PCIe since the driver was loaded."""
        rate = 900_000 if counter == 0 else 1_500_000
        return int(1024 * (rate * self.busy_seconds(gpu, now) + 20 * max(0.0, now - self._machine.store.node.booted)))

    def nvlink_kib(self, gpu: machine.Gpu, now: float, /) -> int:
        """Return the KiB moved each way over one link since the driver was loaded."""
        return int(2_000_000 * self.busy_seconds(gpu, now)) if board(gpu).nvlinks else 0
