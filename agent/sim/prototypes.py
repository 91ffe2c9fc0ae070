"""What each C function of the simulated library takes, and the refusal of what C would not forgive.

A real library gets addresses and trusts them: a short buffer is overrun, an int where a pointer
belongs crashes the process. `Misuse` stands for these. It is no NVMLError on purpose, so that nothing
that handles driver errors can swallow a bug of the caller.
"""

from __future__ import annotations

import ctypes
import dataclasses
import enum
from collections.abc import Callable
from typing import Any

import pynvml

from agent.sim import codes

NVML: Any = pynvml
"""pynvml's ctypes structures, looked up by name: the functions here are typed by them at run time."""
Converter = Callable[[Any], Any]
Body = Callable[..., int | None]
_ByRef: Any = type(ctypes.byref(ctypes.c_int()))
_Pointer: Any = ctypes.POINTER(ctypes.c_int).__mro__[1]  # the base of all pointer types has no public name
_C_INTEGERS = (ctypes.c_uint, ctypes.c_int, ctypes.c_ulonglong, ctypes.c_longlong, ctypes.c_ulong, ctypes.c_long)
_SIZE_OF_VERSION = 0xFFFFFF


class Misuse(Exception):
    """A call that would have crashed the process or overwritten its memory."""


class On(enum.Enum):
    """What the first argument must be a handle of."""

    NOTHING = "no handle"
    GPU = "a GPU"
    MIG = "a MIG device"
    EITHER = "a GPU or MIG device"
    GPU_INSTANCE = "a GPU instance"
    COMPUTE_INSTANCE = "a compute instance"


@dataclasses.dataclass(frozen=True, slots=True)
class Prototype:
    """One exported function: its arguments behind the handle, and what it does.

    `since` is the first driver branch that exports it. `latency` names the entry of the node's
    latencies. `on_mig` is what a MIG handle gets where only a GPU's will do. `unlocked`: it may wait,
    so it runs without the GPU's lock. `uninitialised`: works before nvmlInit. `mutates`: changes the
    partitioning or a setting of the GPU.
    """

    name: str
    on: On
    arguments: tuple[Converter, ...]
    body: Body
    since: int = 0
    latency: str = "read"
    on_mig: int = codes.INVALID_ARGUMENT
    unlocked: bool = False
    uninitialised: bool = False
    mutates: bool = False


PROTOTYPES: dict[str, Prototype] = {}
"""Every function of the library by its C name; `agent.sim.calls` fills it."""


def call(name: str, on: On, *arguments: Converter, **options: Any) -> Callable[[Body], Body]:
    """Enter the decorated function as the body of the C function `name`.

    The body gets the library, what the handle stands for (On.GPU: gpu; MIG: gpu, gi, ci; EITHER: gpu,
    gi or None, ci or None; GPU_INSTANCE: gpu, gi; COMPUTE_INSTANCE: gpu, gi, ci) and the converted
    arguments. It returns None for SUCCESS, or a code, or raises codes.Refused.
    """

    def enter(body: Body) -> Body:
        PROTOTYPES[name] = Prototype(name, on, arguments, body, **options)
        return body

    return enter


def uint(value: Any) -> int:
    """Take an integer, bare or as a ctypes scalar."""
    if type(value) is int:
        return value
    if isinstance(value, _C_INTEGERS):
        return int(value.value)
    raise Misuse(f"an integer belongs here, not {value!r}")


def text(value: Any) -> bytes:
    """Take a C string. None is a null pointer, which the library answers with INVALID_ARGUMENT."""
    if isinstance(value, ctypes.c_char_p):
        value = value.value
    if value is None:
        raise codes.Refused(codes.INVALID_ARGUMENT)
    if not isinstance(value, bytes):
        raise Misuse(f"a C string belongs here, not {value!r}: the process would have crashed")
    return value


def pointed(value: Any) -> Any:
    """Return the ctypes object behind byref(x), pointer(x) or an array; None for a null pointer."""
    if type(value) is _ByRef:
        return value._obj  # noqa: SLF001  # the only way to what byref points at
    if value is None or isinstance(value, ctypes.Array):
        return value
    if isinstance(value, _Pointer):
        return value.contents if value else None
    raise Misuse(f"a pointer belongs here, not {value!r}: the process would have crashed")


def out(kind: Any) -> Converter:
    """Take a pointer to exactly one `kind`, or something laid out alike."""
    size = ctypes.sizeof(kind)
    wants_structure = issubclass(kind, ctypes.Structure)

    def convert(value: Any) -> Any:
        found = value._obj if type(value) is _ByRef else pointed(value)  # noqa: SLF001
        if type(found) is kind:
            return found
        if found is None:
            raise codes.Refused(codes.INVALID_ARGUMENT)
        if ctypes.sizeof(found) < size:
            raise Misuse(
                f"{type(found).__name__} has {ctypes.sizeof(found)} bytes, {kind.__name__} {size}: memory overwritten"
            )
        if isinstance(found, ctypes.Structure) is not wants_structure:
            raise Misuse(f"a pointer to {kind.__name__} belongs here, not to {type(found).__name__}")
        return kind.from_buffer(found)

    return convert


def versioned(*kinds: tuple[int, Any]) -> Converter:
    """Take a pointer to a structure whose first field is a version: one of these (version, structure)."""
    by_version = dict(kinds)

    def convert(value: Any) -> Any:
        found = pointed(value)
        if found is None:
            raise codes.Refused(codes.INVALID_ARGUMENT)
        if not isinstance(found, ctypes.Structure) or not hasattr(found, "version"):
            raise Misuse(f"a pointer to a structure with a version belongs here, not to {type(found).__name__}")
        version = int(found.version)
        kind = by_version.get(version)
        if kind is None:
            raise codes.Refused(codes.ARGUMENT_VERSION_MISMATCH)
        if type(found) is kind:
            return found
        if ctypes.sizeof(found) < ctypes.sizeof(kind):
            raise Misuse(
                f"version {version:#x} has {ctypes.sizeof(kind)} bytes, this structure {ctypes.sizeof(found)}:"
                " memory overwritten"
            )
        return kind.from_buffer(found)

    return convert


def array(kind: Any) -> Converter:
    """Take a pointer to an array of `kind` (byref, the array itself, or one element); None stays None."""

    def convert(value: Any) -> Any:
        found = pointed(value)
        if found is None:
            return None
        if isinstance(found, kind):
            return (kind * 1).from_buffer(found)
        if isinstance(found, ctypes.Array) and found._type_ is kind:  # ctypes' own name for it
            return found
        raise Misuse(f"an array of {kind.__name__} belongs here, not {type(found).__name__}")

    return convert


def buffer(value: Any) -> Any:
    """Take a char buffer; its length comes as the next argument."""
    if isinstance(value, ctypes.Array) and value._type_ is ctypes.c_char:
        return value
    found = pointed(value)
    if isinstance(found, ctypes.Array) and found._type_ is ctypes.c_char:
        return found
    raise Misuse(f"a char buffer belongs here, not {value!r}")


def put_text(into: Any, length: int, value: str) -> None:
    """Write a C string into a buffer of `length`. Raises Refused (7) when it does not fit, Misuse when
    the buffer is shorter than was said."""
    if length > ctypes.sizeof(into):
        raise Misuse(f"the buffer has {ctypes.sizeof(into)} bytes and {length} were announced: memory overwritten")
    data = value.encode()
    if len(data) >= length:
        raise codes.Refused(codes.INSUFFICIENT_SIZE)
    into.value = data


def handle(kind: Any) -> Converter:
    """Take a handle of this pointer type; gives its address (0 for null)."""

    def convert(value: Any) -> int:
        if type(value) is kind:
            return ctypes.c_void_p.from_buffer(value).value or 0  # a pointer object's buffer is the address
        if value is None:
            return 0
        if isinstance(value, ctypes.c_void_p):
            return value.value or 0
        raise Misuse(f"a {kind.__name__} belongs here, not {value!r}: the process would have crashed")

    return convert


def put_handle(into: Any, address: int) -> None:
    """Write a handle."""
    ctypes.c_void_p.from_buffer(into).value = address


def put_handle_field(into: Any, field: str, address: int) -> None:
    """Write a handle into a field of a structure."""
    ctypes.c_void_p.from_buffer(into, getattr(type(into), field).offset).value = address


def fill(into: Any, wanted: int, announced: Any, what: Callable[[Any, int], None]) -> None:
    """Serve the usual pair of count and array: with no array tell the count; with one that is too small
    answer INSUFFICIENT_SIZE; else call `what(array, n)` for each n and set the count."""
    room = announced.value
    announced.value = wanted
    if into is None:
        return
    if room < wanted:
        raise codes.Refused(codes.INSUFFICIENT_SIZE)
    if len(into) < wanted:
        raise Misuse(f"the array has {len(into)} elements and {room} were announced: memory overwritten")
    for number in range(wanted):
        what(into, number)


UINT_OUT = out(ctypes.c_uint)
INT_OUT = out(ctypes.c_int)
ULONGLONG_OUT = out(ctypes.c_ulonglong)
DEVICE = handle(NVML.c_nvmlDevice_t)
DEVICE_OUT = out(NVML.c_nvmlDevice_t)
GPU_INSTANCE = handle(NVML.c_nvmlGpuInstance_t)
COMPUTE_INSTANCE = handle(NVML.c_nvmlComputeInstance_t)
EVENT_SET = handle(NVML.c_nvmlEventSet_t)
GPM_SAMPLE = handle(NVML.c_nvmlGpmSample_t)
