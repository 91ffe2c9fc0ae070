from __future__ import annotations

import http.server
import socketserver
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent import errors
from agent.host import real
from tests.host import hosts


def test_paths_lie_under_the_root(host: hosts.Host) -> None:
    assert host.machine.path("/run/gpunode") == host.root / "run/gpunode"
    assert host.machine.root == host.root
    assert real.RealMachine().path("/run") == Path("/run")


def test_the_boot_id_or_an_error_never_a_guess(host: hosts.Host) -> None:
    assert host.machine.boot_id() == "5d0c5a4e-0000-4000-8000-000000000001"
    host.path("/proc/sys/kernel/random/boot_id").unlink()
    with pytest.raises(errors.GpunodeError, match=r"cannot read the boot id"):
        host.machine.boot_id()


@pytest.mark.parametrize(
    ("vendor", "product", "known"),
    [
        ("Amazon EC2", "p4d.24xlarge", "p4d.24xlarge"),
        ("Amazon EC2", "p6-b300.48xlarge", "p6-b300.48xlarge"),
        ("Xen", "HVM domU", None),
        ("Amazon EC2", "HVM domU", None),
        ("QEMU", "Standard.PC", None),
        (None, None, None),
    ],
)
def test_the_instance_type_is_what_nitro_writes(
    host: hosts.Host, vendor: str | None, product: str | None, known: str | None
) -> None:
    if vendor is not None and product is not None:
        host.write("/sys/class/dmi/id/sys_vendor", vendor + "\n")
        host.write("/sys/class/dmi/id/product_name", product + "\n")
    assert host.machine.instance_type() == known


def test_the_machine_is_known_by_instance_id_then_machine_id(host: hosts.Host) -> None:
    assert real.machine_id(host.machine) == "unknown"
    host.write("/etc/machine-id", "0123456789abcdef0123456789abcdef\n")
    assert real.machine_id(host.machine) == "0123456789abcdef0123456789abcdef"
    host.write("/sys/class/dmi/id/board_asset_tag", "i-0abc\n")
    assert real.machine_id(host.machine) == "i-0abc"


class TestHostRoot:
    def test_this_root_by_default(self, tmp_path: Path) -> None:
        assert real.host_root({}, base=tmp_path) == tmp_path

    def test_the_view_a_bottlerocket_container_has(self, tmp_path: Path) -> None:
        view = tmp_path / ".bottlerocket/rootfs"
        view.mkdir(parents=True)
        assert real.host_root({}, base=tmp_path) == view

    def test_what_is_named_wins_and_must_be_there(self, tmp_path: Path) -> None:
        assert real.host_root({"GPUNODE_HOST_ROOT": str(tmp_path)}) == tmp_path
        with pytest.raises(errors.UsageError, match="GPUNODE_HOST_ROOT=/nowhere"):
            real.host_root({"GPUNODE_HOST_ROOT": "/nowhere"})


class TestUnitActive:
    @pytest.mark.parametrize(
        "group", ["system.slice/x.service", "runtime.slice/x.service", "a.slice/a-b.slice/x.service"]
    )
    def test_by_its_populated_cgroup(self, host: hosts.Host, group: str) -> None:
        host.write(f"/sys/fs/cgroup/{group}/cgroup.events", "populated 1\nfrozen 0\n")
        assert host.machine.unit_active("x.service")

    def test_by_version_1_groups(self, host: hosts.Host) -> None:
        host.write("/sys/fs/cgroup/systemd/system.slice/x.service/cgroup.procs", "12\n")
        assert host.machine.unit_active("x.service")

    def test_an_empty_group_is_not_enough(self, host: hosts.Host) -> None:
        host.write("/sys/fs/cgroup/system.slice/x.service/cgroup.events", "populated 0\n")
        assert not host.machine.unit_active("x.service")

    def test_systemd_is_asked_where_there_is_no_group(self, host: hosts.Host) -> None:
        host.systemd("gpunode-reboot.path")
        assert host.machine.unit_active("gpunode-reboot.path")
        assert not host.machine.unit_active("other.path")

    def test_the_kubelet_is_known_by_its_process_where_no_systemd_can_be_asked(self, host: hosts.Host) -> None:
        assert not host.machine.unit_active("kubelet.service")
        host.process(4242, "kubelet")
        assert host.machine.unit_active("kubelet.service")
        assert not host.machine.unit_active("x.service")


class TestUnits:
    def test_only_active_ones_are_stopped_and_all_are_started_again(self, host: hosts.Host) -> None:
        host.systemd("nvidia-persistenced.service")
        stopped = host.machine.stop_units(["nvidia-persistenced.service", "nvidia-dcgm.service"])
        assert stopped == ("nvidia-persistenced.service",)
        assert host.path(real.STOPPED_FILE).read_text() == "nvidia-persistenced.service\n"
        host.machine.start_units(stopped)
        assert host.called() == ["stop nvidia-persistenced.service", "start nvidia-persistenced.service"]
        assert not host.path(real.STOPPED_FILE).exists()

    def test_nothing_active_nothing_done(self, host: hosts.Host) -> None:
        host.systemd()
        assert host.machine.stop_units(["a.service"]) == ()
        host.machine.start_units(())
        assert host.called() == []

    def test_one_that_does_not_stop_brings_the_others_back(self, host: hosts.Host) -> None:
        host.systemd("a.service", "b.service")
        (host.bin / "refuse-b.service").touch()
        with pytest.raises(
            errors.BlockedError, match=r"cannot stop b.service: exit status 1: Job for b.service failed"
        ):
            host.machine.stop_units(["a.service", "b.service"])
        assert host.called() == ["stop a.service", "stop b.service", "start a.service", "start b.service"]

    def test_a_stop_that_hangs_ends_at_its_deadline(self, host: hosts.Host) -> None:
        host.systemd("a.service")
        (host.bin / "stuck").touch()
        machine = real.RealMachine(host.root, search=[host.bin], unit_deadline=0.3)
        with pytest.raises(errors.BlockedError, match=r"cannot stop a.service: no end after 0\.3 s"):
            machine.stop_units(["a.service"])

    def test_what_a_dead_run_left_stopped_is_found(self, host: hosts.Host) -> None:
        host.systemd("a.service")
        host.machine.stop_units(["a.service"])
        after_a_crash = real.RealMachine(host.root, search=[host.bin])
        assert after_a_crash.start_left_units() == ("a.service",)
        assert after_a_crash.start_left_units() == ()
        assert host.called() == ["stop a.service", "start a.service"]

    def test_all_are_tried_before_one_that_fails_is_told(self, host: hosts.Host) -> None:
        host.systemd()
        (host.bin / "refuse-start-a.service").touch()
        with pytest.raises(
            errors.GpunodeError, match=r"cannot start again a\.service: exit status 1: Unit a.service is masked"
        ):
            host.machine.start_units(["a.service", "b.service"])
        assert host.called() == ["start a.service", "start b.service"]

    def test_a_container_says_that_units_are_out_of_reach(self, host: hosts.Host) -> None:
        host.write("/sys/fs/cgroup/system.slice/a.service/cgroup.events", "populated 1\n")
        with pytest.raises(errors.BlockedError, match=r"cannot stop a.service: the host's systemd is out of reach"):
            real.RealMachine(host.root).stop_units(["a.service"])
        with pytest.raises(
            errors.GpunodeError, match=r"cannot start again a.service: the host's systemd is out of reach"
        ):
            real.RealMachine(host.root).start_units(["a.service"])


class TestReset:
    def test_exactly_the_named_gpus(self, host: hosts.Host) -> None:
        host.tool("nvidia-smi", 'echo "$@" >> $CALLS')
        host.machine.reset_gpus(["00000000:10:1C.0", "00000000:20:1C.0"])
        assert host.called() == ["--gpu-reset -i 00000000:10:1C.0,00000000:20:1C.0"]

    def test_a_refusal_carries_its_words_and_who_has_the_gpu(self, host: hosts.Host) -> None:
        host.tool("nvidia-smi", 'echo "GPU 00000000:10:1C.0 is currently in use by another process."; exit 19')
        host.write("/proc/driver/nvidia/gpus/0000:10:1c.0/information", "Model: \t\t A100\nDevice Minor: \t 3\n")
        host.process(900, "nvidia-persistenced", opens=("/dev/nvidia3", "/dev/nvidiactl"))
        host.process(901, "python3", opens=("/dev/nvidia5",))
        with pytest.raises(errors.ResetRefused) as refused:
            host.machine.reset_gpus(["00000000:10:1C.0"])
        assert str(refused.value) == (
            "cannot reset GPU 00000000:10:1C.0: nvidia-smi says exit status 19: GPU 00000000:10:1C.0 is currently in use by"
            " another process."
        )
        assert refused.value.holders == (
            "service nvidia-persistenced (pid 900): add nvidia-persistenced.service to release-before-reset",
        )

    def test_a_hang_ends_at_the_deadline(self, host: hosts.Host) -> None:
        host.tool("nvidia-smi", "sleep 60")
        machine = real.RealMachine(host.root, search=[host.bin], reset_deadline=0.3)
        with pytest.raises(errors.ResetRefused, match=r"no end after 0\.3 s"):
            machine.reset_gpus(["00000000:10:1C.0"])

    def test_no_tool_is_said(self, host: hosts.Host) -> None:
        with pytest.raises(errors.ResetRefused, match="there is no nvidia-smi on this host"):
            real.RealMachine(host.root).reset_gpus(["00000000:10:1C.0"])

    def test_under_another_root_the_tool_runs_in_that_root(self, host: hosts.Host) -> None:
        host.write("/usr/bin/nvidia-smi", "#!/bin/sh\n").chmod(0o755)
        with pytest.raises(errors.ResetRefused, match="chroot"):  # this root has no /bin/sh to run it with
            real.RealMachine(host.root).reset_gpus(["00000000:10:1C.0"])


class _Unix(socketserver.ThreadingMixIn, socketserver.UnixStreamServer):
    daemon_threads = True


@pytest.fixture
def api(tmp_path: Path) -> Iterator[Callable[[int, str], tuple[Path, list[str]]]]:
    """Bottlerocket's API socket, answering `status` and `text` to everything."""
    servers = []

    def start(status: int, text: str) -> tuple[Path, list[str]]:
        asked: list[str] = []

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                asked.append(f"POST {self.path}")
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def address_string(self) -> str:
                return "unix"

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        path = tmp_path / "api.sock"
        server = _Unix(str(path), Handler)
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        servers.append(server)
        return path, asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


class TestReboot:
    def test_the_watched_file_is_written(self, host: hosts.Host) -> None:
        host.systemd("gpunode-reboot.path")
        host.machine.request_reboot("MIG mode of GPU 0 waits for it")
        assert host.path(real.REBOOT_FILE).read_text() == "MIG mode of GPU 0 waits for it\n"

    def test_nobody_watching_is_an_error_not_a_wait(self, host: hosts.Host) -> None:
        host.systemd()
        with pytest.raises(errors.GpunodeError, match=r"gpunode-reboot\.path is not active"):
            host.machine.request_reboot("why")
        assert not host.path(real.REBOOT_FILE).exists()

    def test_a_file_that_cannot_be_written_is_an_error(self, host: hosts.Host) -> None:
        host.systemd("gpunode-reboot.path")
        host.write("/run/gpunode", "not a directory")
        with pytest.raises(errors.GpunodeError, match=r"cannot ask for a reboot: /run/gpunode/reboot-required"):
            host.machine.request_reboot("why")

    def test_bottlerocket_is_asked_through_its_api(
        self, host: hosts.Host, api: Callable[[int, str], tuple[Path, list[str]]]
    ) -> None:
        path, asked = api(204, "")
        host.path("/run").mkdir()
        path.rename(host.path("/run/api.sock"))
        host.write("/etc/os-release", "NAME=Bottlerocket\nID=bottlerocket\n")
        host.machine.request_reboot("why")
        assert asked == ["POST /actions/reboot"]

    def test_a_refusal_of_the_api_is_told(
        self, host: hosts.Host, api: Callable[[int, str], tuple[Path, list[str]]]
    ) -> None:
        path, _ = api(409, "Disallowed")
        machine = real.RealMachine(host.root, api_socket=path)
        with pytest.raises(errors.GpunodeError, match="it answers 409 Disallowed"):
            machine.request_reboot("why")

    def test_an_api_that_is_gone_is_told(self, host: hosts.Host) -> None:
        machine = real.RealMachine(host.root, api_socket=host.path("/gone.sock"))
        with pytest.raises(errors.GpunodeError, match=r"cannot ask Bottlerocket's API for a reboot"):
            machine.request_reboot("why")


def test_settings_of_a_bottlerocket_container_lie_beside_its_view_of_the_host(host: hosts.Host) -> None:
    assert real.settings_root(host.machine) == host.root
    assert real.settings_root(real.RealMachine(Path(real.BOTTLEROCKET_ROOT))) == Path("/")
