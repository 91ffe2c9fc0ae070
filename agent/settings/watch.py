"""When to read the settings again, and what a reload may not do.

A fingerprint is cheap: it stats files and never opens them. Editors and ConfigMap mounts do not
write in place: they rename a new file over the old, or turn a symbolic link, and in between the
file may be missing. So a stamp follows links and takes device, inode, size and both times; and a
change counts once it has held still for a moment.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path

from agent import errors
from agent.settings import model

STILL = 0.3
"""Seconds a change must hold still before it is read; a rename dance takes milliseconds."""
AT_MOST = 1.5
"""Seconds after which a change is read even if it keeps moving."""


def stamp(path: Path) -> str:
    """Return a text that changes when the file or directory at `path` does, whichever way."""
    try:
        found = path.stat()
    except OSError as cause:
        return f"{path} errno {cause.errno}"
    except ValueError:
        return f"{path} unusable"
    return (
        f"{path} {found.st_dev} {found.st_ino} {found.st_size} {found.st_mtime_ns} {found.st_ctime_ns} {found.st_mode}"
    )


def stamps(paths: Iterable[Path]) -> list[str]:
    """Return the stamps of several paths, each once, in order."""
    return [stamp(path) for path in dict.fromkeys(paths)]


@dataclasses.dataclass(slots=True)
class Watch:
    """Decides from fingerprints when to load. Pure: fingerprints and times (seconds) are handed in.

    `loaded` is the fingerprint of what is in force.
    """

    loaded: str
    still: float = STILL
    at_most: float = AT_MOST
    _last: str = ""
    _since: float = 0.0
    _first: float | None = None

    def saw(self, fingerprint: str, now: float) -> bool:
        """Take note of a fingerprint; return whether to load now. Loading makes it the loaded one."""
        if fingerprint == self.loaded:
            self._first = None
            return False
        if self._first is None:
            self._first = now
            self._last = ""
        if fingerprint != self._last:
            self._last = fingerprint
            self._since = now
        if now - self._since < self.still and now - self._first < self.at_most:
            return False
        self.loaded = fingerprint
        self._first = None
        return True


def vanished(good: model.Settings, fresh: model.Settings) -> tuple[errors.Problem, ...]:
    """Return an error for each source that had a say in `good` and has none in `fresh`.

    A drop-in that is removed while other configuration files stay is a change like any other; a
    source that is gone or empty as a whole is an accident until somebody says otherwise.
    """
    left = {_group(source) for source in fresh.sources}
    problems = []
    for source in good.sources:
        if _group(source) in left or (_is_ec2(source) and not fresh.ec2_user_data):
            continue
        message = "has vanished or is empty; what it said stays in force until gpunode is restarted"
        problems.append(errors.Problem("error", "source-vanished", message, file=source))
        left.add(_group(source))
    return tuple(problems)


def _group(source: str) -> str:
    """Return what counts as one source: config.toml and its drop-ins do."""
    path = Path(source)
    if path.name == "config.toml" or path.parent.name == "config.d":
        return "configuration files"
    return source


def _is_ec2(source: str) -> bool:
    return source.startswith("EC2 user data")


@dataclasses.dataclass(slots=True)
class Keeper:
    """Loads settings, and refuses a load in which a source has vanished since the last good one.

    To be called by a daemon in place of `source.load`: the SettingsError makes it keep what was good.
    """

    load: Callable[[], model.Settings]
    good: model.Settings | None = None

    def __call__(self) -> model.Settings:
        """Return the settings as they are now. Raises SettingsError."""
        fresh = self.load()
        if self.good is not None:
            gone = vanished(self.good, fresh)
            if gone:
                raise errors.SettingsError((*gone, *fresh.problems))
        self.good = fresh
        return fresh
