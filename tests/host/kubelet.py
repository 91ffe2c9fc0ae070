"""A kubelet's PodResources service: a real gRPC server on a Unix socket, its messages made by protobuf.

The messages are described here as in kubelet's api.proto, so that what `agent.host.pods` reads by
hand was written by somebody else.
"""

from __future__ import annotations

import asyncio
import contextlib
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpclib.const
import grpclib.exceptions
import grpclib.server
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

_STRING, _INT64, _MESSAGE = 9, 3, 11
_ONE, _MANY = 1, 3
_MESSAGES: dict[str, list[tuple[str, int, int, int, str]]] = {
    "Empty": [],
    "ListPodResourcesResponse": [("pod_resources", 1, _MANY, _MESSAGE, "PodResources")],
    "AllocatableResourcesResponse": [
        ("devices", 1, _MANY, _MESSAGE, "ContainerDevices"),
        ("cpu_ids", 2, _MANY, _INT64, ""),
    ],
    "PodResources": [
        ("name", 1, _ONE, _STRING, ""),
        ("namespace", 2, _ONE, _STRING, ""),
        ("containers", 3, _MANY, _MESSAGE, "ContainerResources"),
        ("cpu_ids", 4, _MANY, _INT64, ""),
    ],
    "ContainerResources": [
        ("name", 1, _ONE, _STRING, ""),
        ("devices", 2, _MANY, _MESSAGE, "ContainerDevices"),
        ("cpu_ids", 3, _MANY, _INT64, ""),
        ("dynamic_resources", 5, _MANY, _MESSAGE, "DynamicResource"),
    ],
    "ContainerDevices": [
        ("resource_name", 1, _ONE, _STRING, ""),
        ("device_ids", 2, _MANY, _STRING, ""),
        ("topology", 3, _ONE, _MESSAGE, "TopologyInfo"),
    ],
    "TopologyInfo": [("nodes", 1, _MANY, _MESSAGE, "NUMANode")],
    "NUMANode": [("ID", 1, _ONE, _INT64, "")],
    "DynamicResource": [
        ("claim_name", 2, _ONE, _STRING, ""),
        ("claim_namespace", 3, _ONE, _STRING, ""),
        ("claim_resources", 4, _MANY, _MESSAGE, "ClaimResource"),
    ],
    "ClaimResource": [
        ("cdi_devices", 1, _MANY, _MESSAGE, "CDIDevice"),
        ("driver_name", 2, _ONE, _STRING, ""),
        ("pool_name", 3, _ONE, _STRING, ""),
        ("device_name", 4, _ONE, _STRING, ""),
    ],
    "CDIDevice": [("name", 1, _ONE, _STRING, "")],
}


def _classes() -> dict[str, Any]:
    file = descriptor_pb2.FileDescriptorProto(name="podresources_test.proto", package="v1", syntax="proto3")
    for name, fields in _MESSAGES.items():
        message = file.message_type.add(name=name)
        for field, number, label, kind, of in fields:
            entry = message.field.add(name=field, number=number, label=label, type=kind)
            if of:
                entry.type_name = f".v1.{of}"
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return {name: message_factory.GetMessageClass(pool.FindMessageTypeByName(f"v1.{name}")) for name in _MESSAGES}


V1 = _classes()


def pod(
    name: str,
    *,
    namespace: str = "default",
    container: str = "main",
    devices: dict[str, list[str]] | None = None,
    claimed: list[tuple[str, str]] | None = None,
) -> Any:
    """Return a PodResources message: `devices` by resource, `claimed` as (driver, device)."""
    made = V1["PodResources"](name=name, namespace=namespace, cpu_ids=[1, 300])
    within = made.containers.add(name=container, cpu_ids=[7])
    for resource, identities in (devices or {}).items():
        added = within.devices.add(resource_name=resource, device_ids=identities)
        added.topology.nodes.add(ID=1)
    if claimed:
        claim = within.dynamic_resources.add(claim_name="claim", claim_namespace=namespace)
        for driver, device in claimed:
            resource = claim.claim_resources.add(driver_name=driver, pool_name="node", device_name=device)
            resource.cdi_devices.add(name=f"k8s.{driver}/claim={device}")
    return made


class Kubelet:
    """What the service answers: `pods` (messages), or an error, or nothing for `delay` seconds."""

    def __init__(self) -> None:
        self.pods: list[Any] = []
        self.allocatable: dict[str, list[str]] = {}
        self.error: grpclib.exceptions.GRPCError | None = None
        self.delay = 0.0

    def __mapping__(self) -> dict[str, grpclib.const.Handler]:
        return {
            "/v1.PodResourcesLister/List": grpclib.const.Handler(
                self._list, grpclib.const.Cardinality.UNARY_UNARY, V1["Empty"], V1["ListPodResourcesResponse"]
            ),
            "/v1.PodResourcesLister/GetAllocatableResources": grpclib.const.Handler(
                self._allocatable,
                grpclib.const.Cardinality.UNARY_UNARY,
                V1["Empty"],
                V1["AllocatableResourcesResponse"],
            ),
        }

    async def _list(self, stream: Any) -> None:
        await stream.recv_message()
        await asyncio.sleep(self.delay)
        if self.error is not None:
            raise self.error
        await stream.send_message(V1["ListPodResourcesResponse"](pod_resources=self.pods))

    async def _allocatable(self, stream: Any) -> None:
        await stream.recv_message()
        answer = V1["AllocatableResourcesResponse"](cpu_ids=[0, 1])
        for resource, identities in self.allocatable.items():
            answer.devices.add(resource_name=resource, device_ids=identities)
        await stream.send_message(answer)


class _Server(grpclib.server.Server):
    """Closes its connections with itself, which grpclib leaves to the clients."""

    def __init__(self, handlers: list[Any]) -> None:
        super().__init__(handlers)
        self._open: list[tuple[Any, asyncio.Event]] = []

    def _protocol_factory(self) -> Any:
        protocol = super()._protocol_factory()
        lost, close = asyncio.Event(), protocol.connection_lost

        def connection_lost(cause: BaseException | None) -> None:
            close(cause)
            lost.set()

        protocol.connection_lost = connection_lost  # type: ignore[method-assign, assignment]
        self._open.append((protocol, lost))
        return protocol

    async def hang_up(self) -> None:
        for protocol, lost in self._open:
            while not hasattr(protocol, "connection"):  # noqa: ASYNC110  # accepted, and not yet told so
                await asyncio.sleep(0)
            if not lost.is_set():
                protocol.connection.close()
                await lost.wait()


@contextlib.contextmanager
def serving(socket: Path) -> Iterator[Kubelet]:
    """Serve on `socket` from a thread of its own (through a link where the path is too long to bind)."""
    kubelet = Kubelet()
    loop = asyncio.new_event_loop()
    socket.parent.mkdir(parents=True, exist_ok=True)
    started = threading.Event()
    stop = asyncio.Event()
    short = tempfile.TemporaryDirectory(dir="/tmp")
    bound = Path(short.name) / "s"
    socket.symlink_to(bound)

    async def serve() -> None:
        server = _Server([kubelet])
        await server.start(path=str(bound))
        started.set()
        await stop.wait()
        server.close()
        await server.wait_closed()
        await server.hang_up()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert started.wait(10)
    try:
        yield kubelet
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(10)
        loop.close()
        socket.unlink()
        short.cleanup()
