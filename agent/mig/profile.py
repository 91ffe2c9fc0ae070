"""A MIG profile and its name: `1g.10gb`, `1g.10gb+me`, `1c.3g.40gb`, `1g.24gb-me`.

A name identifies a profile only together with a GPU: `1g.10gb` is the base profile of an 80 GB part
and the double-memory one of a 40 GB part. So profiles are resolved against one GPU's offers.
"""

from __future__ import annotations

import dataclasses
import re

from agent import records

_GRAMMAR = re.compile(
    r"(?:(?P<c>[0-9]{1,2})c\.)?(?P<g>[0-9]{1,2})g\.(?P<gb>[0-9]{1,4})gb(?:(?P<sign>[+-])(?P<attrs>.+))?",
    re.ASCII,
)
_ATTRIBUTE = re.compile(r"[a-z](?:[a-z0-9]|\.(?=[a-z0-9]))*", re.ASCII)


class ProfileSyntaxError(ValueError):
    """The text is not a profile name; the message says what is off and shows a valid one."""


@records.dataclass(frozen=True, slots=True)
class Profile:
    """A profile of a GPU instance, or (with `compute_slices`) of a compute instance within one.

    `compute_slices` is None where the compute instance spans the whole GPU instance. It may equal
    `gpu_slices` and still name something else: `1c.1g.20gb` of Hopper has 16 SMs, `1g.20gb` 26.
    `attributes` are the words behind a plus sign, `without` those behind a minus, in written order.
    """

    gpu_slices: int
    memory_gb: int
    compute_slices: int | None = None
    attributes: tuple[str, ...] = ()
    without: tuple[str, ...] = ()

    def __str__(self) -> str:
        head = "" if self.compute_slices is None else f"{self.compute_slices}c."
        tail = ""
        if self.attributes:
            tail = "+" + ",".join(self.attributes)
        elif self.without:
            tail = "-" + ",".join(self.without)
        return f"{head}{self.gpu_slices}g.{self.memory_gb}gb{tail}"

    @property
    def gpu_instance(self) -> Profile:
        """The profile of the GPU instance this belongs to (itself, if it is one)."""
        return self if self.compute_slices is None else dataclasses.replace(self, compute_slices=None)

    @property
    def is_gpu_instance(self) -> bool:
        """Whether this names a whole GPU instance and not a part of its compute."""
        return self.compute_slices is None

    def part(self, compute_slices: int) -> Profile:
        """Return the profile of a compute instance of `compute_slices` within this GPU instance."""
        return dataclasses.replace(self, compute_slices=compute_slices)


def parse(text: str) -> Profile:
    """Read a profile name as nvidia-smi and mig-parted write it.

    Raises ProfileSyntaxError when `text` is none.
    """
    match = _GRAMMAR.fullmatch(text)
    if match is None:
        raise ProfileSyntaxError(f'"{text}" is not a MIG profile name (like 1g.10gb, 1c.3g.40gb or 1g.10gb+me)')
    words: tuple[str, ...] = ()
    if match["sign"]:
        words = tuple(match["attrs"].split(","))
        for word in words:
            if _ATTRIBUTE.fullmatch(word) is None:
                why = f'"{word}" is no attribute (like me, gfx or me.all)'
                raise ProfileSyntaxError(f'"{text}" is not a MIG profile name: {why}')
        if len(set(words)) != len(words):
            raise ProfileSyntaxError(f'"{text}" is not a MIG profile name: an attribute is given twice')
    slices = int(match["g"])
    compute = None if match["c"] is None else int(match["c"])
    if slices == 0 or compute == 0:
        raise ProfileSyntaxError(f'"{text}" is not a MIG profile name: slices count from 1')
    if compute is not None and compute > slices:
        raise ProfileSyntaxError(f'"{text}" is not a MIG profile name: {compute} compute slices do not fit in {slices}')
    plus = match["sign"] == "+"
    return Profile(
        gpu_slices=slices,
        memory_gb=int(match["gb"]),
        compute_slices=compute,
        attributes=words if plus else (),
        without=() if plus else words,
    )


def name_gb(instance_mib: int, total_bytes: int) -> int:
    """Return the gigabytes that a profile's name carries, by the naming rule of go-nvlib.

    Eighths of the GPU, rounded up, times its size in GiB, rounded half up: integers throughout, as
    Python's `round` goes to even and would make 70 of H200's 71.
    """
    eighths = -(-8 * instance_mib * 2**20 // total_bytes)
    gib = -(-total_bytes // 2**30)
    return (2 * eighths * gib + 8) // 16
