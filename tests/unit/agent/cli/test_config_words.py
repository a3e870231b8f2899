"""A configuration or description that cannot be used is refused in the words of its format, with the key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from agent.cli.main import main
from agent.config import configuration
from agent.config.configuration import parse_configuration
from agent.config.document_problems import Section
from agent.enclosure_control.description import parse_description
from agent.errors import ConfigError
from tests.support.verbs_here import status_of

ENCLOSURE = {"name": "a", "address": "127.0.0.1", "nqn": "nqn.2026-01.io.g35:a"}
PYTHONS_WORDS = re.compile(
    r"Value error|tuple|valid (string|integer|boolean|dictionary)|pattern '|Field required|Path"
)


def document(**sections: Any) -> dict[str, Any]:
    agent = {"mount": "/mnt/g35", "state": "/var/lib/g35", "key_file": "/etc/g35/root.key"}
    found: dict[str, Any] = {"agent": agent, "enclosures": [ENCLOSURE]}
    return found | {name: {**agent, **each} if name == "agent" else each for name, each in sections.items()}


def refused(**sections: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        parse_configuration(document(**sections), "agent.toml")
    assert not PYTHONS_WORDS.search(caught.value.message)
    return caught.value.message


def test_the_reference_takes_a_second_paragraph_for_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Indented as it is in the source, it would be a block of code in Markdown."""

    class TwoParagraphs(Section):
        """The first.

        The second.
        """

    monkeypatch.setattr(configuration, "_sections", lambda _: [("[two]", TwoParagraphs)])
    assert "\nThe first.\n\nThe second.\n" in configuration.reference_markdown()


def test_the_document_of_these_tests_is_usable() -> None:
    parse_configuration(document(), "agent.toml")


@pytest.mark.parametrize("key", ["mount", "state", "key_file"])
def test_a_path_that_depends_on_where_the_agent_is_started(key: str) -> None:
    """`g35 mount` starts it in the root folder: the mount lay elsewhere than g35 unmount looked for it."""
    assert f"agent.{key}: 'relative' is no absolute path" in refused(agent={key: "relative"})


def test_paths_of_secrets_are_absolute_too() -> None:
    assert "is no absolute path" in refused(fabric={"host_secret_file": "host.secret"})
    assert "is no absolute path" in refused(s3={"tenants": [{"tenant": "a", "credentials": "~/keys"}]})


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("0.0.0.0:9035", "agent.metrics: the metrics on 0.0.0.0 would be open to the network"),
        ("[::]:9035", "agent.metrics: the metrics on :: would be open to the network"),
        ("9035", "agent.metrics: '9035' is not an address and a port"),
    ],
)
def test_metrics_beyond_loopback(address: str, said: str) -> None:
    assert said in refused(agent={"metrics": address})


def test_two_volumes_of_one_name() -> None:
    assert "two volumes have one name" in refused(volumes=[{"name": "kv", "share": 0.1}] * 2)


@pytest.mark.parametrize(
    ("volume", "said"),
    [
        ({"unit_size": 70_000}, "units of 70000 bytes: it takes a power of two"),
        ({"unit_size": "4K"}, "unit_size should be greater than or equal to 65536"),
        ({"value_size": 70_000}, "value_size should be a multiple of 4096"),
        ({"kind": "files", "copies": 2}, "two copies are for key-value volumes"),
        ({"share": 2}, "share: should be less than or equal to 1"),
        ({"write": "back"}, "write: unknown key here; it is one of [policies]"),
        ({"kind": "KV"}, "'kv', 'files' or 'shared' (did you mean kv?)"),
    ],
)
def test_a_volume_that_no_format_would_take(volume: dict[str, Any], said: str) -> None:
    assert said in refused(volumes=[{"name": "kv", "share": 0.5, **volume}])


@pytest.mark.parametrize("address", ["[::1]", "::1", "127.0.0.1", "jbof-1.example"])
def test_an_address_of_an_enclosure(address: str) -> None:
    found = parse_configuration(document(enclosures=[{**ENCLOSURE, "address": address}]), "agent.toml")
    assert found.enclosures[0].address == address.strip("[]")


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("127.0.0.1:4420", "has a port in it, which has a key of its own: port = 4420"),
        ("[127.0.0.1]", "is neither an IP address nor a host name"),
        ("[::1", "is neither"),
        ("", "is neither"),
        ("a b", "is neither"),
    ],
)
def test_what_is_no_address(address: str, said: str) -> None:
    assert said in refused(enclosures=[{**ENCLOSURE, "address": address}])


def test_an_address_in_brackets_is_the_same_path() -> None:
    two = [{**ENCLOSURE, "address": "::1"}, {**ENCLOSURE, "name": "b", "address": "[::1]"}]
    assert "two enclosures have one address, port and NQN" in refused(enclosures=two)


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"agent": {"tenants": "blue"}}, "agent.tenants: should be a list, in square brackets"),
        ({"agent": {"workers": "many"}}, "agent.workers: should be a whole number"),
        ({"agent": {"allow_other": "perhaps"}}, "agent.allow_other: should be true or false"),
        ({"agent": {"mount": 5}}, "agent.mount: should be a path, in quotes"),
        ({"prestage": 5}, "prestage: should be a table"),
        ({"enclosures": [{"name": "a b"}]}, "enclosures.0.name: should have 1 to 64 letters, digits"),
        ({"enclosures": [{}]}, "enclosures.0.nqn: is required"),
    ],
)
def test_the_words_are_those_of_the_file(sections: dict[str, Any], said: str) -> None:
    assert said in refused(**sections)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"subsystems": [{"nqn": "a"}]}, "subsystems.0.nqn: should begin with 'nqn.'"),
        ({"keys": [{"name": "a b", "file": "/k"}]}, "keys.0.name: should have 1 to 64 letters"),
        ({"subsystems": {}}, "subsystems: should be a list, in square brackets"),
        (
            {"malloc": [{"name": "m", "size": "1G", "uuid": "12"}]},
            "malloc.0.uuid: '12' is no UUID",
        ),
        (
            {"subsystems": [{"nqn": "nqn.2026-01.io.g35:a", "listeners": [{"address": "[::1]"}]}]},
            "'[::1]' is no IP address; it stands without brackets",
        ),
        (
            {"subsystems": [{"nqn": "nqn.2026-01.io.g35:a", "serial": "é"}]},
            "serial: should have 1 to 20 printable ASCII characters",
        ),
    ],
)
def test_a_description_too(found: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_description(found, "enclosure.toml")
    assert said in caught.value.message
    assert not PYTHONS_WORDS.search(caught.value.message)


def test_the_check_counts_local_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "agent.toml"
    agent = "\n".join(f'{key} = "{each}"' for key, each in document()["agent"].items())
    local = "".join(f'[[local]]\npath = "/x/{name}"\n' for name in "ab")
    file.write_text(f"[agent]\n{agent}\n{local}")
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["config", "check", str(file)])
    assert "enclosures: 0, local devices: 2, volumes: 0" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("processes", "said"),
    [(4, "this agent is one process, not 4: there is a [[local]] table"), (1, ""), (0, "")],
)
def test_the_check_tells_of_processes_that_the_agent_cannot_have(
    processes: int,
    said: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("os.access", lambda path, mode: True)
    monkeypatch.setattr("os.sched_getaffinity", lambda _pid: set(range(16)))
    file = tmp_path / "agent.toml"
    agent = "\n".join(f'{key} = "{each}"' for key, each in document()["agent"].items())
    file.write_text(f'[agent]\n{agent}\nprocesses = {processes}\n[[local]]\npath = "/x/a"\n')
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["config", "check", str(file)])
    lines = capsys.readouterr().out.splitlines()
    assert "usable" in lines[0]
    assert lines[1:] == ([f"{file}: {said}"] if said else [])


@pytest.mark.parametrize(
    "words",
    [
        ["config", "check", "{}"],
        ["tenant", "add", "red", "--config", "{}"],
        ["pool", "show", "--config", "{}"],
    ],
)
def test_every_verb_adds_the_shares_up(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str]
) -> None:
    file = tmp_path / "agent.toml"
    volumes = [f'[[volumes]]\nname = "{name}"\nshare = 0.75\n' for name in "ab"]
    agent = "\n".join(f'{key} = "{each}"' for key, each in document()["agent"].items())
    enclosure = "\n".join(f'{key} = "{each}"' for key, each in ENCLOSURE.items())
    file.write_text(f"[agent]\n{agent}\n[[enclosures]]\n{enclosure}\n{''.join(volumes)}")
    assert main([word.format(file) for word in words]) == 1
    assert "error: the volumes' shares add up to 1.5, which is more than 1" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words",
    [
        ["tenant", "set", "blue", "--config", "agent.toml", "--quota-bytes", "5Q"],
        ["tenant", "add", "blue", "--config", "agent.toml", "--bandwidth", ""],
        ["pool", "scrub", "--config", "agent.toml", "--bandwidth", "fast"],
    ],
)
def test_a_wrong_size_on_the_command_line_is_told_with_its_option(
    words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert status_of(*words) == 2
    assert f"Invalid value for '{words[-2]}': {words[-1]!r} is no size: a size is" in capsys.readouterr().err


def test_a_description_of_nothing_prunes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "enclosure.toml"
    empty.write_text("# one day\n")
    for verb in ("apply", "diff"):
        assert main(["enclosure", verb, str(empty), "--prune", "--rpc", str(tmp_path / "none.sock")]) == 1
        said = capsys.readouterr().err
        assert f"error: {empty} describes nothing: --prune would remove all" in said
        assert "hint: is it the right file?" in said
