"""Bottlerocket's API in every state it can be in: what each verb and the daemon's cycle make of it.

A real HTTP server at the simulated host's /run/api.sock answers. The host is Bottlerocket with two A100,
and `owner = "gpunode"` lets gpunode write where the settings ask for MIG: so a state in which nothing is
written is one in which nothing may be.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import pytest

from agent import app
from agent.reconcile import cycle, snapshot
from agent.serve import board as boards
from agent.settings import source
from agent.sim import node as simulated
from tests import verbs
from tests.e2e import test_cases as cases
from tests.settings import api as apis

ENVIRON = {"GPUNODE_OWNER": "gpunode", "GPUNODE_ENFORCEMENT": "continuous"}


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A state of the API and what follows. `codes` are those of check, plan and apply on an empty node;
    then the daemon's phase and readiness (its cycle, with nothing on the node) before settings were once
    good; then the same after they were, with the layout in force, and with it disturbed by somebody.
    A phase with "+" is one that wrote, all others must not have."""

    name: str
    set: Callable[[apis.Api], object] | None
    codes: tuple[int, int, int]
    before: tuple[str, bool]
    after: tuple[str, bool]
    disturbed: tuple[str, bool]


def says(value: object, status: int = 200) -> Callable[[apis.Api], object]:
    return lambda api: api.answer(value, status)


def raw(body: bytes) -> Callable[[apis.Api], object]:
    def spoil(api: apis.Api) -> None:
        api.mode = "raw"
        api.body = body

    return spoil


def mode(word: str) -> Callable[[apis.Api], object]:
    return lambda api: setattr(api, "mode", word)


NOTHING = ((0, 0, 0), ("converged", True))
BAD = ((2, 2, 2), ("failed", False), ("converged", False), ("blocked", False))
GONE = (*NOTHING, ("converged", False), ("blocked", False))
"""An answer that says nothing is nobody's wish; once something was declared, it is a source that vanished."""
OFF = (*NOTHING, ("converged", True), ("converged", True))
"""Plainly said that nothing is partitioned; what is there stays."""
ROWS = [
    Row("no socket", None, *GONE),
    Row("{}", says({}), *GONE),
    Row("no table of the plugin", says({"kubelet-device-plugins": {}}), *GONE),
    Row("all fields absent", says({"kubelet-device-plugins": {"nvidia": {}}}), *GONE),
    Row("as it ships", says(apis.table()), *OFF),
    Row("plugin off", says(apis.table(enabled=False)), *OFF),
    Row("mig and plugin off", says(apis.table(device_partitioning_strategy="mig", enabled=False)), *OFF),
    Row("a strategy to come", says(apis.table(device_partitioning_strategy="slices")), *OFF),
    Row("mig", says(apis.MIG), (0, 3, 0), ("converged+", True), ("converged", True), ("converged+", True)),
    Row(
        "mig, in the other shape",
        says({"settings": apis.MIG}),
        (0, 3, 0),
        ("converged+", True),
        ("converged", True),
        ("converged+", True),
    ),
    Row("400", says("bad prefix", 400), *BAD),
    Row("404", says("missing", 404), *BAD),
    Row("423", says("locked", 423), *BAD),
    Row("500", says("oops", 500), *BAD),
    Row("503", says("", 503), *BAD),
    Row("a hang", mode("hang"), *BAD),
    Row("no HTTP", raw(b"220 mail.example ESMTP\r\n"), *BAD),
    Row("cut off", raw(b'HTTP/1.1 200 OK\r\nContent-Length: 900\r\n\r\n{"kubelet-'), *BAD),
    Row("no JSON", lambda api: setattr(api, "body", b"<html>"), *BAD),
    Row("wrong types", says(apis.table(device_partitioning_strategy=["mig"])), *BAD),
    Row(
        "a profile that does not exist",
        says(apis.table(device_partitioning_strategy="mig", mig={"profile": {"a100.40gb": "5g.10gb"}})),
        *BAD,
    ),
]


@dataclasses.dataclass(slots=True)
class Host:
    """A simulated Bottlerocket host whose state is kept in a file."""

    place: Path
    flags: tuple[object, ...]

    @property
    def socket(self) -> Path:
        return self.place / "state.root/run/api.sock"

    @property
    def mutations(self) -> int:
        return cases.mutations(self.flags)

    def open(self) -> simulated.SimulatedNode:
        return simulated.open_node(str(self.flags[1]), state=Path(str(self.flags[3])))

    def verb(self, *words: object) -> verbs.Ended:
        return verbs.run(*words, *self.flags)

    def disturb(self) -> None:
        """Let somebody else take an instance of the first GPU away."""
        opened = self.open()
        try:
            gpu = opened.driver.gpus[0]
            instance = next(iter(gpu.state.instances.values()))
            for compute in list(instance.compute.values()):
                opened.driver.destroy_compute_instance(gpu, instance, compute)
            opened.driver.destroy_gpu_instance(gpu, instance)
        finally:
            opened.close()

    @contextlib.asynccontextmanager
    async def daemon(self) -> AsyncIterator[app.Node]:
        """The wiring of a daemon on this host, whose cycles a test runs one by one."""
        options = app.Options(simulate=str(self.flags[1]), sim_state=Path(str(self.flags[3])), environ=ENVIRON)
        async with app.open(options) as node:
            yield node

    async def cycle(self, node: app.Node) -> tuple[snapshot.Snapshot, tuple[str, bool]]:
        """Run a cycle; return what it left, and phase (with "+" where it wrote) and readiness."""
        count = self.mutations
        seen = await cycle.run_cycle(node.around, intent=cycle.Intent.DAEMON, trigger="test")
        ready = boards.verdict(seen, None, now=node.options.clock()).ready
        return seen, (seen.phase.value + ("+" if self.mutations > count else ""), ready)


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    monkeypatch.setenv("GPUNODE_OWNER", "gpunode")
    flags = ("--simulate", "a100.40gb:2", "--sim-state", tmp_path / "state")
    release = tmp_path / "state.root/etc/os-release"
    release.parent.mkdir(parents=True)
    release.write_text('ID=bottlerocket\nVARIANT_ID="aws-k8s-1.34-nvidia"\nVERSION_ID="1.63.0"\n')
    return Host(tmp_path, flags)


@contextlib.contextmanager
def playing(host: Host, row: Row) -> Iterator[None]:
    """Have the API in this state until the end of the block."""
    if row.set is None:
        yield
        return
    with apis.serving(host.socket) as api:
        row.set(api)
        yield


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
async def test_each_state_before_settings_were_once_good(row: Row, host: Host) -> None:
    with playing(host, row):
        async with host.daemon() as node:
            seen, told = await host.cycle(node)
        assert told == row.before
        assert seen.settings.valid == (row.codes[0] == 0)
        if not seen.settings.valid:
            assert f"Bottlerocket API {host.socket}" in str(seen.settings.problems[0])


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
def test_each_state_through_the_verbs(row: Row, host: Host) -> None:
    with playing(host, row):
        check = host.verb("check")
        plan = host.verb("plan")
        assert host.mutations == 0
        apply = host.verb("apply", "--yes")
    assert (check.code, plan.code, apply.code) == row.codes, apply.err
    assert (host.mutations > 0) == row.before[0].endswith("+")
    if check.code:
        for said in (check.out, plan.err, apply.err):
            assert "api.sock" in said
            assert "Traceback" not in said


@pytest.mark.parametrize("row", ROWS, ids=[row.name for row in ROWS])
async def test_each_state_after_settings_were_once_good(row: Row, host: Host) -> None:
    async with host.daemon() as node:
        with apis.serving(host.socket) as api:
            api.answer(apis.MIG)
            _, told = await host.cycle(node)
            assert told == ("converged+", True)
        with playing(host, row):
            seen, told = await host.cycle(node)
            assert told == row.after
            host.disturb()
            disturbed, told = await host.cycle(node)
            assert told == row.disturbed
        for state in (seen, disturbed):
            assert state.settings.valid == (row.after[1])
            codes = {reason.code for reason in state.reasons}
            assert ("settings-invalid" in codes) == (not state.settings.valid)
            if not state.settings.valid:
                assert any("api.sock" in str(problem) for problem in state.settings.problems)
        with apis.serving(host.socket) as api:  # and whatever it was, a good answer ends it
            api.answer(apis.MIG)
            _, (phase, ready) = await host.cycle(node)
            assert (phase.rstrip("+"), ready) == ("converged", True)
            assert {str(i.profile) for gpu in (await app.observe(node)).gpus for i in gpu.instances} == {"2g.10gb"}


async def test_a_socket_that_appears_late_is_noticed_and_followed(host: Host) -> None:
    async with host.daemon() as node:
        _, told = await host.cycle(node)
        assert told == ("converged", True)
        before = source.fingerprint(node.request)
        with apis.serving(host.socket) as api:
            api.answer(apis.MIG)
            assert source.fingerprint(node.request) != before
            _, told = await host.cycle(node)
            assert told == ("converged+", True)
            same = source.fingerprint(node.request)
            api.answer(apis.table())
            assert source.fingerprint(node.request) != same


def test_the_file_of_the_mig_manager_stands_in_for_a_socket_that_is_not_there(host: Host) -> None:
    path = host.place / "state.root/etc/nvidia-migmanager/nvidia-migmanager.toml"
    path.parent.mkdir(parents=True)
    path.write_text('device-partitioning-strategy = "mig"\nprofile = { "a100.40gb" = "3g.20gb" }\n')
    applied = host.verb("apply", "--yes")
    assert applied.code == 0, applied.err
    assert host.mutations > 0
    path.write_text("device-partitioning-strategy = [")
    assert host.verb("plan").code == 2
