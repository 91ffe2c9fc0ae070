from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Callable, Iterator

import pytest

from agent.host import ecs
from tests.host import hosts

TASK = "0123456789abcdef0123456789abcdef"
ONE, TWO = "ab" * 32, "cd" * 32

Serve = Callable[[object], str]


@pytest.fixture
def agent() -> Iterator[Serve]:
    """An ECS agent's introspection: answers with the given JSON, bytes, or HTTP status."""
    servers = []

    def start(answer: object) -> str:
        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                status = answer if isinstance(answer, int) else 200 if self.path == "/v1/tasks" else 404
                body = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def tasks(status: str = "RUNNING", *, desired: str = "RUNNING", container: str = ONE) -> dict[str, object]:
    return {
        "Tasks": [
            {
                "Arn": f"arn:aws:ecs:eu-west-1:1:task/c/{TASK}",
                "DesiredStatus": desired,
                "KnownStatus": status,
                "Family": "example-ecs-gpu",
                "Version": "3",
                "Containers": [{"DockerId": container, "DockerName": "ecs-x", "Name": "gpu"}],
            }
        ]
    }


@pytest.fixture
def running(host: hosts.Host) -> hosts.Host:
    host.write(f"/sys/fs/cgroup/ecstasks.slice/ecstasks-{TASK}.slice/docker-{ONE}.scope/cgroup.procs", "70\n71\n")
    host.process(70, "tf", environ=f"X=1\0NVIDIA_VISIBLE_DEVICES={hosts.A100}, {hosts.SPARE}\0")
    return host


def test_control_groups_and_agent_are_joined_by_the_containers_id(running: hosts.Host, agent: Serve) -> None:
    found = ecs.containers(running.machine, introspection=agent(tasks()))
    assert found == (ecs.Container(ONE, TASK, (hosts.A100, hosts.SPARE), name="gpu", family="example-ecs-gpu:3"),)


def test_version_1_control_groups(host: hosts.Host) -> None:
    host.write(f"/sys/fs/cgroup/devices/ecs/{TASK}/{ONE}/cgroup.procs", "70\n")
    host.process(70, "tf", environ="NVIDIA_VISIBLE_DEVICES=all\0")
    assert ecs.containers(host.machine, introspection=None) == (ecs.Container(ONE, TASK, ("all",)),)


@pytest.mark.parametrize("value", ["", "void", "none"])
def test_a_container_without_gpus(running: hosts.Host, value: str) -> None:
    running.process(70, "web", environ=f"NVIDIA_VISIBLE_DEVICES={value}\0")
    assert [c.gpus for c in ecs.containers(running.machine, introspection=None)] == [()]


def test_a_group_that_is_left_over(running: hosts.Host) -> None:
    running.write(f"/sys/fs/cgroup/ecstasks.slice/ecstasks-{TASK}.slice/docker-{ONE}.scope/cgroup.procs", "")
    assert ecs.containers(running.machine, introspection=None) == ()


@pytest.mark.parametrize("status", ["PENDING", "CREATED", "PULLED", "NONE"])
def test_a_container_that_is_starting_may_hold_anything(running: hosts.Host, agent: Serve, status: str) -> None:
    with pytest.raises(ecs.Unreadable, match="container gpu of task example-ecs-gpu:3 is starting"):
        ecs.containers(running.machine, introspection=agent(tasks(status, container=TWO)))


@pytest.mark.parametrize(
    ("status", "desired"), [("STOPPED", "STOPPED"), ("RUNNING", "STOPPED"), ("PENDING", "STOPPED")]
)
def test_a_container_that_has_ended_holds_nothing(host: hosts.Host, agent: Serve, status: str, desired: str) -> None:
    assert ecs.containers(host.machine, introspection=agent(tasks(status, desired=desired))) == ()


@pytest.mark.parametrize(
    "answer", [500, b"not json", [1], {"Tasks": [1]}, {"Tasks": [{"Containers": [{}], "KnownStatus": "X"}]}]
)
def test_an_agent_that_answers_scrap(host: hosts.Host, agent: Serve, answer: object) -> None:
    with pytest.raises(ecs.Unreadable, match="cannot ask the ECS agent for its tasks"):
        ecs.containers(host.machine, introspection=agent(answer))


def test_no_tasks(host: hosts.Host, agent: Serve) -> None:
    assert ecs.containers(host.machine, introspection=agent({"Tasks": None})) == ()


def test_no_agent(host: hosts.Host) -> None:
    with pytest.raises(ecs.Unreadable, match="cannot ask the ECS agent"):
        ecs.containers(host.machine, introspection="http://127.0.0.1:1")
