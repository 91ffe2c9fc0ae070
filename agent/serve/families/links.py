"""PCIe, NVLink and fabric: of whole GPUs only."""

from __future__ import annotations

from collections.abc import Iterator

from agent.serve.families.family import Family, Row, View, per_gpu, states

FABRIC_STATES = ("not-supported", "not-started", "in-progress", "completed")


def _fabric(view: View) -> Iterator[Row]:
    for gpu in view.up:
        word = None if gpu.fabric_state is None else gpu.fabric_state.replace("_", "-")
        for state, value in states(word, FABRIC_STATES):
            yield (gpu.uuid, state), value


FAMILIES: tuple[Family, ...] = (
    per_gpu(
        "gpu_pcie_replays_total",
        "PCIe packets that had to be sent again.",
        lambda gpu: gpu.pcie_replays,
        source="NVML_FI_DEV_PCIE_REPLAY_COUNTER",
        kind="counter",
    ),
    per_gpu(
        "gpu_pcie_transmit_bytes_total",
        "Bytes the GPU sent over PCIe; wraps of the driver's counter are folded.",
        lambda gpu: gpu.pcie_transmit_bytes,
        source="NVML_FI_DEV_PCIE_COUNT_TX_BYTES",
        unit="bytes",
        kind="counter",
    ),
    per_gpu(
        "gpu_pcie_receive_bytes_total",
        "Bytes the GPU received over PCIe; wraps of the driver's counter are folded.",
        lambda gpu: gpu.pcie_receive_bytes,
        source="NVML_FI_DEV_PCIE_COUNT_RX_BYTES",
        unit="bytes",
        kind="counter",
    ),
    per_gpu(
        "gpu_pcie_link_generation",
        "PCIe generation the link runs at.",
        lambda gpu: gpu.pcie_link_generation,
        source="nvmlDeviceGetCurrPcieLinkGeneration",
    ),
    per_gpu(
        "gpu_pcie_link_width",
        "PCIe lanes the link runs on.",
        lambda gpu: gpu.pcie_link_width,
        source="nvmlDeviceGetCurrPcieLinkWidth",
    ),
    per_gpu(
        "gpu_nvlink_transmit_bytes_total",
        "Bytes sent over all NVLinks of the GPU.",
        lambda gpu: gpu.nvlink_transmit_bytes,
        source="NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX",
        where="GPUs with NVLink",
        unit="bytes",
        kind="counter",
    ),
    per_gpu(
        "gpu_nvlink_receive_bytes_total",
        "Bytes received over all NVLinks of the GPU.",
        lambda gpu: gpu.nvlink_receive_bytes,
        source="NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX",
        where="GPUs with NVLink",
        unit="bytes",
        kind="counter",
    ),
    per_gpu(
        "gpu_nvlink_links_active",
        "NVLinks of the GPU that are up.",
        lambda gpu: gpu.nvlinks_active,
        source="nvmlDeviceGetNvLinkState",
        where="GPUs with NVLink",
    ),
    Family(
        name="gpu_fabric_state",
        kind="gauge",
        help="State of the registration with the NVSwitch fabric: 1 for the one that holds.",
        labels=("gpu_uuid", "state"),
        source="nvmlDeviceGetGpuFabricInfoV",
        where="GPUs on an NVSwitch host",
        rows=_fabric,
    ),
)
