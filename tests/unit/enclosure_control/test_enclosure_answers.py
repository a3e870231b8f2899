"""Descriptions and answers that no honest end sends: each is refused by name, none is a bug of ours."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agent.cli.enclosure_verb import _row
from agent.config.configuration import load_configuration
from agent.enclosure_control import records
from agent.enclosure_control.description import load_description
from agent.enclosure_control.rpc_client import RpcClient
from agent.enclosure_control.rpc_errors import RpcAnswerError, RpcError
from agent.enclosure_control.rpc_target import RpcTarget
from agent.enclosure_control.steps import AddKey, AddListener, AddNamespace, AttachNvme, CreateSubsystem
from agent.errors import ConfigError, UserError

BDEV = {"name": "M", "block_size": 512, "num_blocks": 8}


@pytest.mark.parametrize(
    ("text", "part"),
    [("a = " + "[" * 100_000, "nested"), ("a = " + "9" * 5000, "too long")],
    ids=["nested", "digits"],
)
def test_a_file_that_python_chokes_on(tmp_path: Path, text: str, part: str) -> None:
    (tmp_path / "shelf.toml").write_text(text)
    for load in (load_description, load_configuration):
        with pytest.raises(ConfigError, match=part):
            load(tmp_path / "shelf.toml")


@pytest.mark.parametrize(
    "change",
    [{"aliases": 7}, {"aliases": ["\ud800"]}, {"name": "\udfff"}, {"num_blocks": 1 << 64}],
)
def test_a_bdev_that_is_none(change: dict[str, Any]) -> None:
    with pytest.raises(RpcAnswerError):
        records.decoded("bdev_get_bdevs", [BDEV | change], tuple[records.Bdev, ...])


@pytest.mark.parametrize("ticks", [10**400, -(10**400)], ids=["most", "least"])
def test_counters_beyond_all_measure(ticks: int) -> None:
    counters = dict.fromkeys(
        ("num_read_ops", "bytes_read", "num_write_ops", "bytes_written", "write_latency_ticks"), 1
    )
    answer = {"tick_rate": 1, "bdevs": [{"name": "M", "read_latency_ticks": ticks} | counters]}
    with pytest.raises(RpcAnswerError, match="out of range"):
        records.bdev_stats("bdev_get_iostat", answer)


class Answering(RpcClient):
    """Answers by method; a refusal is raised."""

    def __init__(self, **answers: Any) -> None:
        super().__init__(Path("nowhere"))
        self.answers = answers
        self.asked: list[str] = []
        self.local = False

    def call(self, method: str, params: dict[str, Any] | None = None) -> Any:
        self.asked.append(method)
        answer = self.answers[method]
        if isinstance(answer, Exception):
            raise answer
        return answer

    def is_local(self) -> bool:
        return self.local


def test_a_key_that_was_removed_is_not_there_although_it_is_listed() -> None:
    key = {"name": "k", "removed": True}
    caller = Answering(
        keyring_get_keys=[key, key | {"removed": False, "path": "/k"}],
        nvmf_get_subsystems=[],
        nvmf_get_transports=[],
        bdev_get_bdevs=[],
        bdev_nvme_get_controllers=[],
        bdev_lvol_get_lvstores=[],
    )
    assert RpcTarget(caller).read().keys == (records.Key("k", "/k"),)


def test_a_method_that_is_not_there_is_said_before_the_first_step() -> None:
    steps = [
        CreateSubsystem("nqn.s", None, None, None, False),
        AttachNvme("N", records.Address("PCIE", "0000:3b:00.0"), None, None, None, None),
    ]
    target = RpcTarget(Answering(rpc_get_methods=["nvmf_create_subsystem"]))
    target.check_steps(steps[:1])
    with pytest.raises(UserError, match=r"attach NVMe controller N .* no method bdev_nvme_attach_controller"):
        target.check_steps(steps)
    RpcTarget(Answering(rpc_get_methods=RpcError("m", -32601, "Method not found"))).check_steps(steps)
    with pytest.raises(RpcAnswerError):
        RpcTarget(Answering(rpc_get_methods=7)).check_steps(steps)


def test_a_key_file_that_others_can_exchange_is_told_of_before_the_first_step(tmp_path: Path) -> None:
    """SPDK would take it: it looks at the mode of the file alone."""
    key = tmp_path / "keys" / "k"
    key.parent.mkdir()
    key.touch(mode=0o600)
    target = RpcTarget(Answering(rpc_get_methods=["keyring_file_add_key"]))
    target.check_steps([AddKey("k", str(key)), AddKey("elsewhere", "/there/is/none")])
    key.parent.chmod(0o777)
    with pytest.raises(UserError, match="can be written to by others") as refused:
        target.check_steps([AddKey("k", str(key))])
    assert refused.value.advice.startswith(f"chmod go-w {key.parent}")
    key.parent.chmod(0o755)
    key.chmod(0o640)
    with pytest.raises(UserError, match="can be read by others"):
        target.check_steps([AddKey("k", str(key))])


def test_a_missing_key_file_is_found_before_the_first_step(tmp_path: Path) -> None:
    """On the enclosure's own machine; the file may lie on another where the socket is a forwarded one."""
    caller = Answering(rpc_get_methods=["keyring_file_add_key"])
    missing = [AddKey("k", str(tmp_path / "none"))]
    RpcTarget(caller).check_steps(missing)
    caller.local = True
    with pytest.raises(UserError, match=r"key k: there is no file .*/none; nothing was changed") as refused:
        RpcTarget(caller).check_steps(missing)
    assert "g35 key make-dhchap" in refused.value.advice


def test_a_namespace_that_is_refused_names_the_nearest_bdev() -> None:
    refusal = RpcError("nvmf_subsystem_add_ns", -32602, "Invalid parameters")
    bdevs = [BDEV | {"name": "Malloc0"}]
    target = RpcTarget(Answering(nvmf_subsystem_add_ns=refusal, bdev_get_bdevs=bdevs))
    for bdev, advice in (
        ("Maloc0", "there is no bdev Maloc0 (did you mean Malloc0?)"),
        ("Malloc0", "compare"),
    ):
        with pytest.raises(RpcError) as caught:
            target.perform(AddNamespace("nqn.s", records.Namespace(1, bdev)))
        assert caught.value.advice.startswith(advice)


def test_a_listener_that_is_refused_has_a_hint_of_its_own() -> None:
    refusal = RpcError("nvmf_subsystem_add_listener", -32602, "Invalid parameters")
    target = RpcTarget(Answering(nvmf_subsystem_add_listener=refusal))
    with pytest.raises(RpcError) as caught:
        target.perform(AddListener("nqn.s", records.Address("TCP", "10.0.0.7", "4420")))
    assert "port free" in caught.value.advice


def test_a_latency_that_was_not_measured_is_not_shown_as_none() -> None:
    counted = records.BdevStats("M", 2, 8192, 2, 8192, 0.0, 0.000_04, 0)
    assert _row(counted)[3] == "-"
    assert _row(counted)[6] == "20"
