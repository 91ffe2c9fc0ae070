"""NVML's return codes as the simulated driver gives them, and the exception that carries one."""

from __future__ import annotations

SUCCESS = 0
UNINITIALIZED = 1
INVALID_ARGUMENT = 2
NOT_SUPPORTED = 3
NO_PERMISSION = 4
NOT_FOUND = 6
INSUFFICIENT_SIZE = 7
DRIVER_NOT_LOADED = 9
TIMEOUT = 10
GPU_IS_LOST = 15
RESET_REQUIRED = 16
LIB_RM_VERSION_MISMATCH = 18
IN_USE = 19
NO_DATA = 21
INSUFFICIENT_RESOURCES = 23
ARGUMENT_VERSION_MISMATCH = 25
DEPRECATED = 26
UNKNOWN = 999

NO_ID = 0xFFFFFFFF
"""The GPU or compute instance id that stands for "none"."""


class Refused(Exception):
    """The driver says no; `code` is what the C function returns."""

    def __init__(self, code: int) -> None:
        self.code = code
        super().__init__(f"NVML return code {code}")
