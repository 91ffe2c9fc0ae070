"""GPUs of a few models, as the driver would tell them."""

from __future__ import annotations

from agent.mig import node as nodes
from agent.mig import profile as profiles

# name, profile index, profile id, slices, memory MiB, SMs, max instances, starts, size
_SEVEN = (
    ("1g.{a}gb", 0, 19, 1, 1, 7, (0, 1, 2, 3, 4, 5, 6), 1),
    ("1g.{a}gb+me", 7, 20, 1, 1, 1, (0, 1, 2, 3, 4, 5, 6), 1),
    ("1g.{b}gb", 9, 15, 1, 2, 4, (0, 2, 4, 6), 2),
    ("2g.{b}gb", 1, 14, 2, 2, 3, (0, 2, 4), 2),
    ("3g.{c}gb", 2, 9, 3, 4, 2, (0, 4), 4),
    ("4g.{c}gb", 3, 5, 4, 4, 1, (0,), 4),
    ("7g.{d}gb", 4, 0, 7, 8, 1, (0,), 8),
)
_FOUR = (
    ("1g.{a}gb", 0, 14, 1, 3, 4, (0, 3, 6, 9), 3),
    ("1g.{a}gb+me", 7, 21, 1, 3, 1, (0, 3, 6, 9), 3),
    ("1g.{a}gb+gfx", 10, 47, 1, 3, 4, (0, 3, 6, 9), 3),
    ("1g.{a}gb-me", 13, 67, 1, 3, 4, (0, 3, 6, 9), 3),
    ("2g.{b}gb", 1, 5, 2, 6, 2, (0, 6), 6),
    ("4g.{d}gb", 3, 0, 4, 12, 1, (0,), 12),
    ("4g.{d}gb+gfx", 12, 32, 4, 12, 1, (0,), 12),
)
# model: name, PCI device id, architecture, table, the four sizes
MODELS = {
    "a100.40gb": ("NVIDIA A100-SXM4-40GB", 0x20B010DE, "Ampere", _SEVEN, (5, 10, 20, 40)),
    "a100.80gb": ("NVIDIA A100-SXM4-80GB", 0x20B210DE, "Ampere", _SEVEN, (10, 20, 40, 80)),
    "h100.80gb": ("NVIDIA H100 80GB HBM3", 0x233010DE, "Hopper", _SEVEN, (10, 20, 40, 80)),
    "h100.94gb": ("NVIDIA H100 NVL", 0x232110DE, "Hopper", _SEVEN, (12, 24, 47, 94)),
    "h200.141gb": ("NVIDIA H200", 0x233510DE, "Hopper", _SEVEN, (18, 35, 71, 141)),
    "b200.180gb": ("NVIDIA B200", 0x290110DE, "Blackwell", _SEVEN, (23, 45, 90, 180)),
    "b300.269gb": ("NVIDIA B300", 0x318210DE, "Blackwell", _SEVEN, (34, 67, 135, 269)),
    "rtxpro6000.96gb": ("NVIDIA RTX PRO 6000", 0x2BB510DE, "Blackwell", _FOUR, (24, 48, 72, 96)),
}


def offers(key: str) -> tuple[nodes.ProfileOffer, ...]:
    """Return what a GPU of this model offers."""
    _, _, _, table, sizes = MODELS[key]
    names = dict(zip("abcd", sizes, strict=True))
    slices = max(start + size for *_, starts, size in table for start in starts)
    found = []
    for name, index, number, compute, memory, most, starts, size in table:
        profile = profiles.parse(name.format(**names))
        aliases = (profiles.parse("7g.79gb"),) if str(profile) == "7g.80gb" and key == "a100.80gb" else ()
        found.append(
            nodes.ProfileOffer(
                profile=profile,
                index=nodes.ProfileIndex(index),
                id=nodes.ProfileId(number),
                slices=compute,
                memory_bytes=sizes[3] * 2**30 * memory // slices,
                multiprocessors=compute * 14,
                max_instances=most,
                placements=tuple(nodes.Placement(start, size) for start in starts),
                aliases=aliases,
            )
        )
    return tuple(found)


def gpu(index: int, key: str = "a100.40gb", **changes: object) -> nodes.Gpu:
    """Return an empty GPU of a model, MIG off."""
    name, device, architecture, _, _ = MODELS[key]
    values: dict[str, object] = {
        "index": index,
        "uuid": f"GPU-0000000{index}-aaaa-bbbb-cccc-000000000000",
        "pci_bus_id": f"00000000:{0x10 + index:02X}:1C.0",
        "name": name,
        "model": key,
        "architecture": architecture,
        "pci_device_id": device,
        "mode": nodes.ModeState(current=False, pending=False),
        "offers": offers(key),
        **changes,
    }
    return nodes.Gpu(**values)  # type: ignore[arg-type]


def incapable(index: int) -> nodes.Gpu:
    """Return a GPU without MIG."""
    return nodes.Gpu(
        index=index,
        uuid=f"GPU-1111111{index}-aaaa-bbbb-cccc-000000000000",
        pci_bus_id=f"00000000:{0x30 + index:02X}:1C.0",
        name="NVIDIA L4",
        model="l4.24gb",
        pci_device_id=0x27B810DE,
    )


def node(key: str = "a100.40gb", count: int = 8, **changes: object) -> nodes.NodeState:
    """Return a node with equal GPUs."""
    return nodes.NodeState(gpus=tuple(gpu(index, key) for index in range(count)), **changes)  # type: ignore[arg-type]
