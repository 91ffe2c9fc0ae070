"""Which EC2 instance this is: DMI, then cloud-init's cache, then the metadata service, within seconds.

Needed for checks (expected GPUs, driver floor), never for partitioning: a node whose metadata service
does not answer is a node of unknown type, nothing worse.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from agent import records
from agent.host import files
from agent.host import machine as machines

if TYPE_CHECKING:
    import aiohttp

IMDS = ("http://169.254.169.254", "http://[fd00:ec2::254]")
CACHE = "/run/gpunode/identity.json"
_ENDPOINT = "AWS_EC2_METADATA_SERVICE_ENDPOINT"
_OFF = "AWS_EC2_METADATA_DISABLED"
_CLOUD_INIT = ("/run/cloud-init/instance-data.json", "/var/lib/cloud/instance/instance-data.json")
_ANSWER_LIMIT = 64 * 1024


@records.dataclass(frozen=True, slots=True)
class Identity:
    """What is known of the instance; None where not. `source` is dmi, cloud-init, imds, cache or unknown:
    where the type came from."""

    instance_type: str | None = None
    instance_id: str | None = None
    region: str | None = None
    source: str = "unknown"

    @property
    def complete(self) -> bool:
        """Whether nothing is left to ask for."""
        return None not in (self.instance_type, self.instance_id)


def from_files(machine: machines.Machine) -> Identity:
    """Return what DMI and cloud-init's cache tell; reads small files only."""
    tag = files.read_text(machine.path("/sys/class/dmi/id/board_asset_tag"))
    dmi = Identity(
        instance_type=machine.instance_type(), instance_id=tag if tag and tag.startswith("i-") else None, source="dmi"
    )
    return dmi if dmi.complete else _joined(dmi, _cloud_init(machine))


async def identify(
    machine: machines.Machine,
    *,
    environ: Mapping[str, str] | None = None,
    endpoints: Sequence[str] = IMDS,
    budget: float = 5.0,
    connect: float = 1.0,
) -> Identity:
    """Return the instance's identity within `budget` seconds; never raises for what is missing.

    The metadata service is asked only for what files did not tell, through no proxy, and not at all
    on a simulated machine. `environ` may forbid it or name another endpoint, by the variables that AWS's
    own tools know. Its answer is kept under /run for this boot and instance.
    """
    environ = environ or {}
    if environ.get(_ENDPOINT):
        endpoints = (environ[_ENDPOINT].rstrip("/"),)
    if environ.get(_OFF, "").lower() == "true":
        endpoints = ()
    known = from_files(machine)
    if known.complete:
        return known
    known = _joined(known, _cached(machine))
    if known.complete or machine.simulated is not None or not endpoints:
        return known
    try:
        async with asyncio.timeout(budget):
            told = await _ask(endpoints, connect)
    except TimeoutError:
        return known
    found = _joined(known, told)
    if told.instance_type is not None:
        _keep(machine, found)
    return found


def _joined(first: Identity, second: Identity) -> Identity:
    """Fill what `first` lacks from `second`, unless they speak of two instances (an image baked with
    somebody else's cache)."""
    if None not in (first.instance_id, second.instance_id) and first.instance_id != second.instance_id:
        second = Identity()
    source = first.source if first.instance_type is not None else second.source
    return Identity(
        instance_type=first.instance_type or second.instance_type,
        instance_id=first.instance_id or second.instance_id,
        region=first.region or second.region,
        source=source if (first.instance_type or second.instance_type) else "unknown",
    )


def _document(machine: machines.Machine, path: str) -> object:
    try:
        return json.loads(files.read_bounded(machine.path(path)))
    except (OSError, ValueError):
        return None


def _at(document: object, *keys: str) -> str | None:
    for key in keys:
        document = document.get(key) if isinstance(document, dict) else None
    return document if isinstance(document, str) and document else None


def _cloud_init(machine: machines.Machine) -> Identity:
    for place in _CLOUD_INIT:
        document = _document(machine, place)
        if document is not None:
            return Identity(
                instance_type=_at(document, "ds", "meta_data", "instance-type")
                or _at(document, "ds", "dynamic", "instance-identity", "document", "instanceType"),
                instance_id=_at(document, "v1", "instance_id") or _at(document, "ds", "meta_data", "instance-id"),
                region=_at(document, "v1", "region"),
                source="cloud-init",
            )
    return Identity()


def _cached(machine: machines.Machine) -> Identity:
    document = _document(machine, CACHE)
    if _at(document, "boot_id") != machine.boot_id():
        return Identity()
    return Identity(
        instance_type=_at(document, "instance_type"),
        instance_id=_at(document, "instance_id"),
        region=_at(document, "region"),
        source="cache",
    )


def _keep(machine: machines.Machine, identity: Identity) -> None:
    document = {"boot_id": machine.boot_id(), **dataclasses.asdict(identity)}
    with contextlib.suppress(OSError):  # it is asked again next time
        files.write_atomic(machine.path(CACHE), json.dumps(document).encode(), mode=0o644)


async def _ask(endpoints: Sequence[str], connect: float) -> Identity:
    import aiohttp

    timeout = aiohttp.ClientTimeout(total=None, sock_connect=connect, connect=connect)
    async with aiohttp.ClientSession(timeout=timeout, trust_env=False) as session:  # trust_env=False: no proxy
        for endpoint in endpoints:
            try:
                return await _ask_one(session, endpoint)
            except (aiohttp.ClientError, ValueError, TimeoutError):
                continue
    return Identity()


async def _ask_one(session: aiohttp.ClientSession, endpoint: str) -> Identity:
    for _ in range(2):  # a token may be refused once: the second is fresh
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": "60"}
        async with session.put(f"{endpoint}/latest/api/token", headers=headers) as answer:
            answer.raise_for_status()
            token = (await _body(answer)).decode()
        headers = {"X-aws-ec2-metadata-token": token}
        place = f"{endpoint}/latest/dynamic/instance-identity/document"
        async with session.get(place, headers=headers) as answer:
            if answer.status == 401:
                continue
            answer.raise_for_status()
            document = json.loads(await _body(answer))
            return Identity(
                instance_type=_at(document, "instanceType"),
                instance_id=_at(document, "instanceId"),
                region=_at(document, "region"),
                source="imds",
            )
    return Identity()


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    data = b""
    async for piece in answer.content.iter_chunked(4096):
        data += piece
        if len(data) > _ANSWER_LIMIT:
            raise ValueError("an answer of the metadata service is too long")
    return data
