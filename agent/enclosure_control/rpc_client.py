"""Calls to SPDK's JSON-RPC over its Unix socket: a deadline on the wall clock, and a bound on the answer.

Nothing says how long an answer is: it ends where its JSON does. So it is decoded whenever it may be whole.
"""

from __future__ import annotations

import codecs
import itertools
import json
import os
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, TypeVar

from agent.enclosure_control.rpc_errors import RpcAnswerError, RpcError, RpcTimeout, RpcUnreachable

T = TypeVar("T")

TIMEOUT_S: Final = 10.0
ANSWER_BYTES_MAX: Final = 16 << 20
"""Of one answer. A listing of 1,024 block devices is about 1 MiB."""

_PIECE_BYTES: Final = 256 << 10
_PEER: Final = struct.Struct("iII")
"""struct ucred: process, user, group (SO_PEERCRED, unix(7))."""


class RpcClient:
    """One enclosure's RPC socket. Not for several threads at once.

    `call` connects on demand. After any failure the connection is closed, so that no call gets the late
    answer of another.
    """

    def __init__(self, path: Path, timeout_s: float = TIMEOUT_S) -> None:
        self.path = path
        self.timeout_s = timeout_s
        self._method = ""
        self._deadline = 0.0
        self._numbers = itertools.count(1)
        self._socket: socket.socket | None = None

    def call(self, method: str, params: dict[str, Any] | None = None) -> Any:
        """The result. Raises RpcError, RpcTimeout, RpcUnreachable or RpcAnswerError."""
        self._method, self._deadline = method, time.monotonic() + self.timeout_s
        request = {"jsonrpc": "2.0", "method": method, "id": next(self._numbers)}
        try:
            self._connect()
            said = json.dumps(request | ({"params": params} if params else {})).encode()
            self._moved(lambda connection: connection.sendall(said))
            response = self._answer()
            if not isinstance(response, dict) or response.get("id") != request["id"]:
                raise RpcAnswerError(f"{method}: an answer to something that was not asked")
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
        if self._socket is None:
            return False
        try:
            credentials = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size)
            folder = Path("/proc", str(_PEER.unpack(credentials)[0]))
            words = (folder / "cmdline").read_bytes().split(b"\0")
            name = (folder / "comm").read_text()
        except OSError:
            return False
        # SPDK's threads are called reactor_N, the first one included.
        known = name.startswith("reactor_") or os.path.basename(words[0]) in (b"nvmf_tgt", b"spdk_tgt")
        return known or b"emulator.jbof" in words

    def _connect(self) -> None:
        if self._socket is not None:
            return
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.settimeout(self.timeout_s)
        try:
            self._socket.connect(str(self.path))
        except TimeoutError:
            raise self._too_late() from None
        except OSError as error:
            raise RpcUnreachable(
                f"no enclosure answers at {self.path}: {error.strerror or error}",
                "is it running, and is that its RPC socket?",
            ) from None

    def _moved(self, move: Callable[[socket.socket], T]) -> T:
        """What sending or receiving came to, by the deadline."""
        left = self._deadline - time.monotonic()
        if left <= 0 or self._socket is None:
            raise self._too_late()
        self._socket.settimeout(left)
        try:
            return move(self._socket)
        except TimeoutError:
            raise self._too_late() from None
        except OSError as error:
            raise RpcUnreachable(
                f"{self._method}: the connection to {self.path} broke: {error.strerror or error}",
                "the enclosure may have ended, or have more clients than it serves; "
                "look with `g35 enclosure diff` what was done",
            ) from None

    def _answer(self) -> Any:
        text, decoder, received = "", codecs.getincrementaldecoder("utf-8")(), 0
        while True:
            piece = self._moved(lambda connection: connection.recv(_PIECE_BYTES))
            if not piece:
                raise RpcUnreachable(
                    f"{self._method}: the enclosure at {self.path} closed the connection without an answer",
                    "it may have ended, or have more clients than it serves; its log says more",
                )
            received += len(piece)
            if received > ANSWER_BYTES_MAX:
                raise RpcAnswerError(f"{self._method}: the answer is longer than {ANSWER_BYTES_MAX} bytes")
            try:
                text = (text + decoder.decode(piece)).lstrip()
                if (answer := _decoded(text)) is not None:
                    return answer
            except UnicodeDecodeError:
                raise RpcAnswerError(f"{self._method}: the answer is not UTF-8") from None
            except RecursionError:
                raise RpcAnswerError(f"{self._method}: the answer is nested too deeply") from None
            except ValueError:
                raise RpcAnswerError(
                    f"{self._method}: the answer is no JSON", "is that the RPC socket of an SPDK target?"
                ) from None

    def _too_late(self) -> RpcTimeout:
        return RpcTimeout(
            f"{self._method}: no answer from {self.path} in time",
            "the enclosure hangs, or needs longer (--timeout); look with `g35 enclosure diff` what was done",
        )

    def close(self) -> None:
        """Close the connection; the next call makes another."""
        connection, self._socket = self._socket, None
        if connection is not None:
            connection.close()


def _decoded(text: str) -> Any:
    """The object or list that `text` begins with; None where more is to come. Raises ValueError for no JSON.

    A text that does not end as an object may is not tried: each try is a pass over all of it.
    """
    if text[:1] not in ("", "{", "["):
        raise ValueError("neither an object nor a list")
    if text[-1:] not in ("}", "]", "\n"):
        return None
    try:
        return json.JSONDecoder().raw_decode(text)[0]
    except json.JSONDecodeError as error:
        # Incomplete JSON is wrong at its end, or at the beginning of a string without an end.
        if error.pos < len(text.rstrip()) and not error.msg.startswith("Unterminated"):
            raise
        return None
