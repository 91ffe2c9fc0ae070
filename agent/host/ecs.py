"""Which ECS task was given which GPU: its containers' control groups, and the agent's introspection.

The agent tells its tasks on localhost:51678 but not their GPUs; a container's GPUs are the UUIDs in
the NVIDIA_VISIBLE_DEVICES of its first process. The two are joined by the container's id.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import urllib.parse

from agent import errors, records
from agent.host import files, processes
from agent.host import machine as machines

INTROSPECTION = "http://localhost:51678"
_GROUPS = (
    "/sys/fs/cgroup/ecstasks.slice/*/*/cgroup.procs",
    "/sys/fs/cgroup/devices/ecs/*/*/cgroup.procs",
    "/sys/fs/cgroup/ecs/*/*/cgroup.procs",
)
_ANSWER_LIMIT = 8 * 1024 * 1024


@records.dataclass(frozen=True, slots=True)
class Container:
    """A container of a task. `gpus` are what it may see: GPU UUIDs, or ("all",); () for none.

    `task` is the task's id, `family` its task definition where the agent told it.
    """

    id: str
    task: str
    gpus: tuple[str, ...]
    name: str | None = None
    family: str | None = None


class Unreadable(errors.GpunodeError):
    """The ECS agent did not tell, or a container it lists has no process to read yet."""


def containers(machine: machines.Machine, *, introspection: str | None, deadline: float = 2.0) -> tuple[Container, ...]:
    """Return the containers of all ECS tasks on this machine with their GPUs.

    `introspection` is the agent's address, None to go by control groups alone. Raises `Unreadable`
    when the agent does not answer, or is starting a container whose GPUs cannot be seen yet.
    """
    running = {found.id: found for found in _by_cgroup(machine)}
    if introspection is None:
        return tuple(running.values())
    told = _told(introspection, deadline)
    for identity, known in told.items():
        if identity in running:
            running[identity] = dataclasses.replace(running[identity], name=known.name, family=known.family)
        elif known.starting:
            raise Unreadable(
                f"cannot tell which GPUs ECS gave away: container {known.name} of task {known.family} is starting"
            )
    return tuple(running.values())


def _by_cgroup(machine: machines.Machine) -> list[Container]:
    found = []
    root = machine.path("/")
    for pattern in _GROUPS:
        for group in sorted(root.glob(pattern.lstrip("/"))):
            where = processes.parse_cgroup(f"0::/{group.parent.relative_to(root)}")
            if where.container is None:
                continue
            pids = (files.read_text(group) or "").split()
            if not pids:
                continue  # an empty group is left over from a container that ended
            visible = processes.environment_value(machine, int(pids[0]), "NVIDIA_VISIBLE_DEVICES") or ""
            gpus = tuple(
                word for word in (part.strip() for part in visible.split(",")) if word not in ("", "void", "none")
            )
            found.append(Container(id=where.container, task=where.task or group.parent.parent.name, gpus=gpus))
    return found


@records.dataclass(frozen=True, slots=True)
class _Told:
    name: str
    family: str
    starting: bool


def _told(address: str, deadline: float) -> dict[str, _Told]:
    where = urllib.parse.urlsplit(address)
    connection = http.client.HTTPConnection(where.hostname or "localhost", where.port or 80, timeout=deadline)
    try:
        connection.request("GET", "/v1/tasks")
        answer = connection.getresponse()
        body = answer.read(_ANSWER_LIMIT)
        if answer.status != 200:
            raise Unreadable(f"cannot ask the ECS agent for its tasks: it answers {answer.status}")
        return _parse(json.loads(body))
    except (OSError, http.client.HTTPException, ValueError, TypeError, KeyError, AttributeError) as error:
        raise Unreadable(f"cannot ask the ECS agent for its tasks at {address}: {error}") from error
    finally:
        connection.close()


def _parse(document: object) -> dict[str, _Told]:
    if not isinstance(document, dict):
        raise TypeError("its answer is no JSON object")
    found = {}
    for task in document.get("Tasks") or ():
        family = f"{task.get('Family') or ''}:{task.get('Version') or ''}".strip(":") or str(task.get("Arn") or "")
        ended = "STOPPED" in (task.get("KnownStatus"), task.get("DesiredStatus"))
        starting = not ended and task.get("KnownStatus") != "RUNNING"
        for container in task.get("Containers") or ():
            identity = str(container.get("DockerId") or container.get("DockerName") or container["Name"])
            found[identity] = _Told(str(container.get("Name") or ""), family, starting)
    return found
