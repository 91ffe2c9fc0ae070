"""Manifests and user data that are shipped as examples: valid by schema, and what they carry is understood."""

from __future__ import annotations

import base64
import email
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import ruamel.yaml

from agent import __version__
from agent.settings import source

ROOT = Path(__file__).resolve().parents[1]
KUBERNETES = sorted((ROOT / "packaging/kubernetes").glob("*.yaml"))
CORE = {"v1", "apps/v1"}
"""API groups whose schemas Kubernetes publishes; the others are custom resources."""
# Fields of the custom resources as their operators' API references list them.
CUSTOM: dict[str, set[str]] = {
    "EC2NodeClass": {
        *(
            "amiFamily",
            "amiSelectorTerms",
            "role",
            "subnetSelectorTerms",
            "securityGroupSelectorTerms",
            "userData",
            "tags",
        ),
        *("blockDeviceMappings", "metadataOptions", "instanceStorePolicy", "kubelet", "instanceProfile"),
    },
    "NodePool": {"template", "limits", "disruption", "weight", "replicas"},
    "PodMonitor": {"selector", "podMetricsEndpoints", "namespaceSelector", "jobLabel", "podTargetLabels"},
}
REQUIRED = {
    "EC2NodeClass": {"amiSelectorTerms", "subnetSelectorTerms", "securityGroupSelectorTerms"},
    "NodePool": {"template"},
    "PodMonitor": {"selector", "podMetricsEndpoints"},
}


def documents(path: Path) -> list[dict[str, Any]]:
    return [dict(document) for document in ruamel.yaml.YAML(typ="safe").load_all(path.read_text())]


def every() -> list[tuple[str, dict[str, Any]]]:
    return [(f"{path.name}: {document['kind']}", document) for path in KUBERNETES for document in documents(path)]


def of_kind(kind: str) -> list[dict[str, Any]]:
    return [document for _, document in every() if document["kind"] == kind]


@pytest.mark.parametrize("version", ["1.33", "1.36"])
@pytest.mark.parametrize(("name", "document"), [pytest.param(*found, id=found[0]) for found in every()])
def test_every_manifest_follows_its_schema(name: str, document: dict[str, Any], version: str) -> None:
    kind = document["kind"]
    if document["apiVersion"] in CORE:
        kubernetes_validate.validate(document, version, strict=True)
        return
    assert set(document) == {"apiVersion", "kind", "metadata", "spec"}, name
    assert set(document["spec"]) <= CUSTOM[kind]
    assert set(document["spec"]) >= REQUIRED[kind]


def test_the_schema_check_can_fail() -> None:
    (daemon_set,) = of_kind("DaemonSet")
    daemon_set["spec"]["template"]["spec"]["hostPIDs"] = True
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(daemon_set, "1.36", strict=True)


class TestDaemonSet:
    @pytest.fixture
    def pod(self) -> dict[str, Any]:
        (document,) = of_kind("DaemonSet")
        found: dict[str, Any] = document["spec"]["template"]["spec"]
        return found

    def test_probes_ask_what_the_server_answers(self, pod: dict[str, Any]) -> None:
        (container,) = pod["containers"]
        assert container["livenessProbe"]["httpGet"] == {"path": "/livez", "port": "metrics"}
        assert container["readinessProbe"]["httpGet"] == {"path": "/readyz", "port": "metrics"}

    def test_it_serves_beyond_loopback_on_the_port_it_names(self, pod: dict[str, Any]) -> None:
        (container,) = pod["containers"]
        (port,) = container["ports"]
        assert f"--listen=0.0.0.0:{port['containerPort']}" in container["args"]

    def test_every_mount_has_its_volume_and_the_hosts_files_lie_under_the_named_root(self, pod: dict[str, Any]) -> None:
        (container,) = pod["containers"]
        assert {m["name"] for m in container["volumeMounts"]} == {v["name"] for v in pod["volumes"]}
        root = {e["name"]: e["value"] for e in container["env"]}["GPUNODE_HOST_ROOT"]
        places = {m["name"]: m["mountPath"] for m in container["volumeMounts"]}
        for volume in pod["volumes"]:
            path = volume.get("hostPath", {}).get("path")
            if path is not None and volume["name"] != "dev":
                assert places[volume["name"]] == (root + path).rstrip("/")

    def test_its_settings_are_read(self, pod: dict[str, Any], tmp_path: Path) -> None:
        (config,) = of_kind("ConfigMap")
        path = tmp_path / "config.toml"
        path.write_text(config["data"]["config.toml"])
        settings = source.load(source.Request(root=tmp_path / "none", files=(path,), environ={}, flags={}))
        assert settings.enforcement == "observe"

    def test_the_image_is_of_this_version(self, pod: dict[str, Any]) -> None:
        assert pod["containers"][0]["image"] == f"gpunode:{__version__}"


def test_bottlerocket_user_data_is_toml_that_gpunode_and_its_container_read(tmp_path: Path) -> None:
    (node_class,) = [d for d in of_kind("EC2NodeClass") if d["spec"]["amiFamily"] == "Bottlerocket"]
    document = tomllib.loads(node_class["spec"]["userData"])
    inner = base64.b64decode(document["settings"]["host-containers"]["gpunode"]["user-data"], validate=True)
    for name, text in (("host", node_class["spec"]["userData"]), ("container", inner.decode())):
        path = tmp_path / f"{name}.toml"
        path.write_text(text)
        source.load(source.Request(root=tmp_path / "none", files=(path,), environ={}, flags={}))


def scripts() -> dict[str, str]:
    """Return every shell script that a machine would run at its first boot."""
    found = {"ecs": (ROOT / "packaging/al2023/ecs-user-data.sh").read_text()}
    texts = {"eks": (ROOT / "packaging/al2023/eks-user-data.txt").read_text()}
    (node_class,) = [d for d in of_kind("EC2NodeClass") if d["spec"]["amiFamily"] == "AL2023"]
    texts["karpenter"] = node_class["spec"]["userData"]
    for name, text in texts.items():
        message = email.message_from_string(text)
        assert message.is_multipart(), name
        parts = message.get_payload()
        assert isinstance(parts, list)
        found[name] = str(next(p.get_payload() for p in parts if p.get_content_type() == "text/x-shellscript"))  # type: ignore[union-attr]
    return found


@pytest.mark.parametrize("name", ["ecs", "eks", "karpenter"])
def test_user_data_is_shell_that_lays_settings_gpunode_reads(name: str, tmp_path: Path) -> None:
    script = scripts()[name]
    subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=30)
    assert f"gpunode-{__version__}-1." in script
    match = re.search(r"cat > /etc/gpunode/config\.toml <<'EOF'\n(.*?)\nEOF\n", script, re.DOTALL)
    assert match is not None
    path = tmp_path / "config.toml"
    path.write_text(match[1])
    settings = source.load(source.Request(root=tmp_path / "none", files=(path,), environ={}, flags={}))
    assert (settings.declaration is not None) is (name != "ecs")


def test_no_user_data_waits_for_units_ordered_after_cloud_final() -> None:
    for name, script in scripts().items():
        assert "systemctl start --no-block gpunode.service" in script, name


def blocks() -> list[tuple[str, str]]:
    """Return every TOML block of the operator's pages."""
    found = []
    for path in [ROOT / "docs/operations.md", *sorted((ROOT / "docs/platforms").glob("*.md"))]:
        for number, match in enumerate(
            re.finditer(r"^```toml\n(.*?)^```$", path.read_text(), re.MULTILINE | re.DOTALL)
        ):
            found.append((f"{path.name} {number}", match[1]))
    return found


@pytest.mark.parametrize(("name", "text"), [pytest.param(*block, id=block[0]) for block in blocks()])
def test_settings_shown_in_the_docs_are_read(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "config.toml"
    path.write_text(text)
    settings = source.load(source.Request(root=tmp_path / "none", files=(path,), environ={}, flags={}))
    assert settings.after_change or settings.declaration, name


def test_links_in_the_docs_lead_somewhere() -> None:
    for path in [ROOT / "docs/operations.md", *(ROOT / "docs/platforms").glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", path.read_text()):
            assert (path.parent / target).exists(), f"{path.name}: {target}"
