#!/usr/bin/env python3
"""Build gpunode's deb and rpm, for x86_64 and aarch64, from this checkout and the wheels it depends on.

    packaging/build.py tree --arch x86_64 --out DIR       the files as they will lie on the host
    packaging/build.py deb rpm --arch x86_64 --arch aarch64 --out dist
    packaging/build.py constraints                        renew packaging/constraints.txt

One tree serves both formats, so that they cannot differ. Dependencies lie in a private directory with
their .pyc (a start without them takes four times as long); nothing goes into the system's
site-packages. The interpreter is /usr/bin/python3.11: Amazon Linux 2023's python3 stays 3.9 for life.
Needs pip and Python 3.11 (the .pyc are its), dpkg-deb, rpmbuild; the network only for package wheels.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
HERE = ROOT / "packaging"
PYTHON = (3, 11)
GLIBC = 34
"""Wheels may ask for glibc 2.34 at most, which is Amazon Linux 2023's."""
LIBRARY = "/usr/lib/gpunode/python"
DEB_ARCH = {"x86_64": "amd64", "aarch64": "arm64"}
LAUNCHERS = {
    "usr/bin/gpunode": "from agent.__main__ import main\n\nsys.exit(main())\n",
    "usr/libexec/gpunode/after-change": "from agent.host import hooks\n\nsys.exit(hooks.main())\n",
}
DOCUMENTS = ("README.md", "CHANGELOG.md", "docs/operations.md", "docs/cli.md")


def run(*argv: str | Path, cwd: Path | None = None, env: dict[str, str] | None = None) -> str:
    """Run a tool; its output is shown only when it fails."""
    done = subprocess.run(
        [str(word) for word in argv],
        cwd=cwd,
        env={**os.environ, **(env or {})},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        sys.exit(f"build: {argv[0]} failed ({done.returncode}):\n{done.stdout}")
    return done.stdout


def version() -> str:
    """Return the version as agent/__init__.py has it."""
    match = re.search(r'^__version__ = "([^"]+)"', (ROOT / "agent/__init__.py").read_text(), re.MULTILINE)
    assert match is not None
    return match[1]


def requirements() -> list[str]:
    """Return what gpunode needs at run time, with the extras of a node."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return [*project["dependencies"], *extras["kubernetes"], *extras["web"]]


def platforms(arch: str) -> list[str]:
    """Return pip's flags for wheels that run on this architecture with glibc 2.34 and CPython 3.11."""
    tags = [f"manylinux_2_{minor}_{arch}" for minor in range(GLIBC, 4, -1)]
    tags += [f"manylinux2014_{arch}", f"manylinux2010_{arch}", f"manylinux1_{arch}"]
    flags = ["--implementation", "cp", "--python-version", "311", "--only-binary", ":all:"]
    for abi in ("cp311", "abi3", "none"):
        flags += ["--abi", abi]
    for tag in tags:
        flags += ["--platform", tag]
    return flags


def install(target: Path, arch: str) -> None:
    """Put gpunode and everything it needs into `target`, compiled."""
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", "--no-input"]
    constraints = ["--constraint", str(HERE / "constraints.txt")]
    with tempfile.TemporaryDirectory() as temporary:
        wheels = Path(temporary)
        run(*pip, "wheel", "--no-deps", "--wheel-dir", wheels, ROOT)
        (own,) = wheels.glob("gpunode-*.whl")
        run(*pip, "install", "--target", target, "--no-compile", *platforms(arch), *constraints, *requirements())
        run(*pip, "install", "--target", target, "--no-compile", "--no-deps", "--no-index", own)
    shutil.rmtree(target / "bin", ignore_errors=True)
    for pattern in ("*.pyi", "*.c", "*.pyx", "*.pxd", "*.h"):
        for path in target.rglob(pattern):
            path.unlink()
    for path in target.rglob("_testcapi*.so"):
        path.unlink()
    for path in [*target.rglob("tests"), *target.rglob("__pycache__")]:
        if path.is_dir():
            shutil.rmtree(path)
    # pip writes where it came from, which is a path of the build machine.
    for name in ("direct_url.json", "INSTALLER", "REQUESTED", "RECORD"):
        for path in target.glob(f"*.dist-info/{name}"):
            path.unlink()
    if (ROOT / ".git").is_dir():
        (target / "agent/REVISION").write_text(run("git", "-C", ROOT, "rev-parse", "HEAD"))
    for path in target.rglob("*"):
        path.chmod(0o755 if path.is_dir() else 0o644)
    # unchecked-hash: the .pyc counts whatever time the package manager gives the source.
    run(
        interpreter(),
        *("-m", "compileall", "-q", "-j", "0", "--invalidation-mode", "unchecked-hash"),
        *("-s", target, "-p", LIBRARY, target),
    )


def interpreter() -> str:
    """Return a Python 3.11 to compile with: the .pyc of another would not be looked at."""
    if sys.version_info[:2] == PYTHON:
        return sys.executable
    found = shutil.which("python3.11")
    if found is None:
        sys.exit("build: the .pyc must be Python 3.11's; run this with python3.11")
    return found


def tree(root: Path, arch: str) -> None:
    """Lay out everything the packages carry under `root`."""
    root.mkdir(parents=True)
    install(root / LIBRARY.lstrip("/"), arch)
    for place, last in LAUNCHERS.items():
        text = f'#!/usr/bin/python3.11 -I\nimport sys\n\nsys.path.insert(0, "{LIBRARY}")\n{last}'
        put(root / place, text.encode(), mode=0o755)
    units = root / "usr/lib/systemd/system"
    for path in sorted((ROOT / "systemd").iterdir()):
        match path.suffix:
            case ".service" | ".path" | ".socket":
                put(units / path.name, path.read_bytes())
            case ".preset":
                put(root / "usr/lib/systemd/system-preset" / path.name, path.read_bytes())
            case ".sysusers" | ".tmpfiles":
                put(root / f"usr/lib/{path.suffix[1:]}.d/gpunode.conf", path.read_bytes())
    for path in sorted((ROOT / "systemd/drop-ins").rglob("*.conf")):
        put(root / "usr/share/gpunode/drop-ins" / path.relative_to(ROOT / "systemd/drop-ins"), path.read_bytes())
    put(root / "etc/gpunode/config.toml", (HERE / "root/config.toml").read_bytes())
    (root / "etc/gpunode/config.d").mkdir(mode=0o755)
    documents = root / "usr/share/doc/gpunode"
    for name in DOCUMENTS:
        if (ROOT / name).is_file():
            put(documents / Path(name).name, (ROOT / name).read_bytes())
    for path in sorted((ROOT / "bottlerocket/examples").glob("*.toml")):
        put(documents / "examples" / path.name, path.read_bytes())


def put(path: Path, data: bytes, *, mode: int = 0o644) -> None:
    """Write a file with its directories."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    path.chmod(mode)


def at_one_time(root: Path) -> dict[str, str]:
    """Give everything the time of the last commit, so that the same sources give the same package; return
    the environment in which packing tools take it too."""
    stamp = int(os.environ.get("SOURCE_DATE_EPOCH") or run("git", "log", "-1", "--format=%ct", cwd=ROOT))
    for path in [root, *root.rglob("*")]:
        os.utime(path, (stamp, stamp), follow_symlinks=False)
    return {"SOURCE_DATE_EPOCH": str(stamp)}


def deb(arch: str, out: Path) -> Path:
    """Build the deb; return its path."""
    with tempfile.TemporaryDirectory() as temporary:
        root = Path(temporary) / "root"
        tree(root, arch)
        documents = root / "usr/share/doc/gpunode"
        put(documents / "copyright", (HERE / "deb/copyright").read_bytes())
        put(root / "usr/share/lintian/overrides/gpunode", (HERE / "deb/lintian-overrides").read_bytes())
        control = root / "DEBIAN"
        size = sum(path.stat().st_size for path in root.rglob("*") if path.is_file()) // 1024
        text = (HERE / "deb/control").read_text()
        words = {"VERSION": version(), "ARCH": DEB_ARCH[arch], "SIZE": str(size)}
        for key, value in words.items():
            text = text.replace(f"@{key}@", value)
        put(control / "control", text.encode())
        put(control / "conffiles", b"/etc/gpunode/config.toml\n")
        for name in ("postinst", "prerm", "postrm"):
            put(control / name, (HERE / "deb" / name).read_bytes(), mode=0o755)
        sums = run(
            "sh", "-c", "find . -path ./DEBIAN -prune -o -type f -printf '%P\\0' | sort -z | xargs -0 md5sum", cwd=root
        )
        put(control / "md5sums", sums.encode())
        environ = at_one_time(root)
        result = out / f"gpunode_{version()}_{DEB_ARCH[arch]}.deb"
        out.mkdir(parents=True, exist_ok=True)
        run("dpkg-deb", "--build", "--root-owner-group", "-Zxz", root, result, env=environ)
    return result


def rpm(arch: str, out: Path) -> Path:
    """Build the rpm; return its path."""
    with tempfile.TemporaryDirectory() as temporary:
        root, top = Path(temporary) / "root", Path(temporary) / "rpmbuild"
        tree(root, arch)
        put(root / "usr/share/licenses/gpunode/NOTICE", (HERE / "deb/copyright").read_bytes())
        environ = at_one_time(root)
        run(
            "rpmbuild",
            "-bb",
            f"--target={arch}-linux",
            *("--define", f"_topdir {top}"),
            *("--define", f"tree {root}"),
            *("--define", f"gpunode_version {version()}"),
            *("--define", f"_rpmdir {top}/out"),
            HERE / "rpm/gpunode.spec",
            env=environ,
        )
        (built,) = top.glob("out/*/*.rpm")
        out.mkdir(parents=True, exist_ok=True)
        return Path(shutil.copy(built, out / built.name))


def constraints() -> None:
    """Pin what a fresh resolution for both architectures agrees on."""
    pins: dict[str, set[str]] = {}
    for arch in DEB_ARCH:
        with tempfile.TemporaryDirectory() as temporary:
            flags = ["--quiet", "--disable-pip-version-check", "--dest", temporary]
            run(sys.executable, "-m", "pip", "download", *flags, *platforms(arch), *requirements())
            for path in Path(temporary).iterdir():
                name, number = path.name.split("-")[:2]
                pins.setdefault(name.lower().replace("_", "-"), set()).add(number)
    unequal = {name for name, numbers in pins.items() if len(numbers) > 1}
    if unequal:
        sys.exit(f"build: not the same version for both architectures: {', '.join(sorted(unequal))}")
    path = HERE / "constraints.txt"
    head = [line for line in path.read_text().splitlines() if line.startswith("#")]
    path.write_text("\n".join([*head, *(f"{name}=={min(numbers)}" for name, numbers in sorted(pins.items()))]) + "\n")


def main() -> int:
    """Build what the command line names; print the path of each package."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="+", choices=("tree", "deb", "rpm", "constraints"))
    parser.add_argument("--arch", action="append", choices=tuple(DEB_ARCH), help="default: x86_64")
    parser.add_argument("--out", type=Path, default=ROOT / "dist")
    options = parser.parse_args()
    for what in options.what:
        if what == "constraints":
            constraints()
            continue
        for arch in options.arch or ["x86_64"]:
            match what:
                case "tree":
                    tree(options.out, arch)
                case "deb":
                    print(deb(arch, options.out))  # its result
                case "rpm":
                    print(rpm(arch, options.out))  # its result
    return 0


if __name__ == "__main__":
    sys.exit(main())
