from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import grpclib.const
import grpclib.exceptions
import pytest

from agent.host import pods
from tests.host import kubelet


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "kubelet.sock"


@pytest.fixture
def served(place: Path) -> Iterator[kubelet.Kubelet]:
    with kubelet.serving(place) as found:
        yield found


async def test_pods_with_devices_and_claims(place: Path, served: kubelet.Kubelet) -> None:
    served.pods = [
        kubelet.pod(
            "train", namespace="ml", devices={"nvidia.com/gpu": ["MIG-1", "MIG-2"], "vpc.amazonaws.com/efa": ["0"]}
        ),
        kubelet.pod("infer", container="é", claimed=[("gpu.nvidia.com", "gpu-1-mig-1g6gb-14-0")]),
        kubelet.pod("idle"),
    ]
    found = await pods.list_pods(place)
    assert found == (
        pods.Pod(
            "train",
            "ml",
            (
                pods.Container(
                    "main",
                    devices=(
                        pods.Devices("nvidia.com/gpu", ("MIG-1", "MIG-2")),
                        pods.Devices("vpc.amazonaws.com/efa", ("0",)),
                    ),
                ),
            ),
        ),
        pods.Pod(
            "infer",
            "default",
            (
                pods.Container(
                    "é",
                    claimed=(pods.Claimed("gpu.nvidia.com", "node", "gpu-1-mig-1g6gb-14-0", claim="default/claim"),),
                ),
            ),
        ),
        pods.Pod("idle", "default", (pods.Container("main"),)),
    )


async def test_many_pods_at_once(place: Path, served: kubelet.Kubelet) -> None:
    served.pods = [kubelet.pod(f"pod-{n}", devices={"nvidia.com/gpu": [f"MIG-{n}"] * 4}) for n in range(500)]
    assert len(await pods.list_pods(place)) == 500


async def test_what_the_node_has_to_give(place: Path, served: kubelet.Kubelet) -> None:
    served.allocatable = {"nvidia.com/mig-1g.5gb": ["MIG-1", "MIG-2"]}
    assert await pods.allocatable(place) == (pods.Devices("nvidia.com/mig-1g.5gb", ("MIG-1", "MIG-2")),)


async def test_an_empty_node(place: Path, served: kubelet.Kubelet) -> None:
    assert await pods.list_pods(place) == ()


def test_from_a_thread_without_a_loop(place: Path, served: kubelet.Kubelet) -> None:
    served.pods = [kubelet.pod("a")]
    assert [pod.name for pod in pods.read(place)] == ["a"]


async def test_no_socket(tmp_path: Path) -> None:
    with pytest.raises(pods.Unreadable, match=r"cannot ask the kubelet for its pods on .*: No such file or directory"):
        await pods.list_pods(tmp_path / "gone.sock")


async def test_a_kubelet_that_does_not_answer(place: Path, served: kubelet.Kubelet) -> None:
    served.delay = 30
    with pytest.raises(pods.Unreadable, match="no answer on"):
        await pods.list_pods(place, deadline=0.2)
    served.delay = 0


async def test_an_error_of_the_kubelet(place: Path, served: kubelet.Kubelet) -> None:
    served.error = grpclib.exceptions.GRPCError(grpclib.const.Status.RESOURCE_EXHAUSTED, "too many requests")
    with pytest.raises(pods.Unreadable, match="List answers RESOURCE_EXHAUSTED: too many requests"):
        await pods.list_pods(place)


async def test_somebody_else_on_the_socket(place: Path) -> None:
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(place))
        listener.listen()
        with pytest.raises(pods.Unreadable):
            await pods.list_pods(place, deadline=0.3)


async def test_a_path_longer_than_an_address(tmp_path: Path) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60) / "kubelet.sock"
    with kubelet.serving(deep) as served:
        served.pods = [kubelet.pod("far")]
        assert [pod.name for pod in await pods.list_pods(deep)] == ["far"]
    with pytest.raises(pods.Unreadable, match="No such file"):
        await pods.list_pods(tmp_path / ("x" * 60) / ("y" * 60) / "kubelet.sock")


async def test_without_grpclib_it_says_what_to_install(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "grpclib", None)
    monkeypatch.setitem(sys.modules, "grpclib.client", None)
    with pytest.raises(pods.Unreadable, match=r'pip install "gpunode\[kubernetes\]"'):
        await pods.list_pods(place)


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x0a\x05ab", "cut off"),
        (b"\x0a", "cut off"),
        (b"\x80" * 12, "cut off"),
        (b"\x0b", "wire type 3"),
        (b"\x09\0\0", "cut off"),
    ],
)
def test_scrap_is_refused(data: bytes, why: str) -> None:
    with pytest.raises(pods.Unreadable, match=why):
        list(pods._fields(data))


def test_fields_of_every_wire_type_are_walked() -> None:
    assert list(pods._fields(b"\x08\xac\x02" + b"\x11" + b"12345678" + b"\x1a\x01x" + b"\x25" + b"1234")) == [
        (1, 300),
        (2, b"12345678"),
        (3, b"x"),
        (4, b"1234"),
    ]
