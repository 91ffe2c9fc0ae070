"""Which NVIDIA GPUs are on the PCI bus, whether the driver knows them or not, and whether switches join them."""

from __future__ import annotations

from agent.host import machine as machines

_VENDOR = "0x10de"
_CLASSES = ("0x0300", "0x0302")
_BRIDGE = "0x0680"


def gpus(machine: machines.Machine) -> tuple[str, ...]:
    """Return the PCI addresses (`0000:10:1c.0`) of NVIDIA display and 3D controllers, in order.

    SR-IOV virtual functions are left out. () where sysfs cannot be read.
    """
    found = []
    try:
        devices = sorted(machine.path("/sys/bus/pci/devices").iterdir())
    except OSError:
        return ()
    for device in devices:
        try:
            vendor = (device / "vendor").read_text().strip()
            kind = (device / "class").read_text().strip()
        except OSError:
            continue
        if vendor == _VENDOR and kind[:6] in _CLASSES and not (device / "physfn").exists():
            found.append(device.name)
    return tuple(found)


def switched(machine: machines.Machine) -> bool:
    """Whether NVSwitches are on the bus: then the GPUs of this machine share one fabric, and a reset of one
    is felt by its peers."""
    try:
        devices = list(machine.path("/sys/bus/pci/devices").iterdir())
    except OSError:
        return False
    for device in devices:
        try:
            if (device / "vendor").read_text().strip() == _VENDOR and (device / "class").read_text()[:6] == _BRIDGE:
                return True
        except OSError:
            continue
    return False
