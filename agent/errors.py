"""Every error gpunode raises on purpose, and the exit code each one ends a command with.

    GpunodeError                    1  something failed
    +-- UsageError                  2  the command line is off
    +-- SettingsError               2  a settings document is wrong, or asks what no such GPU can hold
    +-- BlockedError                4  right, but not now or not here: in use, not owner, reset needed
    |   +-- ResetRefused            4  a GPU reset did not happen; `holders` says who has the GPU
    +-- DriverError                 5  no driver, or no access to it
    +-- CallError                   1  one NVML call failed; `code` is NVML's
        +-- NotSupported            1  this GPU or driver does not have it (codes 3, 13, 26)
        +-- NotFound                1  no such GPU, instance or index (6, 28)
        +-- InvalidArgument         1  stale handle or past the end of a list (2)
        +-- InUse                   4  somebody holds it (19)
        +-- NoRoom                  1  the placement is occupied or capacity ran out (23)
        +-- NoPermission            5  needs root (4)
        +-- Lost                    1  the GPU fell off the bus (15)
        +-- ResetRequired           4  (16)
        +-- Unready                 5  uninitialised, driver gone, version mismatch (1, 9, 12, 18)
        +-- Hung                    1  a call ran past its deadline and has not come back

Texts read "cannot <what> on GPU <which>: <cause>". Nothing may be decided by matching a text.
This module is imported by every start of the command, so it imports nothing.
"""

EXIT_OK = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_DRIFT = 3
EXIT_BLOCKED = 4
EXIT_NO_DRIVER = 5


class GpunodeError(Exception):
    """Base of all errors raised on purpose; `str()` is what a person reads."""

    exit_code = EXIT_FAILED


class UsageError(GpunodeError):
    """The command line cannot be understood."""

    exit_code = EXIT_USAGE


class Problem:
    """One thing wrong (or doubtful) in what the operator wrote.

    `severity` is "error" or "warning"; `code` is stable for scripts; `file`, `line` (1-based) and
    `key` (dotted path) are None where they do not apply.
    """

    __slots__ = ("code", "file", "key", "line", "message", "severity")

    def __init__(
        self,
        severity: str,
        code: str,
        message: str,
        *,
        file: str | None = None,
        line: int | None = None,
        key: str | None = None,
    ) -> None:
        self.severity = severity
        self.code = code
        self.message = message
        self.file = file
        self.line = line
        self.key = key

    @property
    def is_error(self) -> bool:
        """Whether this stops the document from being used."""
        return self.severity == "error"

    def where(self) -> str:
        """Return "file, line 3, key a.b", with the parts that are known; "" when none is."""
        parts = []
        if self.file is not None:
            parts.append(self.file)
        if self.line is not None:
            parts.append(f"line {self.line}")
        if self.key is not None:
            parts.append(f"key {self.key}")
        return ", ".join(parts)

    def __str__(self) -> str:
        where = self.where()
        return f"{where}: {self.message}" if where else self.message

    def __repr__(self) -> str:
        return f"Problem({self.severity!r}, {self.code!r}, {str(self)!r})"

    def _fields(self) -> tuple[object, ...]:
        return (self.severity, self.code, self.message, self.file, self.line, self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Problem) and self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash(self._fields())


class SettingsError(GpunodeError):
    """The settings cannot be used; `problems` holds every one found, warnings included."""

    exit_code = EXIT_USAGE

    def __init__(self, problems: "tuple[Problem, ...]") -> None:
        self.problems = problems
        super().__init__("\n".join(str(p) for p in problems if p.is_error))


class BlockedError(GpunodeError):
    """What was asked is right, but cannot be done now or not on this node."""

    exit_code = EXIT_BLOCKED


class ResetRefused(BlockedError):
    """A GPU reset was refused or is impossible; `holders` are words naming who holds the GPU."""

    def __init__(self, message: str, holders: "tuple[str, ...]" = ()) -> None:
        self.holders = holders
        super().__init__(message)


class DriverError(GpunodeError):
    """There is no NVIDIA driver here, or this process may not use it."""

    exit_code = EXIT_NO_DRIVER


class CallError(GpunodeError):
    """One NVML call failed. `call` is its name, `code` NVML's return code, `gpu` the UUID or None."""

    def __init__(self, message: str, *, call: str, code: int, gpu: str | None = None) -> None:
        self.call = call
        self.code = code
        self.gpu = gpu
        super().__init__(message)


class NotSupported(CallError):
    """The GPU, the mode it is in, or the driver does not offer this."""


class NotFound(CallError):
    """What was asked for does not exist."""


class InvalidArgument(CallError):
    """The driver does not know the argument: a stale handle, or past the end of a list."""


class InUse(CallError):
    """Another client holds it."""

    exit_code = EXIT_BLOCKED


class NoRoom(CallError):
    """Insufficient resources: the placement is occupied, or the capacity is used up."""


class NoPermission(CallError):
    """The call needs root."""

    exit_code = EXIT_NO_DRIVER


class Lost(CallError):
    """The GPU has fallen off the bus."""


class ResetRequired(CallError):
    """The GPU answers nothing useful before it is reset."""

    exit_code = EXIT_BLOCKED


class Unready(CallError):
    """The library is not initialised, or the driver is absent, gone or another version."""

    exit_code = EXIT_NO_DRIVER


class Hung(CallError):
    """A call did not come back before its deadline; its GPU takes no new work until it does."""
