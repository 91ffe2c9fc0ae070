from __future__ import annotations

import pytest

from agent.mig import profile as profiles
from agent.nvml import models
from agent.sim import tables


@pytest.mark.parametrize(
    ("device", "name", "mib", "key"),
    [
        pytest.param(0x20B010DE, "NVIDIA A100-SXM4-40GB", 40960, "a100.40gb", id="as NVML tells it"),
        pytest.param(0x20B0, "NVIDIA A100-SXM4-40GB", 40960, "a100.40gb", id="the plain device id"),
        pytest.param(
            0x2BB310DE, "NVIDIA RTX PRO 5000 Blackwell", 48935, "rtxpro5000.48gb", id="one id, the smaller part"
        ),
        pytest.param(
            0x2BB310DE, "NVIDIA RTX PRO 5000 72GB Blackwell", 73000, "rtxpro5000.72gb", id="one id, the larger part"
        ),
        pytest.param(0x27B810DE, "NVIDIA L4-3Q", 3072, "l4-3q.3gb", id="a fraction of a GPU"),
        pytest.param(0x999910DE, "NVIDIA Z100-SXM4-64GB", 65100, "z100.64gb", id="unknown: name and whole GiB"),
        pytest.param(
            0x999910DE, "NVIDIA RTX PRO 7000 Server Edition", 98000, "rtxpro7000.96gb", id="unknown: several words"
        ),
        pytest.param(0, "", 0, "gpu.0gb", id="nothing known"),
    ],
)
def test_key(device: int, name: str, mib: int, key: str) -> None:
    assert models.key(device, name=name, memory_bytes=mib * 2**20) == key


def test_every_simulated_model_has_its_own_key() -> None:
    for identifier in tables.model_ids():
        model = tables.model(identifier)
        if not model.device_id or not model.memory_mib:
            continue
        key = models.key(model.device_id << 16 | 0x10DE, name=model.name, memory_bytes=model.memory_mib * 2**20)
        assert key == model.model_key, identifier


def test_bottlerocket_goes_by_pci_id_alone() -> None:
    assert models.bottlerocket_key(0x232110DE) == "h100.80gb"
    assert models.key(0x232110DE, name="NVIDIA H100 NVL", memory_bytes=95830 * 2**20) == "h100.94gb"
    assert models.bottlerocket_key(0x20B710DE) is None


def test_other_names_of_a_profile_belong_to_its_model_only() -> None:
    whole = profiles.parse("7g.80gb")
    assert models.aliases("a100.80gb", whole) == (profiles.parse("7g.79gb"),)
    assert models.aliases("h100.80gb", whole) == ()
