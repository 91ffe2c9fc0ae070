from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator

import pytest
from aiohttp import web

from agent.host import identity
from tests.host import hosts

DOCUMENT = {"instanceType": "p4d.24xlarge", "instanceId": "i-0abc", "region": "eu-west-1"}


class Metadata:
    """A metadata service of version 2. `refuse` tokens are answered with 401; `delay` is in seconds."""

    def __init__(self) -> None:
        self.refuse = 0
        self.delay = 0.0
        self.disabled = False
        self.body: str | None = None
        self.asked: list[str] = []
        self.address = ""

    async def token(self, request: web.Request) -> web.Response:
        self.asked.append("PUT token")
        await asyncio.sleep(self.delay)
        if self.disabled:
            return web.Response(status=403)
        assert int(request.headers["X-aws-ec2-metadata-token-ttl-seconds"]) >= 1
        return web.Response(text=f"token-{len(self.asked)}")

    async def document(self, request: web.Request) -> web.Response:
        self.asked.append(f"GET {request.headers.get('X-aws-ec2-metadata-token')}")
        if self.refuse:
            self.refuse -= 1
            return web.Response(status=401)
        return web.Response(text=json.dumps(DOCUMENT) if self.body is None else self.body)


@pytest.fixture
async def imds() -> AsyncIterator[Metadata]:
    found = Metadata()
    app = web.Application()
    app.router.add_put("/latest/api/token", found.token)
    app.router.add_get("/latest/dynamic/instance-identity/document", found.document)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    found.address = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield found
    await runner.cleanup()


def dmi(host: hosts.Host, *, product: str | None = "p5.48xlarge", tag: str | None = "i-0dmi") -> None:
    host.write("/sys/class/dmi/id/sys_vendor", "Amazon EC2\n")
    if product:
        host.write("/sys/class/dmi/id/product_name", product + "\n")
    if tag:
        host.write("/sys/class/dmi/id/board_asset_tag", tag + "\n")


def cloud_init(host: hosts.Host, **meta_data: str) -> None:
    document = {
        "v1": {"instance_id": meta_data.get("instance-id"), "region": "eu-west-1"},
        "ds": {"meta_data": meta_data},
    }
    host.write("/run/cloud-init/instance-data.json", json.dumps(document))


async def test_dmi_first_and_nobody_is_asked(host: hosts.Host, imds: Metadata) -> None:
    dmi(host)
    cloud_init(host, **{"instance-id": "i-0dmi", "instance-type": "other.type"})
    assert await identity.identify(host.machine, endpoints=[imds.address]) == identity.Identity(
        "p5.48xlarge", "i-0dmi", None, "dmi"
    )
    assert imds.asked == []


async def test_cloud_init_fills_what_dmi_lacks(host: hosts.Host, imds: Metadata) -> None:
    dmi(host, product=None)
    cloud_init(host, **{"instance-id": "i-0dmi", "instance-type": "p4de.24xlarge"})
    found = await identity.identify(host.machine, endpoints=[imds.address])
    assert found == identity.Identity("p4de.24xlarge", "i-0dmi", "eu-west-1", "cloud-init")
    assert imds.asked == []


async def test_a_cache_of_another_instance_is_not_believed(host: hosts.Host) -> None:
    dmi(host, product=None)
    cloud_init(host, **{"instance-id": "i-0baked", "instance-type": "p4de.24xlarge"})
    assert identity.from_files(host.machine) == identity.Identity(None, "i-0dmi", None, "unknown")


async def test_the_metadata_service_last_and_once_a_boot(host: hosts.Host, imds: Metadata) -> None:
    found = await identity.identify(host.machine, endpoints=[imds.address])
    assert found == identity.Identity("p4d.24xlarge", "i-0abc", "eu-west-1", "imds")
    assert imds.asked == ["PUT token", "GET token-1"]
    again = await identity.identify(host.machine, endpoints=[imds.address])
    assert again == identity.Identity("p4d.24xlarge", "i-0abc", "eu-west-1", "cache")
    assert len(imds.asked) == 2
    host.write("/proc/sys/kernel/random/boot_id", "another\n")
    assert (await identity.identify(host.machine, endpoints=[imds.address])).source == "imds"


async def test_a_refused_token_is_fetched_anew_once(host: hosts.Host, imds: Metadata) -> None:
    imds.refuse = 1
    assert (await identity.identify(host.machine, endpoints=[imds.address])).instance_type == "p4d.24xlarge"
    assert imds.asked == ["PUT token", "GET token-1", "PUT token", "GET token-3"]


async def test_two_refusals_are_enough(host: hosts.Host, imds: Metadata) -> None:
    imds.refuse = 9
    assert await identity.identify(host.machine, endpoints=[imds.address]) == identity.Identity()
    assert len(imds.asked) == 4


async def test_the_second_address_when_the_first_is_dead(host: hosts.Host, imds: Metadata) -> None:
    found = await identity.identify(host.machine, endpoints=["http://127.0.0.1:1", imds.address])
    assert found.source == "imds"


async def test_the_budget_holds_whatever_it_does(host: hosts.Host, imds: Metadata) -> None:
    imds.delay = 30
    began = time.monotonic()
    assert await identity.identify(host.machine, endpoints=[imds.address], budget=0.3) == identity.Identity()
    assert time.monotonic() - began < 2


@pytest.mark.parametrize("body", ["", "not json", "[]", "{}", "x" * 100_000, '{"instanceType": 7}'])
async def test_scrap_is_no_identity(host: hosts.Host, imds: Metadata, body: str) -> None:
    imds.body = body
    found = await identity.identify(host.machine, endpoints=[imds.address])
    assert (found.instance_type, found.instance_id) == (None, None)
    assert not host.path(identity.CACHE).exists()


async def test_a_disabled_service(host: hosts.Host, imds: Metadata) -> None:
    imds.disabled = True
    assert await identity.identify(host.machine, endpoints=[imds.address]) == identity.Identity()


async def test_no_proxy_ever(host: hosts.Host, imds: Metadata, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:1")
    assert (await identity.identify(host.machine, endpoints=[imds.address])).source == "imds"


async def test_a_simulated_machine_asks_nobody(host: hosts.Host, imds: Metadata) -> None:
    host.machine.simulated = "p4d.24xlarge"
    assert await identity.identify(host.machine, endpoints=[imds.address]) == identity.Identity()
    assert imds.asked == []
