"""The chain of sources: who wins, where it came from, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from agent import errors
from agent.settings import model, source, userdata
from tests.settings import api as apis

Load = Callable[..., model.Settings]
Write = Callable[..., Path]

# Lowest first: a name, how to set an option there, and what the provenance must then say.
CHAIN = ("defaults", "ec2", "container", "config", "drop-in", "later drop-in", "environment", "flags")
VALUES = [("period", f"{10 + n}", 10.0 + n) for n in range(len(CHAIN))]


def put(write: Write, where: str, text: str) -> str:
    """Write a gpunode table for one of the file sources; return the name it is known by."""
    names = {
        "container": userdata.CONTAINER_FILES[0],
        "config": source.CONFIG_FILE,
        "drop-in": source.CONFIG_DIRECTORY + "/10-a.toml",
        "later drop-in": source.CONFIG_DIRECTORY + "/9-b.toml",
    }
    if where == "ec2":
        text = (
            'Content-Type: multipart/mixed; boundary="B"\n\n--B\n'
            f"Content-Type: application/gpunode+toml\n\n{text}\n--B--\n"
        )
        return f"EC2 user data {write('root/' + userdata.EC2_FILE, text)}"
    return str(write("root/" + names[where], text))


def chain(write: Write, tmp_path: Path, upto: int, key: str, values: list[str]) -> tuple[model.Settings, str]:
    """Load with the first `upto` sources saying something about `key`; return the highest one's name."""
    environ = {"GPUNODE_EC2_USER_DATA": "1"}
    flags: dict[str, object] = {}
    name = "default"
    for place, value in list(zip(CHAIN, values, strict=True))[1:upto]:
        if place == "environment":
            environ[f"GPUNODE_{key.upper().replace('-', '_')}"] = str(json.loads(value))
            name = "environment"
        elif place == "flags":
            flags[key.replace("-", "_")] = json.loads(value)
            name = "flags"
        else:
            name = put(write, place, f"[gpunode]\n{key} = {value}")
    request = source.Request(root=tmp_path / "root", environ=environ, flags=flags)
    return source.load(request), name


@pytest.mark.parametrize("upto", range(1, len(CHAIN) + 1), ids=CHAIN)
@pytest.mark.parametrize(
    ("key", "values"),
    [
        ("period", ["60", *(str(10 + n) for n in range(7))]),
        ("enforcement", ['"boot"', *['"observe"', '"continuous"'] * 3, '"boot"']),
        ("dcgm-metrics", ["false", *["true", "false"] * 3, "true"]),
        ("owner", ['"auto"', *['"gpunode"', '"migmanager"'] * 3, '"dra-dynamic"']),
    ],
)
def test_every_source_overrides_the_one_before_it(
    write: Write, tmp_path: Path, upto: int, key: str, values: list[str]
) -> None:
    settings, name = chain(write, tmp_path, upto, key, values)
    assert getattr(settings, key.replace("-", "_")) == json.loads(values[upto - 1])
    origin = settings.provenance[key]
    assert origin.source == name
    if origin.file is not None:
        assert origin.line == 2
        assert origin.key == f"gpunode.{key}"
    if upto > 1:
        assert name in settings.sources


def test_keys_of_different_sources_stand_side_by_side(write: Write, tmp_path: Path) -> None:
    put(write, "config", '[gpunode]\nperiod = 5\nowner = "gpunode"')
    put(write, "drop-in", "[gpunode]\nperiod = 6")
    settings = source.load(source.Request(root=tmp_path / "root", environ={"GPUNODE_MODE_CHANGE": "reboot"}))
    assert (settings.period, settings.owner, settings.mode_change) == (6.0, "gpunode", ("reboot",))
    assert str(settings.provenance["period"]).endswith("10-a.toml line 2")
    assert str(settings.provenance["mode-change"]) == "environment, key GPUNODE_MODE_CHANGE"
    assert str(settings.provenance["listen"]) == "default"


LAYOUT = "[[gpunode.layout]]\ngpus = [{}]\nmig = false\n"
UNIFORM = '[settings.kubelet-device-plugins.nvidia]\ndevice-partitioning-strategy = "mig"\n'


def test_the_layout_as_a_whole_is_one_key(write: Write, tmp_path: Path) -> None:
    request = source.Request(root=tmp_path / "root")
    with apis.serving(tmp_path / "root" / "run" / "api.sock") as api:
        api.answer(apis.MIG)
        assert str(source.load(request).provenance["layout"]).startswith("Bottlerocket API")
        put(write, "ec2", UNIFORM)
        enabled = source.Request(root=tmp_path / "root", environ={"GPUNODE_EC2_USER_DATA": "1"})
        assert source.load(enabled).provenance["layout"].source.startswith("EC2 user data")
        name = put(write, "container", LAYOUT.format(0))
        assert source.load(request).provenance["layout"].source == name
        name = put(write, "config", LAYOUT.format(1))
        settings = source.load(request)
        assert settings.provenance["layout"].source == name
        assert isinstance(settings.declaration, model.LayoutDeclaration)
        assert [entry.gpus for entry in settings.declaration.entries] == [(1,)]
        assert settings.bottlerocket is not None
        assert settings.bottlerocket.partitions


def test_the_configuration_files_are_one_source_and_their_layouts_add_up(write: Write, tmp_path: Path) -> None:
    put(write, "config", LAYOUT.format(1))
    put(write, "drop-in", LAYOUT.format(2))
    put(write, "later drop-in", LAYOUT.format(3))
    settings = source.load(source.Request(root=tmp_path / "root"))
    assert isinstance(settings.declaration, model.LayoutDeclaration)
    assert [entry.gpus for entry in settings.declaration.entries] == [(1,), (2,), (3,)]


def test_bottlerocket_tables_of_several_files_are_laid_over_each_other(write: Write, tmp_path: Path) -> None:
    profile = '[settings.kubelet-device-plugins.nvidia.mig.profile]\n"a100.40gb" = "{}"\n"h100.80gb" = "{}"\n'
    put(write, "config", UNIFORM + profile.format("7", "7"))
    put(write, "drop-in", profile.format("3", "7").replace('"h100', '"h200'))
    settings = source.load(source.Request(root=tmp_path / "root"))
    assert isinstance(settings.declaration, model.BottlerocketDeclaration)
    assert [(c.key, c.count) for c in settings.declaration.choices] == [
        ("a100.40gb", 3),
        ("h100.80gb", 7),
        ("h200.80gb", 7),
    ]
    assert settings.problems == ()


@pytest.mark.parametrize(
    ("one", "other"),
    [(UNIFORM, LAYOUT.format(0)), (LAYOUT.format(0), '[gpunode.mig-parted]\nfile = "m.yaml"\n')],
)
def test_two_ways_to_declare_a_layout_in_one_source_are_refused(
    write: Write, tmp_path: Path, one: str, other: str
) -> None:
    write("root/etc/gpunode/config.d/m.yaml", "version: v1\nmig-configs: {x: [{devices: all, mig-enabled: false}]}")
    put(write, "config", one)
    put(write, "drop-in", other)
    with pytest.raises(errors.SettingsError) as caught:
        source.load(source.Request(root=tmp_path / "root"))
    (problem,) = caught.value.problems
    assert problem.code == "two-declarations"
    assert "declared in two ways: here, and at" in problem.message


def test_hidden_and_other_files_of_the_directory_are_left_alone(write: Write, tmp_path: Path) -> None:
    for name in (".hidden.toml", "a.toml~", "README", "..data/b.toml"):
        write(f"root/{source.CONFIG_DIRECTORY}/{name}", "not TOML at all")
    assert source.load(source.Request(root=tmp_path / "root")).sources == ()


def test_a_directory_that_is_a_file_is_an_error(write: Write, tmp_path: Path) -> None:
    write(f"root/{source.CONFIG_DIRECTORY}", "")
    with pytest.raises(errors.SettingsError, match=r"config\.d: cannot read it: Not a directory"):
        source.load(source.Request(root=tmp_path / "root"))


def test_a_source_that_cannot_be_read_is_an_error_beside_all_others(write: Write, tmp_path: Path) -> None:
    put(write, "container", "[gpunode\n")
    put(write, "config", "[gpunode]\nperiod = 0\nowner = 1\n")
    put(write, "drop-in", "[gpunode]\nperiods = 1\n")
    with pytest.raises(errors.SettingsError) as caught:
        source.load(source.Request(root=tmp_path / "root", environ={"GPUNODE_LISTEN": "nowhere"}))
    assert [(p.code, p.line) for p in caught.value.problems if p.file] == [
        ("invalid-value", 2),
        ("invalid-value", 3),
        ("unknown-key", 2),
        ("syntax", 1),
    ]
    assert [p.key for p in caught.value.problems if not p.file] == ["GPUNODE_LISTEN"]


# --- --settings -------------------------------------------------------------------------------------


def test_settings_files_replace_the_other_files(write: Write, tmp_path: Path) -> None:
    put(write, "config", "[gpunode]\nperiod = 5")
    put(write, "container", "[gpunode]\nperiod = 5")
    own = write("own.toml", '[gpunode]\nowner = "gpunode"')
    request = source.Request(root=tmp_path / "root", files=(own,), environ={"GPUNODE_SAMPLE_INTERVAL": "2"})
    settings = source.load(request)
    assert (settings.period, settings.owner, settings.sample_interval) == (60.0, "gpunode", 2.0)
    assert settings.sources == (str(own), "environment")


def test_settings_files_may_be_named_in_the_environment(write: Write, tmp_path: Path) -> None:
    one, two = write("1.toml", "[gpunode]\nperiod = 5"), write("2.toml", "[gpunode]\nperiod = 6")
    request = source.Request(root=tmp_path, environ={"GPUNODE_SETTINGS": f"{one}:{two}"})
    assert source.load(request).period == 6.0
    before = source.fingerprint(request)
    two.write_text("[gpunode]\nperiod = 77")
    assert source.fingerprint(request) != before


def test_a_settings_file_must_exist(tmp_path: Path) -> None:
    with pytest.raises(errors.SettingsError, match=r"gone\.toml: there is no such file"):
        source.load(source.Request(root=tmp_path, files=(tmp_path / "gone.toml",)))


MIG_PARTED = "version: v1\nmig-configs: {x: [{devices: all, mig-enabled: false}]}"


@pytest.mark.parametrize(
    ("name", "text", "kind"),
    [
        ("a.yaml", MIG_PARTED, model.MigPartedDeclaration),
        ("a.yml", MIG_PARTED, model.MigPartedDeclaration),
        (
            "a.json",
            '{"version": "v1", "mig-configs": {"x": [{"devices": "all", "mig-enabled": false}]}}',
            model.MigPartedDeclaration,
        ),
        ("a.json", json.dumps(apis.MIG), model.BottlerocketDeclaration),
        ("a.json", json.dumps({"settings": apis.MIG}), model.BottlerocketDeclaration),
        ("a.json", '{"gpunode": {"layout": [{"gpus": "all", "mig": false}]}}', model.LayoutDeclaration),
        ("noextension", UNIFORM, model.BottlerocketDeclaration),
    ],
)
def test_the_kind_of_a_document_goes_by_its_name(load: Load, name: str, text: str, kind: type[object]) -> None:
    assert isinstance(load(text, name=name).declaration, kind)


def test_problems_in_json_have_lines_too(load: Load) -> None:
    with pytest.raises(errors.SettingsError) as caught:
        load('{\n "gpunode": {\n  "owner": "me"\n }\n}', name="a.json")
    assert caught.value.problems[0].line == 3


def test_half_a_character_of_json_is_refused(load: Load) -> None:
    with pytest.raises(errors.SettingsError, match="unicode string"):
        load('{"gpunode": {"listen": ["\\ud800"]}}', name="a.json")


def test_the_api_s_answer_in_a_file_is_no_word_of_the_host(load: Load) -> None:
    settings = load(json.dumps(apis.MIG), name="a.json")
    assert isinstance(settings.declaration, model.BottlerocketDeclaration)
    assert not settings.declaration.from_host


# --- environment and flags --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "text", "field", "value"),
    [
        ("ENFORCEMENT", "observe", "enforcement", "observe"),
        ("MODE_CHANGE", "reset, reboot", "mode_change", ("reset", "reboot")),
        ("MODE_CHANGE", "none", "mode_change", ()),
        ("MODE_CHANGE", "", "mode_change", ("reset",)),
        ("RELEASE_BEFORE_RESET", "a.service,b.service,a.service", "release_before_reset", ("a.service", "b.service")),
        ("LIVE_MODE_CHANGE", "yes", "live_mode_change", True),
        ("DCGM_METRICS", "0", "dcgm_metrics", False),
        ("SAMPLE_INTERVAL", "0.5", "sample_interval", 0.5),
        ("PERIOD", "30", "period", 30.0),
        ("WEB_CONFIG_FILE", "/etc/web.yml", "web_config_file", Path("/etc/web.yml")),
        ("LISTEN", "[::1]:19400,unix:/run/s", "listen", ("[::1]:19400", "unix:/run/s")),
        ("NOT_CAPABLE", " ignore ", "not_capable", "ignore"),
    ],
)
def test_a_variable_of_the_environment(tmp_path: Path, name: str, text: str, field: str, value: object) -> None:
    settings = source.load(source.Request(root=tmp_path, environ={f"GPUNODE_{name}": text}))
    assert getattr(settings, field) == value


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("ENFORCEMENT", "bot", 'did you mean "boot"?'),
        ("MODE_CHANGE", "resett", 'did you mean "reset"?'),
        ("LIVE_MODE_CHANGE", "maybe", "must be true or false"),
        ("PERIOD", "soon", "must be a number"),
        ("PERIOD", "0", "must be at least 1, and is 0.0"),
        ("PERIOD", "nan", "must be"),
        ("SAMPLE_INTERVAL", "99999", "must be at most 3600"),
        ("LISTEN", "nowhere", "no address to listen on"),
    ],
)
def test_a_variable_with_a_slip(tmp_path: Path, name: str, text: str, says: str) -> None:
    with pytest.raises(errors.SettingsError) as caught:
        source.load(source.Request(root=tmp_path, environ={f"GPUNODE_{name}": text, "GPUNODE_OWNER": "gpunode"}))
    (problem,) = caught.value.problems
    assert problem.key == f"GPUNODE_{name}"
    assert says in problem.message


def test_a_variable_that_is_nearly_one_of_ours_is_warned_about(tmp_path: Path) -> None:
    environ = {"GPUNODE_ENFORCMENT": "boot", "GPUNODE_SERVICE_HOST": "10.0.0.1", "GPUNODE_DISABLED": "1", "HOME": "/"}
    (problem,) = source.load(source.Request(root=tmp_path, environ=environ)).problems
    assert problem.severity == "warning"
    assert "did you mean GPUNODE_ENFORCEMENT?" in problem.message


def test_a_flag_wins_over_a_variable(tmp_path: Path) -> None:
    request = source.Request(
        root=tmp_path,
        environ={"GPUNODE_LISTEN": "127.0.0.1:1"},
        flags={"listen": ("127.0.0.1:2",), "web_config_file": Path("/w.yml")},
    )
    settings = source.load(request)
    assert settings.listen == ("127.0.0.1:2",)
    assert settings.web_config_file == Path("/w.yml")
    assert str(settings.provenance["listen"]) == "flags, key --listen"


def test_a_flag_with_a_slip(tmp_path: Path) -> None:
    with pytest.raises(errors.SettingsError, match=r"key --listen: .*no address"):
        source.load(source.Request(root=tmp_path, flags={"listen": ("x",)}))


def test_a_mig_parted_document_may_be_named_in_the_environment_and_the_flag_wins(write: Write, tmp_path: Path) -> None:
    path = write(
        "m.yaml",
        "version: v1\nmig-configs: {a: [{devices: all, mig-enabled: false}], b: [{devices: [0], mig-enabled: false}]}",
    )
    environ = {"GPUNODE_MIG_CONFIG": f"{path}:a"}
    settings = source.load(source.Request(root=tmp_path, environ=environ))
    assert isinstance(settings.declaration, model.MigPartedDeclaration)
    assert settings.declaration.label == "a"
    request = source.Request(root=tmp_path, environ=environ, mig_config=f"{path}:b")
    settings = source.load(request)
    assert isinstance(settings.declaration, model.MigPartedDeclaration)
    assert settings.declaration.label == "b"
    before = source.fingerprint(request)
    path.write_text(path.read_text() + "\n")
    assert source.fingerprint(request) != before


# --- digest and fingerprint -------------------------------------------------------------------------


def test_the_digest_tells_what_is_asked_not_how_it_is_written(load: Load) -> None:
    first = load(LAYOUT.format(0)).digest
    assert load("# a comment\n\n" + LAYOUT.format(0), name="other.toml").digest == first
    assert load(LAYOUT.format(1)).digest != first
    assert load(LAYOUT.format(0) + "[gpunode]\nperiod = 5\n").digest != first
    assert load(LAYOUT.format(0) + "[gpunode]\nperiod = 60\n").digest == first


@pytest.mark.parametrize(
    "change",
    [
        lambda root: (root / "etc/gpunode/config.toml").write_text("[gpunode]\nperiod = 11\n"),
        lambda root: (root / "etc/gpunode/config.toml").unlink(),
        lambda root: (root / "etc/gpunode/config.d/b.toml").write_text(""),
        lambda root: (root / "etc/gpunode/config.d/a.toml").rename(root / "etc/gpunode/config.d/c.toml"),
        lambda root: (root / "etc/gpunode/config.d/a.toml").chmod(0o600),
        lambda root: (root / userdata.CONTAINER_FILES[0]).write_text("x"),
    ],
)
def test_the_fingerprint_sees_every_change(write: Write, tmp_path: Path, change: Callable[[Path], object]) -> None:
    put(write, "config", "[gpunode]\nperiod = 5")
    write("root/etc/gpunode/config.d/a.toml", "")
    write("root/" + userdata.CONTAINER_FILES[0], "")
    request = source.Request(root=tmp_path / "root")
    before = source.fingerprint(request)
    assert source.fingerprint(request) == before
    change(tmp_path / "root")
    assert source.fingerprint(request) != before


def test_a_fingerprint_of_something_unreadable_is_no_error(write: Write, tmp_path: Path) -> None:
    write("root/" + source.CONFIG_DIRECTORY, "")
    assert source.fingerprint(source.Request(root=tmp_path / "root"))
    assert source.fingerprint(source.Request(files=(Path("a\0b"),)))
