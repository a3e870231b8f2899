"""Our deadline and bounds around SPDK's JSON-RPC client, against a peer that follows a script."""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.enclosure_control import rpc_client
from agent.enclosure_control.rpc_client import RpcClient
from agent.enclosure_control.rpc_errors import RpcAnswerError, RpcError, RpcTimeout, RpcUnreachable
from agent.errors import Fault

Script = Callable[[socket.socket, dict[str, Any]], None]


class ScriptedTarget:
    """Hands each request, with its connection, to the script; returns from it end the connection."""

    def __init__(self, path: Path) -> None:
        self.script: Script = lambda sock, request: None
        self.stop = threading.Event()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(path))
        self._listener.listen(4)
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                return
            with sock:
                text = b""
                while True:
                    text += sock.recv(4096)
                    try:
                        request = json.loads(text)
                        break
                    except ValueError:
                        continue
                with contextlib.suppress(OSError):  # the client may have hung up
                    self.script(sock, request)

    def close(self) -> None:
        self.stop.set()
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(10)


@pytest.fixture
def target(tmp_path: Path) -> Iterator[ScriptedTarget]:
    made = ScriptedTarget(tmp_path / "rpc")
    yield made
    made.close()


@pytest.fixture
def client(tmp_path: Path, target: ScriptedTarget) -> Iterator[RpcClient]:
    with contextlib.closing(RpcClient(tmp_path / "rpc", 20.0)) as made:
        yield made


def answering(result: Any) -> Script:
    def script(sock: socket.socket, request: dict[str, Any]) -> None:
        sock.sendall(json.dumps({"jsonrpc": "2.0", "id": request["id"], "result": result}).encode())

    return script


def refusing(code: int, message: str) -> Script:
    def script(sock: socket.socket, request: dict[str, Any]) -> None:
        error = {"code": code, "message": message}
        sock.sendall(json.dumps({"jsonrpc": "2.0", "id": request["id"], "error": error}).encode())

    return script


def test_a_call_has_its_parameters_and_its_result(target: ScriptedTarget, client: RpcClient) -> None:
    seen: list[dict[str, Any]] = []

    def script(sock: socket.socket, request: dict[str, Any]) -> None:
        seen.append(request)
        answering({"a": [1, "ä" * 300_000]})(sock, request)

    target.script = script
    params = {"name": "x", "nested": {"y": 1}}
    assert client.call("some_method", params) == {"a": [1, "ä" * 300_000]}
    assert seen[0]["method"] == "some_method"
    assert seen[0]["params"] == params == {"name": "x", "nested": {"y": 1}}


def test_characters_may_be_cut_anywhere(target: ScriptedTarget, client: RpcClient) -> None:
    def script(sock: socket.socket, request: dict[str, Any]) -> None:
        for byte in json.dumps({"id": request["id"], "result": "aé€😀}"}, ensure_ascii=False).encode():
            sock.sendall(bytes([byte]))

    target.script = script
    assert client.call("m") == "aé€😀}"


@pytest.mark.parametrize(
    ("code", "fault"),
    [
        (-32601, Fault.WORLD), (-32602, Fault.OURS), (-32603, Fault.OURS), (-errno.ENODEV, Fault.OURS),
        (-errno.EEXIST, Fault.OURS), (-errno.ENOMEM, Fault.WORLD), (-1, Fault.OURS), (-114, Fault.WORLD),
        (-32600, Fault.BUG),
    ],
)  # fmt: skip
def test_a_refusal_keeps_its_code_and_says_whose_fault_it_is(
    target: ScriptedTarget, client: RpcClient, code: int, fault: Fault
) -> None:
    target.script = refusing(code, "the target's words")
    params = {"name": "x"}
    with pytest.raises(RpcError, match="bdev_get_bdevs: the target's words") as caught:
        client.call("bdev_get_bdevs", params)
    assert (caught.value.code, caught.value.fault) == (code, fault)
    assert caught.value.text == "the target's words"
    assert caught.value.advice
    assert params == {"name": "x"}, "the package's client writes into them"


def silent(target: ScriptedTarget) -> Script:
    return lambda sock, request: target.stop.wait(20) and None


def dripping(target: ScriptedTarget) -> Script:
    """Some byte every few milliseconds, for ever: a time-out of silence would never come."""

    def script(sock: socket.socket, request: dict[str, Any]) -> None:
        while not target.stop.wait(0.005):
            sock.sendall(b" ")

    return script


@pytest.mark.parametrize("way", [silent, dripping])
def test_the_deadline_is_one_of_the_wall_clock(
    target: ScriptedTarget, client: RpcClient, way: Callable[[ScriptedTarget], Script]
) -> None:
    target.script = way(target)
    client.timeout_s = 0.2
    began, cpu = time.monotonic(), time.process_time()
    with pytest.raises(RpcTimeout, match="no answer"):
        client.call("m")
    assert 0.2 <= time.monotonic() - began < 10
    assert time.process_time() - cpu < 10


def test_a_late_answer_is_not_taken_for_the_next_one(target: ScriptedTarget, client: RpcClient) -> None:
    target.script = dripping(target)
    client.timeout_s = 0.1
    with pytest.raises(RpcTimeout):
        client.call("m")
    client.timeout_s = 20
    target.script = answering(35)
    assert client.call("m") == 35


@pytest.mark.parametrize(
    ("raw", "part"),
    [
        (b'{"id":99,"result":1}\n', "not asked"),
        (b'{"result":1}\n', "not asked"),
        (b"[1]\n", "not asked"),
        (b'{"id":1}\n', "neither"),
        (b'{"id":1,"error":"no"}\n', "without a code"),
        (b'{"id":1,"error":{"code":"1"}}\n', "without a code"),
        (b'{"id":1,"result":"\xff"}\n', "UTF-8"),
        (b"[" * 200_000 + b"\n", "nested"),
        (b'{"id":1,"result":"' + b"x" * 70_000, "longer"),
        (b'{"id":1,"result":' + b"9" * 5000 + b"}\n", "no JSON"),
        (b"220 mail.example.com ESMTP", "no JSON"),
        (b'{"id":1 "result":2}\n', "no JSON"),
    ],
)
def test_an_answer_that_is_none_is_the_peers_fault(
    target: ScriptedTarget, client: RpcClient, monkeypatch: pytest.MonkeyPatch, raw: bytes, part: str
) -> None:
    if part == "longer":
        monkeypatch.setattr(rpc_client, "ANSWER_BYTES_MAX", 65536)

    def script(sock: socket.socket, request: dict[str, Any]) -> None:
        sock.sendall(raw)
        target.stop.wait(20)

    target.script = script
    with pytest.raises(RpcAnswerError, match=part) as caught:
        client.call("m")
    assert caught.value.fault is Fault.PEER


@given(
    value=st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(),
        lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner),
    ),
    indent=st.sampled_from([None, 1]),
    escaped=st.booleans(),
)
def test_what_may_go_on_is_not_taken_for_no_json(value: Any, indent: int | None, escaped: bool) -> None:
    text = json.dumps({"result": value}, indent=indent, ensure_ascii=escaped)
    for end in range(1, len(text) + 1):
        if text[end - 1] in "}]\n":
            assert not rpc_client._is_no_json(text[:end])


def test_a_refusal_cannot_write_to_the_terminal(target: ScriptedTarget, client: RpcClient) -> None:
    target.script = refusing(-5, "\x1b[31mred\nand \ud800")
    with pytest.raises(RpcError, match=r"\\x1b\[31mred\\x0aand \\xd800"):
        client.call("m")


def test_a_connection_that_ends_is_told_and_made_anew(target: ScriptedTarget, client: RpcClient) -> None:
    with pytest.raises(RpcUnreachable, match="without an answer"):
        client.call("m")
    target.script = lambda sock, request: sock.sendall(b'{"id":1,')
    with pytest.raises(RpcUnreachable, match="without an answer"):
        client.call("m")
    target.script = answering(True)
    assert client.call("m") is True


def test_nobody_there(tmp_path: Path) -> None:
    with pytest.raises(RpcUnreachable, match="no enclosure answers"):
        RpcClient(tmp_path / "none").call("m")


def test_the_packages_client_prints_nothing_and_leaves_no_handler(
    target: ScriptedTarget, client: RpcClient, capfd: pytest.CaptureFixture[str]
) -> None:
    target.script = refusing(-32601, "Method not found")
    for _ in range(3):
        with pytest.raises(RpcError):
            client.call("m")
        client.close()
    assert capfd.readouterr() == ("", "")
    assert logging.getLogger("JSONRPCClient(enclosure)").handlers == []
