"""When settings are read again, and that a source which vanishes keeps what it said."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from agent import errors
from agent.settings import model, source, userdata, watch

Write = Callable[..., Path]


@pytest.mark.parametrize(
    ("seen", "loads"),
    [
        ([("a", 0.0), ("a", 5.0)], []),
        ([("b", 0.0), ("b", 0.1), ("b", 0.4), ("b", 9.0)], [0.4]),
        ([("b", 0.0), ("a", 0.1), ("a", 9.0)], []),
        ([("gone", 0.0), ("b", 0.1), ("b", 0.2), ("b", 0.45)], [0.45]),
        ([("b", 0.0), ("c", 0.2), ("d", 0.4), ("e", 0.6), ("f", 0.8), ("g", 1.0), ("h", 1.6)], [1.6]),
        ([("b", 0.0), ("b", 1.0), ("c", 2.0), ("c", 3.0)], [1.0, 3.0]),
        ([("b", 0.0), ("a", 0.1), ("b", 5.0), ("b", 5.1), ("b", 5.4)], [5.4]),
    ],
    ids=[
        "same",
        "held still",
        "back again",
        "a rename dance",
        "never still",
        "two changes",
        "a flicker, then a change",
    ],
)
def test_a_change_counts_once_it_holds_still(seen: list[tuple[str, float]], loads: list[float]) -> None:
    watching = watch.Watch("a")
    assert [now for fingerprint, now in seen if watching.saw(fingerprint, now)] == loads


def test_a_stamp_sees_what_editors_and_mounts_do(tmp_path: Path) -> None:
    """Rename over, write in place with the same length and time, and a link that is turned."""
    path = tmp_path / "config.toml"
    seen = [watch.stamp(path)]
    path.write_text("a")
    seen.append(watch.stamp(path))
    (tmp_path / "new").write_text("a")
    (tmp_path / "new").rename(path)
    seen.append(watch.stamp(path))
    path.write_text("b")
    os.utime(path, ns=(1, 1))
    seen.append(watch.stamp(path))
    assert len(set(seen)) == 4


def test_a_config_map_is_seen_to_turn(tmp_path: Path) -> None:
    """Kubernetes turns the link ..data to another directory; the file's own link stays as it is."""
    for version in ("..1", "..2"):
        (tmp_path / version).mkdir()
        (tmp_path / version / "layout.toml").write_text(f"# {version}\n")
    (tmp_path / "..data").symlink_to("..1")
    (tmp_path / "layout.toml").symlink_to("..data/layout.toml")
    request = source.Request(root=tmp_path / "root", files=(tmp_path / "layout.toml",))
    before = source.fingerprint(request)
    (tmp_path / "..tmp").symlink_to("..2")
    (tmp_path / "..tmp").rename(tmp_path / "..data")
    assert source.fingerprint(request) != before


def keeper(tmp_path: Path, **changes: object) -> watch.Keeper:
    request = source.Request(root=tmp_path / "root", **changes)  # type: ignore[arg-type]
    return watch.Keeper(lambda: source.load(request))


CONFIG = "[gpunode]\nperiod = 5\n"


@pytest.mark.parametrize("how", ["removed", "empty", "comments only"])
def test_a_source_that_vanishes_is_an_error_and_comes_back(write: Write, tmp_path: Path, how: str) -> None:
    path = write("root/etc/gpunode/config.toml", CONFIG)
    load = keeper(tmp_path)
    good = load()
    if how == "removed":
        path.unlink()
    else:
        path.write_text("" if how == "empty" else "# nothing here\n")
    for _ in range(2):
        with pytest.raises(errors.SettingsError) as caught:
            load()
        (problem,) = caught.value.problems
        assert (problem.code, problem.file) == ("source-vanished", str(path))
        assert load.good is good
    path.write_text(CONFIG.replace("5", "6"))
    assert load().period == 6.0


def test_one_drop_in_less_is_a_change_like_any_other(write: Write, tmp_path: Path) -> None:
    write("root/etc/gpunode/config.d/a.toml", CONFIG)
    path = write("root/etc/gpunode/config.d/b.toml", "[gpunode]\nperiod = 6\n")
    load = keeper(tmp_path)
    assert load().period == 6.0
    path.unlink()
    assert load().period == 5.0


def test_a_bad_document_says_so_and_changes_nothing(write: Write, tmp_path: Path) -> None:
    path = write("root/etc/gpunode/config.toml", CONFIG)
    load = keeper(tmp_path)
    good = load()
    path.write_text("[gpunode\n")
    with pytest.raises(errors.SettingsError, match="not valid TOML"):
        load()
    assert load.good is good


def test_ec2_user_data_that_is_switched_off_has_not_vanished(write: Write, tmp_path: Path) -> None:
    mime = 'Content-Type: multipart/mixed; boundary="B"\n\n--B\nContent-Type: application/gpunode+toml\n\n'
    write("root/" + userdata.EC2_FILE, mime + CONFIG + "--B--\n")
    path = write("root/etc/gpunode/config.toml", "[gpunode]\nec2-user-data = true\n")
    load = keeper(tmp_path)
    assert load().period == 5.0
    path.write_text("[gpunode]\nec2-user-data = false\n")
    assert load().period == 60.0


def test_each_source_that_vanished_is_told_once() -> None:
    good = model.Settings(sources=("/etc/gpunode/config.d/a.toml", "/etc/gpunode/config.toml", "Bottlerocket API /s"))
    gone = watch.vanished(good, model.Settings())
    assert [problem.file for problem in gone] == ["/etc/gpunode/config.d/a.toml", "Bottlerocket API /s"]
