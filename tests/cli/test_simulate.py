"""`gpunode simulate`: every node listed and described, and everything that can happen to one."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.cli import simulate
from agent.sim import catalogue, spec
from tests.cli.conftest import Run


def test_alone_it_lists_every_node(gpunode: Run) -> None:
    ended = gpunode("simulate")
    assert ended.code == 0
    for name in catalogue.names():
        assert any(line.split()[0] == name for line in ended.out.splitlines())
    assert gpunode("simulate", "list").out == ended.out


def test_part_of_a_name_narrows_the_list(gpunode: Run) -> None:
    assert {node["name"] for node in gpunode("simulate", "list", "p4d", "--output", "json").json()} == {
        "p4d.24xlarge",
        "p4de.24xlarge",
    }
    ended = gpunode("simulate", "list", "xyzzy")
    assert ended.code == 2
    assert "xyzzy" in ended.err


def test_description_tells_what_is_not_known(gpunode: Run) -> None:
    text = gpunode("simulate", "describe", "g7.48xlarge").out
    assert "geometry not published" in text
    assert "unknown: its MIG profiles" in text
    assert "by reset" in gpunode("simulate", "describe", "p4d.24xlarge").out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("describe",), "use: gpunode simulate describe NODE"),
        (("describe", "p4d.24xlarg"), "did you mean p4d.24xlarge"),
        (("node-file", "a", "b"), "use: gpunode simulate node-file NODE"),
        (("reboot",), "--sim-state"),
        (("explode",), "explode"),
        (("list", "--gpu", "1"), "--gpu does not belong to list, but to fault fail, fault delay, fault hang"),
        (
            ("fault", "fail", "nvmlInit_v2", "--seconds", "3"),
            "--seconds does not belong to fault fail, but to fault delay",
        ),
        (("workload", "hold", "0", "--activity", "1"), "--activity does not belong to workload hold"),
    ],
)
def test_mistakes_are_told(gpunode: Run, words: tuple[str, ...], says: str) -> None:
    ended = gpunode("simulate", *words)
    assert ended.code == 2
    assert says in ended.err


@pytest.mark.parametrize("name", [name for name in catalogue.names() if catalogue.describe(name)["simulated"]])
def test_node_file_describes_the_node_it_was_written_from(name: str, tmp_path: Path) -> None:
    file = tmp_path / "node.toml"
    file.write_text(simulate.node_file(name))
    assert spec.read(str(file)) == spec.read(name)


def test_node_file_is_a_node(gpunode: Run, tmp_path: Path) -> None:
    file = tmp_path / "lab.toml"
    file.write_text(gpunode("simulate", "node-file", "a100.40gb:2").out.replace('name = "a100.40gb:2"', 'name = "lab"'))
    told = gpunode("simulate", "describe", file, "--output", "json").json()
    assert told["gpus"] == ["a100-40gb", "a100-40gb"]


class TestNode:
    """What happens to a node that is kept in a file."""

    @pytest.fixture
    def on(self, gpunode: Run, tmp_path: Path) -> Run:
        def run(*words: str, code: int = 0) -> object:
            ended = gpunode(
                "simulate", *words, "--simulate", "p4d.24xlarge", "--sim-state", tmp_path / "S", "--output", "json"
            )
            assert ended.code == code, ended.err
            return ended.json() if code == 0 else ended.err

        return run  # type: ignore[return-value]

    def test_workload_starts_is_listed_and_ends(self, on: Run) -> None:
        pid = on("workload", "start", "3", "--name", "train", "--activity", "0.9")["pid"]  # type: ignore[index]
        held = on("workload", "hold", "3")["pid"]  # type: ignore[index]
        listed = on("workload")["workload"]  # type: ignore[index]
        assert [(user["pid"], user["name"], user["kind"], user["gpu"]) for user in listed] == [
            (pid, "train", "compute", 3),
            (held, "dcgm-exporter", "open-file", 3),
        ]
        on("workload", "stop", str(pid))
        assert "no pid" in str(on("workload", "stop", str(pid), code=2))
        assert on("workload", "stop", "all")["ended"] == 1  # type: ignore[index]

    def test_process_cannot_start_where_there_is_nothing(self, on: Run) -> None:
        assert "MIG off" in str(on("workload", "start", "0/3", code=2))
        assert "it has 8" in str(on("workload", "start", "8", code=2))
        assert "no MIG device" in str(on("workload", "start", "MIG-x", code=2))
        assert "no target" in str(on("workload", "start", "0/1/2/3", code=2))
        assert "write its number" in str(on("workload", "start", "0/x", code=2))
        assert "activity" in str(on("workload", "start", "0", "--activity", "7", code=2))

    def test_faults_are_ordered_listed_and_withdrawn(self, on: Run) -> None:
        on("fault", "fail", "nvmlDeviceCreateGpuInstance*", "--gpu", "2", "--skip", "1")
        on("fault", "delay", "nvmlDeviceGetMigMode", "--seconds", "0.5")
        on("fault", "hang", "nvmlDeviceGetMemoryInfo*")
        listed = on("fault")["faults"]  # type: ignore[index]
        assert [(f["action"], f["gpu"], f["code"], f["seconds"], f["skip"], f["times"]) for f in listed] == [
            ("fail", 2, 999, 0.0, 1, 1),
            ("delay", None, 0, 0.5, 0, 0),
            ("hang", None, 0, 0.0, 0, 1),
        ]
        on("fault", "release", "1")
        assert "no order 1" in str(on("fault", "release", "1", code=2))
        on("fault", "release")
        assert on("fault")["faults"] == []  # type: ignore[index]
        assert "--seconds" in str(on("fault", "delay", "nvmlDeviceGetMigMode", code=2))
        assert "use:" in str(on("fault", "melt", code=2))

    def test_a_call_that_is_not_there_cannot_fail(self, on: Run) -> None:
        told = str(on("fault", "fail", "nvmlDeviceGetNam", code=2))
        assert "no call nvmlDeviceGetNam; did you mean nvmlDeviceGetName?" in told
        on("fault", "fail", "nvmlDeviceGet*")
        on("fault", "fail", "*Instanse*", code=2)
        assert len(on("fault")["faults"]) == 1  # type: ignore[index]

    @pytest.mark.parametrize("memory", ["-5", "999999999"])
    def test_a_process_allocates_what_a_gpu_can_have(self, on: Run, memory: str) -> None:
        assert f"MiB, not {memory}" in str(on("workload", "start", "0", "--memory-mib", memory, code=2))

    def test_reset_is_refused_while_somebody_holds_the_gpu(self, on: Run) -> None:
        assert "nvidia-persistenced" in str(on("reset", code=4))
        assert on("unit", "nvidia-persistenced", "stop")["unit"] == "nvidia-persistenced.service"  # type: ignore[index]
        assert on("reset", "0", "5")["reset"] == [0, 5]  # type: ignore[index]
        on("fault", "reset", "impossible")
        on("reset", "0", code=4)
        on("fault", "reset", "possible")
        on("reset", "0")
        assert "use:" in str(on("unit", "kubelet.service", "pause", code=2))

    def test_gpu_is_lost_until_a_reboot(self, on: Run) -> None:
        on("fault", "lose", "4")
        told = on("fault", "xid", "1", "48")
        assert isinstance(told, dict)
        assert (told["xid"], told["gpu"], told["gpu_instance"], told["compute_instance"]) == (48, 1, None, None)
        assert "no GPU instance 3" in str(on("fault", "xid", "1/3/0", "94", code=2))
        assert "fallen off the bus" in str(on("workload", "start", "4", code=2))
        on("reboot")
        on("workload", "start", "4")
        assert "use:" in str(on("reboot", "now", code=2))


def test_acting_is_told_in_words_too(gpunode: Run, tmp_path: Path) -> None:
    node = ("--simulate", "p4d.24xlarge", "--sim-state", tmp_path / "S")
    assert "started pid" in gpunode("simulate", "workload", "start", "0", *node).out
    assert "python3" in gpunode("simulate", "workload", *node).out
    assert (
        "nothing runs"
        in (gpunode("simulate", "workload", "stop", "all", *node), gpunode("simulate", "workload", *node))[1].out
    )
    assert "no faults" in gpunode("simulate", "fault", *node).out
    assert "will hang" in gpunode("simulate", *node, "fault", "hang", "nvmlInit*").out
    assert "nvmlInit*" in gpunode("simulate", "fault", *node).out
    assert "rebooted" in gpunode("simulate", "reboot", *node).out
