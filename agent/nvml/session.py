"""The library session: find libnvidia-ml, load it, initialise, and let go of it around a reset.

pynvml loads the library once a process and keeps it. So the right file is loaded first, by its full
path: a library already loaded under the same soname is the one pynvml then gets.
"""

from __future__ import annotations

import ctypes
import platform
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pynvml

from agent import errors, log, measures
from agent.nvml import calls

NAME = "libnvidia-ml.so.1"
_DIRECTORIES = (
    "usr/lib64",
    "usr/lib",
    "usr/lib/nvidia/tesla",  # Bottlerocket before 1.63
    "usr/lib/{machine}-linux-gnu",
    "{machine}-bottlerocket-linux-gnu/sys-root/usr/lib",
    "{machine}-bottlerocket-linux-gnu/sys-root/usr/lib/nvidia/tesla",
    "opt/nvidia/current/lib64",  # Amazon Linux 2023 images that carry two drivers
    "opt/nvidia/lts/lib64",
    "opt/nvidia/pb/lib64",
    "usr/local/nvidia/lib64",
    "run/nvidia/driver/usr/lib64",
)
_MISMATCH = 18  # NVML_ERROR_LIB_RM_VERSION_MISMATCH
_ROOTS = ("", ".bottlerocket/rootfs", "host")
_VERSION = re.compile(r"(?:Module|for \w+)\s+([0-9]+\.[0-9]+(?:\.[0-9]+)?)", re.ASCII)


def driver_version(root: Path) -> str | None:
    """Return the version of the loaded kernel module by /proc/driver/nvidia/version, None without one."""
    try:
        text = (root / "proc/driver/nvidia/version").read_text(errors="replace")
    except OSError:
        return None
    found = _VERSION.search(text)
    return found[1] if found else None


def candidates(root: Path, machine: str) -> Iterator[Path]:
    """Yield every place where a library could lie that is there, in the order of preference."""
    for base in _ROOTS:
        for directory in _DIRECTORIES:
            path = root / base / directory.format(machine=machine) / NAME
            if path.exists():
                yield path


def choose(root: Path, machine: str) -> Path | None:
    """Return the library to load: the one whose version is the kernel module's, else the first."""
    version = driver_version(root)
    first = None
    for path in candidates(root, machine):
        first = first or path
        # The soname is a link to libnvidia-ml.so.<version>.
        if version is not None and path.resolve().name.endswith(f".so.{version}"):
            return path
    return first


class Session:
    """One initialised library at a time. Thread-safe.

    `library` stands in for the real one (the simulator). `root` is where the host's files lie.
    """

    def __init__(self, library: object | None = None, *, root: Path = Path("/")) -> None:
        self._library = library
        self._root = root
        self._lock = threading.Lock()
        self._open = False
        self.epoch = 0
        """Rises with every opening: handles of an older epoch are dead."""
        self.versions: measures.Versions | None = None
        """Versions of the opened library; None while it is closed."""
        self.initializations = 0
        self._loaded_for: str | None = None
        self._loaded: Path | None = None
        self._mismatched = False

    @property
    def is_open(self) -> bool:
        """Whether the library is initialised."""
        return self._open

    def open(self) -> None:
        """Load and initialise the library; nothing happens when it is open already.

        Raises errors.DriverError with one sentence.
        """
        with self._lock:
            if not self._open:
                self._initialise()
            if self.versions is None:
                self.versions = measures.Versions(
                    driver=_text("nvmlSystemGetDriverVersion"), nvml=_text("nvmlSystemGetNVMLVersion"), cuda=_cuda()
                )

    def _initialise(self) -> None:
        self._load()
        try:
            calls.call("nvmlInit")
        except errors.CallError as cause:
            self._mismatched = cause.code == _MISMATCH
            raise errors.DriverError(self._no_driver(cause)) from cause
        except calls.Abandoned as given_up:
            # The library counts its openings: one that came late and is not closed again would keep
            # every GPU in use, and be in the way of each reset as long as this process lives.
            if given_up.done:
                self._opened()
            raise
        self._opened()

    def _opened(self) -> None:
        self._open = True
        self._loaded_for = self._loaded_for or driver_version(self._root)
        self.initializations += 1
        self.epoch += 1

    def driver_changed(self) -> bool:
        """Whether the kernel module is another one than when the library was loaded. A process cannot
        take another library then: it has to start anew."""
        if self._library is not None:
            return False
        now = driver_version(self._root)
        if self._loaded_for is not None:
            return now is not None and now != self._loaded_for
        if not self._mismatched or self._loaded is None:
            return False
        # Never initialised, as the versions differ: another library that fits has come, and only it helps.
        chosen = choose(self._root, platform.machine())
        there = None if chosen is None else chosen.resolve()
        return there is not None and there != self._loaded and now is not None and there.name.endswith(f".so.{now}")

    def close(self) -> None:
        """Shut the library down; every handle dies with it."""
        with self._lock:
            if not self._open:
                return
            self._open = False
            self.versions = None
            try:
                calls.call("nvmlShutdown")
            except errors.CallError as cause:
                log.debug("shutting the library down failed", cause=cause)

    def _load(self) -> None:
        if self._library is not None:
            if pynvml.nvmlLib is not self._library:
                pynvml.nvmlLib = self._library
                # pynvml keeps the functions of the library it had before.
                pynvml._nvmlGetFunctionPointer_cache.clear()  # noqa: SLF001
            return
        if pynvml.nvmlLib is not None:
            return
        path = choose(self._root, platform.machine())
        if path is None:
            return  # the loader's own search is left to pynvml
        try:
            ctypes.CDLL(str(path))
            self._loaded = path.resolve()
        except OSError as cause:
            log.warning("a driver library cannot be loaded", path=path, cause=cause)

    def _no_driver(self, cause: errors.CallError) -> str:
        """Say in one sentence why there is nothing to talk to."""
        match cause.code:
            case 12:
                return f"there is no NVIDIA driver here: {NAME} was not found"
            case 9:
                return "there is no NVIDIA driver here: its library is installed, its kernel module is not loaded"
            case code if code == _MISMATCH:
                return (
                    "the NVIDIA driver cannot be used: kernel module and library have different versions, "
                    "as after an update without reboot"
                )
            case 4:
                return "the NVIDIA driver cannot be used: this process may not open its device files"
            case _:
                return f"the NVIDIA driver cannot be used: {cause}"


def _text(name: str) -> str:
    try:
        return str(calls.call(name))
    except errors.CallError:
        return ""


def _cuda() -> str:
    try:
        number = int(calls.call("nvmlSystemGetCudaDriverVersion_v2"))
    except errors.CallError:
        return ""
    return f"{number // 1000}.{number % 1000 // 10}"
