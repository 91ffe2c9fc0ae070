"""`gpunode support`: what a bug report needs, in one file, with nothing secret in it.

What goes in: versions, the settings as they were understood and where each came from, status, plan
and profiles, what gpunode remembers over boots, the log's tail (with the last cycles in it), and
what a running daemon answers. What stays out: the settings documents themselves (user data may
hold secrets beside ours), arguments of after-change commands, the environment, web credentials.
Every part is gathered by itself, so that a broken node still gives a bundle that says what broke.
"""

from __future__ import annotations

import argparse
import http.client
import io
import json
import platform
import sys
import tarfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import agent
from agent import app, daemon, errors
from agent.cli import check, version
from agent.cli import node as nodes
from agent.cli import plan as plans
from agent.host import child, files
from agent.serve import board as boards
from agent.serve import render

REMEMBERED = (
    "/run/gpunode/in-force.json",
    "/var/lib/gpunode/history.json",
    "/var/lib/gpunode/indexes.json",
    "/var/lib/gpunode/owner.json",
    "/var/lib/gpunode/reboots.json",
)
HOST = ("/proc/cmdline", "/proc/driver/nvidia/version", "/etc/os-release")
LOG_LINES = 2000
LOG_BYTES = 2 * 1024 * 1024
UNITS = ("gpunode.service", "gpunode-after-change.service", "gpunode-reboot.service")
LOG_DEADLINE = 10.0
DAEMON_DEADLINE = 2.0
_PARTS_OF_DAEMON = ("healthz", "status", "metrics")


def main(found: argparse.Namespace) -> int:
    """Write the bundle and say where it is."""

    async def gather(node: app.Node) -> int:
        return await _gather(node, found.to)

    return nodes.work(found, gather)


async def _gather(node: app.Node, to: str | None) -> int:
    options = node.options
    parts: dict[str, bytes] = {}
    missing: dict[str, str] = {}

    async def part(name: str, make: Callable[[], Awaitable[object]]) -> None:
        try:
            value = await make()
        except Exception as cause:  # noqa: BLE001  # a bundle is for broken nodes: the cause is the content
            missing[name] = f"{type(cause).__name__}: {cause}"
            return
        parts[name] = value if isinstance(value, bytes) else json.dumps(value, indent=2).encode()

    async def status() -> object:
        seen = await app.look(node)
        sample = None if seen.node is None else await app.sample(node)
        now = options.clock()
        return render.status_document(seen, sample, boards.verdict(seen, sample, now=now))

    async def plan() -> object:
        return plans.document(await app.plan(node))

    async def profiles() -> object:
        return render.profiles_document(await app.observe(node))

    async def settings() -> object:
        problems = node.settings_error.problems if node.settings_error is not None else ()
        return check.document(node, problems, node.settings, secret=True)

    async def versions() -> object:
        told = node.gpus.versions()
        return {
            "gpunode": agent.__version__,
            "python": sys.version,
            "platform": platform.platform(),
            "libraries": version.libraries(),
            "driver": None if told is None else told.driver,
            "nvml": None if told is None else told.nvml,
            "cuda": None if told is None else told.cuda,
            "simulated": node.simulated,
            "instance_type": node.machine.instance_type(),
            "calls": node.gpus.calls(),
        }

    await part("settings.json", settings)
    await part("status.json", status)
    await part("plan.json", plan)
    await part("profiles.json", profiles)
    await part("versions.json", versions)
    for path in (*REMEMBERED, *HOST):
        place = node.machine.path(path)
        text = files.read_text(place)
        if text is not None:
            parts[f"host{path}"] = text.encode()
    if node.simulated is None:
        _log(parts, missing)
        _running_daemon(node, parts, missing)
    if missing:
        parts["missing.json"] = json.dumps(missing, indent=2).encode()
    name = f"gpunode-support-{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime(options.clock()))}"
    packed = _pack(name, parts, options.clock())
    if to == "-":
        options.stdout.flush()
        options.stdout.buffer.write(packed)
        return errors.EXIT_OK
    place = Path(to or f"{name}.tar.gz")
    try:
        _write(place, packed)
    except OSError as cause:
        raise errors.GpunodeError(f"cannot write the bundle to {place}: {cause.strerror or cause}") from cause
    if options.output == "json":
        print(json.dumps({"file": str(place), "parts": sorted(parts), "missing": missing}), file=options.stdout)
    else:
        print(f"{place}: {', '.join(sorted(parts))}", file=options.stdout)
    for lacking, why in missing.items():
        print(f"not in it: {lacking} ({why})", file=options.stderr)
    return errors.EXIT_OK


def _write(place: Path, packed: bytes) -> None:
    """Write the bundle: atomically where a file is or will be, but into a device or pipe as it is, which to
    replace would destroy (`--to /dev/null` as root). No directory is made. Raises OSError."""
    place = place.resolve()
    if place.is_file() or (place.parent.is_dir() and not place.exists()):
        files.write_atomic(place, packed)
    else:
        place.write_bytes(packed)


def _log(parts: dict[str, bytes], missing: dict[str, str]) -> None:
    """Add what the journal has of the daemon and of what it started; the last cycles are lines in it."""
    units = [f"--unit={unit}" for unit in UNITS]
    ended = child.run(
        ["journalctl", "--no-pager", "--output=short-iso-precise", f"--lines={LOG_LINES}", *units],
        deadline=LOG_DEADLINE,
        keep=LOG_BYTES,
    )
    if ended.ok:
        parts["log.txt"] = ended.output.encode()
    else:
        missing["log.txt"] = ended.words()


def _running_daemon(node: app.Node, parts: dict[str, bytes], missing: dict[str, str]) -> None:
    """Add what a daemon on this host answers, if one listens on a loopback address."""
    settings = node.settings
    addresses = settings.listen if settings is not None and settings.listen else daemon.DEFAULT_LISTEN
    for address in addresses:
        host, _, port = address.rpartition(":")
        if host not in ("127.0.0.1", "localhost", "[::1]") or not port.isdigit():
            continue
        for what in _PARTS_OF_DAEMON:
            connection = http.client.HTTPConnection(host.strip("[]"), int(port), timeout=DAEMON_DEADLINE)
            try:
                connection.request("GET", f"/{what}")
                parts[f"daemon/{what}"] = connection.getresponse().read()
            except (OSError, http.client.HTTPException) as cause:
                missing[f"daemon/{what}"] = f"no daemon answers at {address}: {cause}"
            finally:
                connection.close()
        return


def _pack(name: str, parts: dict[str, bytes], now: float) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        for part, data in sorted(parts.items()):
            entry = tarfile.TarInfo(f"{name}/{part}")
            entry.size = len(data)
            entry.mtime = int(now)
            entry.mode = 0o600
            archive.addfile(entry, io.BytesIO(data))
    return packed.getvalue()
