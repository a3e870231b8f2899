"""Calls to SPDK's JSON-RPC over its Unix socket, each with a deadline on the wall clock.

The client of the `spdk` package makes and sends the requests. This file adds:

* a deadline on the monotonic clock for the whole call; the package's time-out counts processor time;
* a bound on the answer, `ANSWER_BYTES_MAX`;
* the code of an error as a number (`RpcError.code`);
* pieces that end between characters: one that two pieces share hangs the package's client.

The seam is the client's `sock`: `_Wire` looks like a socket to it and keeps the deadline.
"""

import codecs
import json
import logging
import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from spdk.rpc.client import JSONRPCClient, JSONRPCException

from agent.enclosure_control.rpc_errors import RpcAnswerError, RpcError, RpcTimeout, RpcUnreachable

TIMEOUT_S: Final = 10.0
ANSWER_BYTES_MAX: Final = 16 << 20
"""Of one answer. A listing of 1,024 block devices is about 1 MiB."""

_PIECE_BYTES: Final = 256 << 10
_NEVER_S: Final = 1e9
_CHECKED: Final = 1 << 20
"""Up to here an answer is checked on arrival; a fault behind it shows at the deadline."""
_PEER: Final = struct.Struct("iII")
"""struct ucred: process, user, group (SO_PEERCRED, unix(7))."""


class _Wire:
    """A connected Unix socket, as far as the package's client uses one."""

    def __init__(self, path: Path, method: Callable[[], str], deadline: float) -> None:
        self._path = path
        self._method = method
        self.deadline = deadline
        self._text = codecs.getincrementaldecoder("utf-8")()
        self._received = 0
        self._said = ""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            self._socket.settimeout(self._left())
            self._socket.connect(str(path))
        except TimeoutError:
            self._socket.close()
            raise self._too_late() from None
        except OSError as error:
            self._socket.close()
            raise RpcUnreachable(
                f"no enclosure answers at {path}: {error.strerror or error}",
                "is it running, and is that its RPC socket?",
            ) from None

    def next_call(self, deadline: float) -> None:
        self.deadline = deadline
        self._received = 0
        self._said = ""

    def peer(self) -> int:
        """The process at the other end. Raises OSError."""
        credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
        process: int = _PEER.unpack(credentials)[0]
        return process

    def _left(self) -> float:
        left = self.deadline - time.monotonic()
        if left <= 0:
            raise self._too_late()
        return left

    def _too_late(self) -> RpcTimeout:
        return RpcTimeout(
            f"{self._method()}: no answer from {self._path} in time",
            "the enclosure hangs, or needs longer (--timeout); look with `g35 enclosure diff` what was done",
        )

    # The package's client calls the following. None may raise TimeoutError or ValueError: the client takes
    # these for its own time-out and for an incomplete answer.

    def settimeout(self, seconds: float) -> None:
        """The client's idea of the time that is left; the deadline decides instead."""

    def sendall(self, data: bytes) -> None:
        self._socket.settimeout(self._left())
        try:
            self._socket.sendall(data)
        except TimeoutError:
            raise self._too_late() from None
        except OSError as error:
            raise self._broken(error) from None

    def recv(self, _count: int) -> bytes:
        """Some of the answer, ending between characters, and where possible at the end of an object.

        The client tries to decode the whole after each piece, so a piece that ends within an object costs a
        pass over all of it.
        """
        whole = ""
        while not whole or whole[-1] not in "}]\n":
            self._socket.settimeout(self._left())
            try:
                piece = self._socket.recv(_PIECE_BYTES)
            except TimeoutError:
                raise self._too_late() from None
            except OSError as error:
                raise self._broken(error) from None
            if not piece:
                return whole.encode()
            self._received += len(piece)
            if self._received > ANSWER_BYTES_MAX:
                raise RpcAnswerError(f"{self._method()}: the answer is longer than {ANSWER_BYTES_MAX} bytes")
            try:
                whole += self._text.decode(piece)
            except UnicodeDecodeError:
                raise RpcAnswerError(f"{self._method()}: the answer is not UTF-8") from None
            if (self._said + whole[:_CHECKED]).lstrip()[:1] not in ("", "{", "["):
                raise self._no_json()
        if len(self._said) < _CHECKED:
            self._said += whole
            if _is_no_json(self._said.lstrip()):
                raise self._no_json()
        return whole.encode()

    def _no_json(self) -> RpcAnswerError:
        return RpcAnswerError(
            f"{self._method()}: the answer is no JSON", "is that the RPC socket of an SPDK target?"
        )

    def _broken(self, error: OSError) -> RpcUnreachable:
        return RpcUnreachable(
            f"{self._method()}: the connection to {self._path} broke: {error.strerror or error}",
            "the enclosure may have ended, or have more clients than it serves; "
            "look with `g35 enclosure diff` what was done",
        )

    def shutdown(self, _how: int) -> None:
        """`close` does it."""

    def close(self) -> None:
        self._socket.close()


def _is_no_json(text: str) -> bool:
    """Whether no continuation makes an answer of `text`. The client would wait for one until the deadline."""
    try:
        json.JSONDecoder().raw_decode(text)
    except json.JSONDecodeError as error:
        # Incomplete JSON is wrong at its end, or at the beginning of a string without an end.
        return error.pos < len(text.rstrip()) and not error.msg.startswith("Unterminated")
    except ValueError:
        return True  # An integer of more digits than Python reads.
    except RecursionError:
        return False  # The client says so itself.
    return False


class _Client(JSONRPCClient):  # type: ignore[misc]  # the package is not typed
    def __init__(self, wire: _Wire) -> None:
        self._given = wire
        super().__init__("enclosure", timeout=_NEVER_S)
        # The library prints by itself: every client adds one more handler to a logger.
        logger: logging.Logger = self.get_logger()
        for handler in list(logger.handlers):
            logger.removeHandler(handler)

    def _connect(self, addr: str, port: int | None) -> None:
        self.sock = self._given


class RpcClient:
    """One enclosure's RPC socket. Not for several threads at once.

    `call` connects on demand. After any failure the connection is closed, so that no call gets the late
    answer of another.
    """

    def __init__(self, path: Path, timeout_s: float = TIMEOUT_S) -> None:
        self.path = path
        self.timeout_s = timeout_s
        self._method = ""
        self._wire: _Wire | None = None
        self._client: _Client | None = None

    def call(self, method: str, params: dict[str, Any] | None = None) -> Any:
        """The result. Raises RpcError, RpcTimeout, RpcUnreachable or RpcAnswerError."""
        deadline = time.monotonic() + self.timeout_s
        self._method = method
        try:
            response = self._exchange(method, params, deadline)
        except BaseException:
            self.close()
            raise
        if "error" in response:
            error = response["error"]
            if not isinstance(error, dict) or type(error.get("code")) is not int:
                raise RpcAnswerError(f"{method}: an error without a code")
            raise RpcError(method, error["code"], str(error.get("message", ""))[:1000])
        if "result" not in response:
            raise RpcAnswerError(f"{method}: an answer with neither result nor error")
        return response["result"]

    def is_local(self) -> bool:
        """Whether the process at the socket is known to be an enclosure on this machine.

        False where that cannot be told: a process such as ssh may forward the socket of another machine.
        """
        if self._wire is None:
            return False
        try:
            folder = Path("/proc", str(self._wire.peer()))
            words = (folder / "cmdline").read_bytes().split(b"\0")
            name = (folder / "comm").read_text()
        except OSError:
            return False
        # SPDK's threads are called reactor_N, the first one included.
        known = name.startswith("reactor_") or os.path.basename(words[0]) in (b"nvmf_tgt", b"spdk_tgt")
        return known or b"emulator.jbof" in words

    def _exchange(self, method: str, params: dict[str, Any] | None, deadline: float) -> dict[str, Any]:
        if self._wire is None or self._client is None:
            self._wire = _Wire(self.path, lambda: self._method, deadline)
            self._client = _Client(self._wire)
        self._wire.next_call(deadline)
        try:
            number = self._client.send(method, params)
            response = self._client.recv()
        except JSONRPCException:
            raise RpcUnreachable(
                f"{method}: the enclosure at {self.path} closed the connection without an answer",
                "it may have ended, or have more clients than it serves; its log says more",
            ) from None
        except RecursionError:
            raise RpcAnswerError(f"{method}: the answer is nested too deeply") from None
        if not isinstance(response, dict) or response.get("id") != number:
            raise RpcAnswerError(f"{method}: an answer to something that was not asked")
        return response

    def close(self) -> None:
        """Close the connection; the next call makes another."""
        wire, self._wire, self._client = self._wire, None, None
        if wire is not None:
            wire.close()
