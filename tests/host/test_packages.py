"""deb and rpm of both architectures: what is in them, that they run, upgrade and go."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent import __version__
from tests.host import nspawn

pytestmark = pytest.mark.full
ROOT = Path(__file__).resolve().parents[2]
ARCHES = {"x86_64": "amd64", "aarch64": "arm64"}
HERE = os.uname().machine
# What the linters say and why it stays.
LINTIAN = {
    "bogus-mail-host": "the project has no mail address; whoever distributes the deb puts theirs",
    "no-changelog": "CHANGELOG.md is there, not in Debian's form: this is no package of Debian's",
    "package-installs-python-pycache-dir": "a start without bytecode takes four times as long, and /usr is not to be written to",
    "unstripped-binary-or-object": "wheels are taken as their authors built them",
    "maintainer-script-calls-systemctl": "debhelper's snippets reload and restart, which must not be on a live node",
    "no-manual-page": "`gpunode VERB --help` and /usr/share/doc/gpunode tell it all",
    "unusual-interpreter": "python3.11 by name, as Amazon Linux 2023's python3 is another; libraries' own first lines",
}
RPMLINT = {
    "no-changelogname-tag": "CHANGELOG.md is there",
    "no-group-tag": "Amazon Linux has no groups",
    "no-packager-tag": "whoever distributes it puts theirs",
    "no-signature": "likewise",
    "no-url-tag": "there is no home page yet",
    "no-manual-page-for-binary": LINTIAN["no-manual-page"],
    "non-executable-script": "libraries' own first lines",
    "hidden-file-or-dir": "libraries' own files",
    "files-duplicate": "licences of libraries",
    "unstripped-binary-or-object": LINTIAN["unstripped-binary-or-object"],
    "invalid-license": "Apache-2.0 is SPDX's name; Debian's rpmlint knows an older list",
}


def tools(*names: str) -> None:
    missing = [name for name in names if shutil.which(name) is None]
    if missing:
        pytest.skip(f"SKIPPED: {', '.join(missing)} not installed")


def run(*argv: str | Path, code: int | None = 0, seconds: float = 600) -> str:
    done = subprocess.run(
        [str(word) for word in argv],
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
        env={**os.environ, "SOURCE_DATE_EPOCH": "1780000000"},
    )
    assert code is None or done.returncode == code, f"{argv}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
    return done.stdout + done.stderr


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    tools("dpkg-deb", "rpmbuild")
    out = tmp_path_factory.mktemp("dist")
    words = [word for arch in ARCHES for word in ("--arch", arch)]
    run(sys.executable, ROOT / "packaging/build.py", "deb", "rpm", *words, "--out", out, seconds=1200)
    return out


def deb(built: Path, arch: str) -> Path:
    return built / f"gpunode_{__version__}_{ARCHES[arch]}.deb"


def rpm(built: Path, arch: str) -> Path:
    return built / f"gpunode-{__version__}-1.{arch}.rpm"


@pytest.fixture(scope="module", params=list(ARCHES))
def unpacked(request: pytest.FixtureRequest, built: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, Path]:
    target = tmp_path_factory.mktemp(request.param)
    run("dpkg-deb", "--extract", deb(built, request.param), target)
    return request.param, target


def test_extension_modules_are_this_pythons_for_this_machine_and_old_enough_a_glibc(unpacked: tuple[str, Path]) -> None:
    arch, root = unpacked
    modules = sorted(path for path in root.rglob("*") if re.search(r"\.so(\.|$)", path.name))
    assert modules
    highest = 0
    for path in modules:
        assert f"cpython-311-{arch}-linux-gnu" in path.name or ".abi3." in path.name, path
        text = run("readelf", "--file-header", "--version-info", "--wide", path)
        assert {"x86_64": "X86-64", "aarch64": "AArch64"}[arch] in text, path
        found = [int(minor) for minor in re.findall(r"Name: GLIBC_2\.(\d+)", text)]
        highest = max([highest, *found])
    assert 0 < highest <= 34


def test_nothing_lies_in_the_systems_own_python(unpacked: tuple[str, Path]) -> None:
    _, root = unpacked
    tops = {path.relative_to(root).parts[:3] for path in root.rglob("*") if path.is_file()}
    assert {parts[:2] for parts in tops} == {
        ("etc", "gpunode"),
        ("usr", "bin"),
        ("usr", "lib"),
        ("usr", "libexec"),
        ("usr", "share"),
    }
    assert {parts[2] for parts in tops if parts[:2] == ("usr", "lib")} == {
        "gpunode",
        "systemd",
        "sysusers.d",
        "tmpfiles.d",
    }
    assert not list(root.rglob("site-packages"))


def test_every_module_has_its_bytecode(unpacked: tuple[str, Path]) -> None:
    _, root = unpacked
    library = root / "usr/lib/gpunode/python"
    for path in library.joinpath("agent").rglob("*.py"):
        assert (path.parent / "__pycache__" / f"{path.stem}.cpython-311.pyc").is_file(), path


def test_deb_and_rpm_hold_the_same_files(built: Path) -> None:
    own = {
        "usr/share/doc/gpunode/copyright",
        "usr/share/lintian/overrides/gpunode",
        "usr/share/licenses/gpunode/NOTICE",
    }
    in_deb = {
        line.split(None, 5)[5].removeprefix("./")
        for line in run("dpkg-deb", "--contents", deb(built, HERE)).splitlines()
        if line.startswith("-")
    }
    tools("rpm")
    in_rpm = {
        line.split()[-1].lstrip("/")
        for line in run("rpm", "-qp", "--qf", "[%{FILEMODES:perms} %{FILENAMES}\n]", rpm(built, HERE)).splitlines()
        if line.startswith("-")
    }
    assert in_deb - own == in_rpm - own


def test_no_scriptlet_restarts_or_reloads(built: Path, tmp_path: Path) -> None:
    run("dpkg-deb", "--control", deb(built, HERE), tmp_path / "control")
    texts = [path.read_text() for path in (tmp_path / "control").iterdir() if path.name.startswith(("post", "pre"))]
    texts.append(run("rpm", "-qp", "--scripts", rpm(built, HERE)))
    assert len(texts) == 4
    for text in texts:
        code = "\n".join(line for line in text.splitlines() if not line.lstrip().startswith("#"))
        assert "daemon-reload" not in code
        assert not re.search(r"systemctl[^\n]*(?<![-\w])(restart|try-restart|reload|start)\b", code)
        for call in re.findall(r"systemctl[^\n|;&]*(?:preset|disable|enable)[^\n]*", code):
            assert "--no-reload" in call


def test_settings_are_kept_by_both(built: Path) -> None:
    assert run("dpkg-deb", "--info", deb(built, HERE), "conffiles").split() == ["/etc/gpunode/config.toml"]
    assert run("rpm", "-qp", "--configfiles", rpm(built, HERE)).split() == ["/etc/gpunode/config.toml"]


def test_the_same_sources_give_the_same_deb(built: Path, tmp_path: Path) -> None:
    run(sys.executable, ROOT / "packaging/build.py", "deb", "--arch", HERE, "--out", tmp_path)
    assert deb(tmp_path, HERE).read_bytes() == deb(built, HERE).read_bytes()


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Path]:
    """A root with Python 3.11 in it, which stands for Amazon Linux 2023 as far as it can."""
    why = nspawn.why_not()
    if why is not None:
        pytest.skip(f"SKIPPED: no root to install into: {why}")
    overlay = nspawn.Overlay([nspawn.base()], tmp_path / "overlay")
    yield overlay.root
    overlay.close()


def main_job(root: Path) -> None:
    settings = "/usr/share/doc/gpunode/examples/p4d-uniform.toml"
    node = ("--simulate", "p4d.24xlarge", "--sim-state", "/tmp/node")
    run("chroot", root, "gpunode", "apply", "--yes", *node, "--settings", settings)
    assert '"nvidia.com/gpu": 24' in run("chroot", root, "gpunode", "resources", *node, "--output", "json")


class TestRpm:
    """`rpm --root`; --nodeps as the root's Python is no rpm."""

    def rpm(self, root: Path, *words: str | Path, code: int = 0) -> str:
        return run("rpm", "--root", root, "--dbpath", "/var/lib/rpm-test", *words, code=code)

    def test_it_installs_runs_upgrades_and_goes(self, built: Path, root: Path) -> None:
        tools("rpm")
        self.rpm(root, "--install", "--nodeps", rpm(built, HERE))
        assert (root / "etc/systemd/system/multi-user.target.wants/gpunode.service").is_symlink()
        assert (root / "etc/systemd/system/paths.target.wants/gpunode-reboot.path").is_symlink()
        assert not (root / "etc/systemd/system/multi-user.target.wants/gpunode-ready.service").is_symlink()
        assert "gpunode:" in (root / "etc/group").read_text()
        main_job(root)
        config = root / "etc/gpunode/config.toml"
        config.write_text("# mine\n")
        (root / "etc/systemd/system/paths.target.wants/gpunode-reboot.path").unlink()
        self.rpm(root, "--upgrade", "--nodeps", "--replacepkgs", "--replacefiles", rpm(built, HERE))
        assert config.read_text() == "# mine\n"
        assert not (root / "etc/systemd/system/paths.target.wants/gpunode-reboot.path").is_symlink(), (
            "what was disabled stays so"
        )
        assert (root / "etc/systemd/system/multi-user.target.wants/gpunode.service").is_symlink()
        assert self.rpm(root, "--verify", "--nodeps", "gpunode", code=1).split()[-1] == "/etc/gpunode/config.toml"
        self.rpm(root, "--erase", "gpunode")
        assert not (root / "usr/bin/gpunode").exists()
        assert not (root / "usr/lib/gpunode").exists()
        assert not (root / "etc/systemd/system/multi-user.target.wants/gpunode.service").is_symlink()
        assert (root / "etc/gpunode/config.toml.rpmsave").read_text() == "# mine\n"


class TestDeb:
    def test_it_installs_runs_upgrades_and_goes(self, built: Path, root: Path) -> None:
        shutil.copy(deb(built, HERE), root / "gpunode.deb")
        run("chroot", root, "dpkg", "--install", "/gpunode.deb")
        assert (root / "etc/systemd/system/multi-user.target.wants/gpunode.service").is_symlink()
        main_job(root)
        config = root / "etc/gpunode/config.toml"
        config.write_text("# mine\n")
        (root / "etc/systemd/system/paths.target.wants/gpunode-reboot.path").unlink()
        run("chroot", root, "dpkg", "--install", "/gpunode.deb")
        assert config.read_text() == "# mine\n"
        assert not (root / "etc/systemd/system/paths.target.wants/gpunode-reboot.path").is_symlink()
        run("chroot", root, "dpkg", "--remove", "gpunode")
        assert config.read_text() == "# mine\n"
        assert not (root / "usr/bin/gpunode").exists()
        run("chroot", root, "dpkg", "--purge", "gpunode")
        assert not config.parent.exists()


def test_lintian_has_nothing_unexplained(built: Path) -> None:
    tools("lintian")
    text = run("lintian", "--allow-root", "--tag-display-limit", "0", deb(built, HERE), code=None)
    tags = {match[1] for line in text.splitlines() if (match := re.match(r"[EW]: gpunode: (\S+)", line))}
    assert tags <= set(LINTIAN), text[-3000:]


def test_rpmlint_has_nothing_unexplained(built: Path) -> None:
    tools("rpmlint")
    text = run("rpmlint", rpm(built, HERE), code=None)
    tags = {match[1] for line in text.splitlines() if (match := re.match(r"\S+: [EW]: (\S+)", line))}
    assert tags <= set(RPMLINT), text[-3000:]
