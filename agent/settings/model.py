"""What the operator asked, as values: the options, the declared layout, and where each came from.

The outer shapes (`GpunodeTable` and below) are pydantic models with the keys as people write them;
`Settings` and the declarations are what the rest of gpunode works with. Nothing here does I/O.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic

from agent import errors, records
from agent.mig import profile as profiles

# --- what the rest of gpunode works with ------------------------------------------------------------


@records.dataclass(frozen=True, slots=True)
class Origin:
    """Where a value comes from: the source's name ("default", a file, "environment", "flags", …),
    and file, line (1-based) and key where there are such."""

    source: str
    file: str | None = None
    line: int | None = None
    key: str | None = None

    def __str__(self) -> str:
        if self.file is None:
            return self.source if self.key is None else f"{self.source}, key {self.key}"
        where = self.file if self.line is None else f"{self.file} line {self.line}"
        return where if self.file in self.source else f"{self.source}, {where}"


@records.dataclass(frozen=True, slots=True)
class AfterChange:
    """A command to run after the layout changed, and how long it may take."""

    command: tuple[str, ...]
    timeout_seconds: float = 30.0


@records.dataclass(frozen=True, slots=True)
class ProfileChoice:
    """One line of Bottlerocket's `mig.profile`: for GPUs of model `key`, `profile` as often as it
    fits, or (with `count`) the profile that fits just so often. Exactly one of the two is set."""

    key: str
    profile: profiles.Profile | None
    count: int | None
    origin: Origin


@records.dataclass(frozen=True, slots=True)
class BottlerocketDeclaration:
    """All GPUs are split, each by the line of its model (none: its largest profile, once).

    `from_host` tells that the host's own settings say so, not a document that was handed to us.
    """

    choices: tuple[ProfileChoice, ...]
    origin: Origin
    from_host: bool = False


@records.dataclass(frozen=True, slots=True)
class WantedInstance:
    """`count` GPU instances of `profile`. `profile` may name a compute instance (`1c.3g.20gb`): then
    `count` of these are packed into as few GPU instances as hold them. `compute` and `start` belong
    to single instances (`count` 1)."""

    profile: profiles.Profile
    origin: Origin
    count: int = 1
    start: int | None = None
    compute: tuple[profiles.Profile, ...] = ()


@records.dataclass(frozen=True, slots=True)
class LayoutEntry:
    """One `[[gpunode.layout]]`: exactly one of `gpus` ("all", or indexes, UUIDs and PCI addresses)
    and `model` is set. `selectors` are the origins of the members of a `gpus` list."""

    mig: bool
    origin: Origin
    gpus: Literal["all"] | tuple[int | str, ...] | None = None
    selectors: tuple[Origin, ...] = ()
    model: str | None = None
    instances: tuple[WantedInstance, ...] = ()


@records.dataclass(frozen=True, slots=True)
class LayoutDeclaration:
    """gpunode's own layouts; a GPU may be named by one of them only."""

    entries: tuple[LayoutEntry, ...]
    origin: Origin


@records.dataclass(frozen=True, slots=True)
class DeviceFilter:
    """A device of mig-parted's `device-filter`: PCI device and vendor as 0xDDDDVVVV, and the same of
    the subsystem where it is given."""

    device: int
    subsystem: int | None = None

    def __str__(self) -> str:
        head = f"0x{self.device:08X}"
        return head if self.subsystem is None else f"{head}:0x{self.subsystem:08X}"


@records.dataclass(frozen=True, slots=True)
class MigPartedEntry:
    """One entry of the selected label: which GPUs (filter and index must both match), and what."""

    devices: Literal["all"] | tuple[int, ...]
    mig: bool
    origin: Origin
    filters: tuple[DeviceFilter, ...] = ()
    selectors: tuple[Origin, ...] = ()
    instances: tuple[WantedInstance, ...] = ()


@records.dataclass(frozen=True, slots=True)
class MigPartedDeclaration:
    """A label of a mig-parted document; entries apply in order, so the last that matches a GPU counts."""

    label: str
    entries: tuple[MigPartedEntry, ...]
    origin: Origin


Declaration = BottlerocketDeclaration | LayoutDeclaration | MigPartedDeclaration


@records.dataclass(frozen=True, slots=True)
class BottlerocketView:
    """What the Bottlerocket host itself says about MIG, for deciding whose layout it is.

    `strategy` is its device-partitioning-strategy ("none" when unset); `enabled` whether its device
    plugin is on (off empties the MIG manager's configuration). `source` is the API's socket or the
    manager's file. `problem` is set when it could not be read: then nothing else is to be trusted.
    """

    source: str
    strategy: str = "none"
    enabled: bool = True
    sharing: str = "none"
    profiles: tuple[tuple[str, str], ...] = ()
    problem: str | None = None

    @property
    def partitions(self) -> bool:
        """Whether the host's MIG manager splits the GPUs at boot."""
        return self.enabled and self.strategy == "mig"


@records.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything the operator asked, all sources merged. The defaults are those of an empty node.

    `declaration` is None when nothing is declared. `provenance` says for each key (as written in
    gpunode TOML, and "layout" for the declaration) where it came from; `sources` are those that
    contributed, lowest first; `digest` changes when what is asked changes. `problems` are warnings
    only: errors raise SettingsError before there are settings. Times are seconds.
    """

    enforcement: Literal["observe", "boot", "continuous"] = "boot"
    mode_change: tuple[str, ...] = ("reset",)
    live_mode_change: bool = False
    release_before_reset: tuple[str, ...] = ("nvidia-persistenced.service",)
    on_failure: Literal["rollback", "leave"] = "rollback"
    unlisted_gpus: Literal["ignore", "disable"] = "ignore"
    not_capable: Literal["refuse", "ignore"] = "refuse"
    owner: Literal["auto", "gpunode", "migmanager", "mig-manager", "dra-dynamic"] = "auto"
    allow_mig_on_ecs: bool = False
    after_change: tuple[AfterChange, ...] = ()
    listen: tuple[str, ...] = ()
    web_config_file: Path | None = None
    sample_interval: float = 5.0
    dcgm_metrics: bool = False
    period: float = 60.0
    ec2_user_data: bool = False
    declaration: Declaration | None = None
    bottlerocket: BottlerocketView | None = None
    provenance: Mapping[str, Origin] = dataclasses.field(default_factory=dict)
    sources: tuple[str, ...] = ()
    digest: str = ""
    problems: tuple[errors.Problem, ...] = ()


# --- what people write, key by key ------------------------------------------------------------------

LISTEN = r"^(?:unix:/.+|(?:\[[0-9a-fA-F:.%a-z]+\]|[^:\[\]\s]*):[0-9]{1,5})$"
"""`127.0.0.1:19400`, `[::1]:19400`, `:19400` or `unix:/path`."""
GPU_MODEL = r"^[a-z][a-z0-9_-]*\.[0-9]{1,4}gb$"
"""A model key like `a100.40gb`, a little wider than Bottlerocket's, which grows with each release."""


MANY = 64
"""More instances than any GPU holds; a larger count is a slip and would only cost memory."""
GPU_UUID = re.compile(r"GPU-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", re.ASCII)
PCI_ADDRESS = re.compile(
    r"(?:(?P<domain>[0-9a-fA-F]{4}|[0-9a-fA-F]{8}):)?"
    r"(?P<bus>[0-9a-fA-F]{2}):(?P<device>[0-9a-fA-F]{2})\.(?P<function>[0-7])",
    re.ASCII,
)


def _kebab(name: str) -> str:
    return name.replace("_", "-")


class _Table(pydantic.BaseModel):
    model_config = pydantic.ConfigDict(
        strict=True, frozen=True, extra="forbid", alias_generator=_kebab, defer_build=True
    )


def _is_list(value: Any) -> str:
    return "list" if isinstance(value, list) else "other"


_Seconds = Annotated[float, pydantic.Field(allow_inf_nan=False)]
_Word = Annotated[str, pydantic.Field(min_length=1)]


class AfterChangeTable(_Table):
    """`[[gpunode.after-change]]`."""

    command: Annotated[list[_Word], pydantic.Field(min_length=1)]
    timeout_seconds: Annotated[_Seconds, pydantic.Field(gt=0, le=600)] = 30.0


class InstanceTable(_Table):
    """A member of `instances = [ … ]`."""

    profile: str
    start: Annotated[int, pydantic.Field(ge=0, le=63)] | None = None
    compute: Annotated[list[str], pydantic.Field(min_length=1)] | None = None


class LayoutTable(_Table):
    """`[[gpunode.layout]]`; what its keys mean together is checked in `agent.settings.toml`."""

    gpus: (
        Annotated[
            Annotated[Literal["all"], pydantic.Tag("other")]
            | Annotated[
                list[
                    Annotated[
                        Annotated[Annotated[int, pydantic.Field(ge=0)], pydantic.Tag("index")]
                        | Annotated[str, pydantic.Tag("other")],
                        pydantic.Discriminator(lambda value: "other" if isinstance(value, str) else "index"),
                    ]
                ],
                pydantic.Field(min_length=1),
                pydantic.Tag("list"),
            ],
            pydantic.Discriminator(_is_list),
        ]
        | None
    ) = None
    model: Annotated[str, pydantic.Field(pattern=GPU_MODEL)] | None = None
    mig: bool | None = None
    instances: (
        Annotated[
            Annotated[dict[str, Annotated[int, pydantic.Field(ge=0, le=MANY)]], pydantic.Tag("other")]
            | Annotated[list[InstanceTable], pydantic.Tag("list")],
            pydantic.Discriminator(_is_list),
        ]
        | None
    ) = None


class MigPartedTable(_Table):
    """`[gpunode.mig-parted]`."""

    file: _Word
    config: _Word | None = None


class GpunodeTable(_Table):
    """`[gpunode]`. Defaults are those of `Settings`: only what was written is taken from here."""

    enforcement: Literal["observe", "boot", "continuous"] = "boot"
    mode_change: list[Literal["reset", "reboot"]] = []
    live_mode_change: bool = False
    release_before_reset: list[_Word] = []
    on_failure: Literal["rollback", "leave"] = "rollback"
    unlisted_gpus: Literal["ignore", "disable"] = "ignore"
    not_capable: Literal["refuse", "ignore"] = "refuse"
    owner: Literal["auto", "gpunode", "migmanager", "mig-manager", "dra-dynamic"] = "auto"
    allow_mig_on_ecs: bool = False
    after_change: list[AfterChangeTable] = []
    listen: list[Annotated[str, pydantic.Field(pattern=LISTEN)]] = []
    web_config_file: _Word | None = None
    sample_interval: Annotated[_Seconds, pydantic.Field(ge=0.05, le=3600)] = 5.0
    dcgm_metrics: bool = False
    period: Annotated[_Seconds, pydantic.Field(ge=1, le=86400)] = 60.0
    ec2_user_data: bool = False
    layout: list[LayoutTable] = []
    mig_parted: MigPartedTable | None = None


OPTIONS: tuple[str, ...] = tuple(name for name in GpunodeTable.model_fields if name not in ("layout", "mig_parted"))
"""Field names of the options, in the order of the documentation: the keys with `_` for `-`."""
