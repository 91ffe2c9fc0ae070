from __future__ import annotations

import pytest

from agent import errors
from agent.nvml import errors as codes

CODES = (*range(1, 31), 999)


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_words(code: int) -> None:
    error = codes.translate(code, "nvmlDeviceGetMigMode", "GPU-1")
    assert str(error).startswith("cannot read the MIG mode on GPU GPU-1: ")
    assert error.code == code
    assert error.gpu == "GPU-1"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        (1, errors.Unready),
        (2, errors.InvalidArgument),
        (3, errors.NotSupported),
        (4, errors.NoPermission),
        (6, errors.NotFound),
        (13, errors.NotSupported),
        (15, errors.Lost),
        (16, errors.ResetRequired),
        (18, errors.Unready),
        (19, errors.InUse),
        (23, errors.NoRoom),
        (26, errors.NotSupported),
        (28, errors.NotFound),
    ],
)
def test_codes_that_somebody_acts_on_have_a_kind(code: int, kind: type[errors.CallError]) -> None:
    assert type(codes.translate(code, "nvmlDeviceGetName")) is kind


def test_a_code_from_the_future_is_an_error_like_others() -> None:
    error = codes.translate(4711, "nvmlDeviceGetSomethingNew")
    assert type(error) is errors.CallError
    assert "4711" in str(error)


def test_no_meaning_is_told_twice() -> None:
    meanings = [codes.meaning(code) for code in CODES if code not in (5, 22)]
    assert len(set(meanings)) == len(meanings)
