"""The control socket of an enclosure: faults are set and counters read while it runs.

A Unix socket of mode 0600, lines of JSON each way (`control_requests.py`). One thread per client, a few at
most, each client one request after the other. `apply` is what a request does, without the socket.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import signal
import socket
import stat
import threading
import time
from pathlib import Path
from typing import Any, Final

from emulator.jbof.control_requests import (
    MAX_LINE_BYTES,
    AddRequest,
    CopyRequest,
    ErrorRequest,
    FlipRequest,
    FullRequest,
    HangRequest,
    HealRequest,
    KillRequest,
    LoseWritesRequest,
    ModelRequest,
    RemoveRequest,
    RequestError,
    SlowRequest,
    StatsRequest,
    ZeroRequest,
    decode_request_untrusted,
    parse_status,
)
from emulator.jbof.drive_model import DriveModelSettings
from emulator.jbof.enclosure import AnyDrive, Enclosure, EnclosureError
from emulator.jbof.faults import ErrorFault, FlipFault

log = logging.getLogger(__name__)

MAX_CLIENTS: Final = 16
CLIENT_IDLE_S: Final = 60.0

ACCEPT_AGAIN_S: Final = 0.05
"""How soon after a client could not be taken the next is tried."""


def apply(enclosure: Enclosure, request: Any) -> dict[str, Any]:
    """Carry a checked request out; what to add to `{"ok": true}`.

    Raises RequestError, ValueError, KeyError (no such drive), EnclosureError and OSError, all of which the
    caller is told. `kill` is not in here: the answer has to be sent first.
    """
    match request:
        case StatsRequest():
            return enclosure.stats()
        case RemoveRequest(drive=number):
            enclosure.remove_drive(number)
        case AddRequest(drive=number, size=size):
            drive = enclosure.add_drive(number, size)
            return enclosure.identity(drive.number)
        case FlipRequest(on_read=False):
            drive = enclosure.drive(request.drive)
            length = request.length or drive.reach - request.offset
            return {"bytes_changed": drive.flip_at_rest(request.offset, length, request.bits)[:1024]}
        case ZeroRequest():
            enclosure.drive(request.drive).zero_at_rest(request.offset, request.length)
        case CopyRequest():
            enclosure.drive(request.drive).copy_at_rest(request.source, request.offset, request.length)
        case _:
            chosen = enclosure.drives if request.drive is None else [enclosure.drive(request.drive)]
            for drive in chosen:
                _set(drive, request)
            # Commands that wait on a drive ask it again: it may have been healed.
            enclosure.target.poke()
            return {"drives": [drive.number for drive in chosen]}
    return {}


def _set(drive: AnyDrive, request: Any) -> None:
    match request:
        case SlowRequest():
            drive.set_slow(request.latency_ms / 1000)
        case HangRequest():
            drive.set_hung(True)
        case FullRequest():
            drive.set_full(True)
        case LoseWritesRequest():
            drive.set_lose_writes(request.probability)
        case HealRequest():
            drive.heal()
        case ErrorRequest():
            drive.set_error(
                ErrorFault(
                    parse_status(request.status),
                    request.probability,
                    frozenset(request.operations),
                    request.do_not_retry,
                )
            )
        case FlipRequest():
            length = request.length or drive.reach - request.offset
            drive.set_flip_on_read(FlipFault(request.offset, length, request.probability, request.bits))
        case ModelRequest():
            drive.set_model(
                DriveModelSettings(
                    read_latency_s=request.read_latency_ms / 1000,
                    write_latency_s=request.write_latency_ms / 1000,
                    bandwidth_bytes_per_s=request.bandwidth_mib_s * (1 << 20),
                    commands_per_s=request.iops,
                    jitter=request.jitter,
                    seed=request.seed + drive.number,
                )
            )
        case _:
            raise RequestError(f"nothing carries out {type(request).__name__}")


def answer(enclosure: Enclosure, line: bytes) -> tuple[dict[str, Any], bool]:
    """(the answer to one line, whether the process is to be killed after it)."""
    try:
        request = decode_request_untrusted(line)
        if isinstance(request, KillRequest):
            return {"ok": True}, True
        return {"ok": True, **apply(enclosure, request)}, False
    except KeyError as error:
        return {"ok": False, "error": f"there is no drive {error}"}, False
    except (ValueError, EnclosureError, OSError) as error:
        return {"ok": False, "error": str(error)}, False
    except Exception as error:
        log.exception("control request")
        return {"ok": False, "error": f"a bug: {error!r}"}, False


class ControlServer:
    """Listens at `path` from construction to `close`. EnclosureError if it cannot."""

    def __init__(self, enclosure: Enclosure, path: Path) -> None:
        self.path = path
        self._enclosure = enclosure
        self._slots = threading.BoundedSemaphore(MAX_CLIENTS)
        self._clients: set[socket.socket] = set()
        self._lock = threading.Lock()
        self._closed = False
        self._listener = listen_at(path, MAX_CLIENTS)
        self._thread = threading.Thread(target=self._accept, name="control", daemon=True)
        self._thread.start()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError as error:
                if self._closed:
                    return
                # Out of descriptors, or a client that was gone before we took it: go on, but not hot.
                log.warning("control: accept: %s", error)
                time.sleep(ACCEPT_AGAIN_S)
                continue
            if not self._slots.acquire(blocking=False):
                client.close()
                continue
            with self._lock:
                self._clients.add(client)
            threading.Thread(target=self._serve, args=(client,), name="control-client", daemon=True).start()

    def _serve(self, client: socket.socket) -> None:
        try:
            client.settimeout(CLIENT_IDLE_S)
            with client, client.makefile("rb") as lines:
                while line := lines.readline(MAX_LINE_BYTES + 1):
                    if len(line) > MAX_LINE_BYTES:
                        client.sendall(b'{"ok": false, "error": "the line is too long"}\n')
                        return
                    reply, kill = answer(self._enclosure, line)
                    client.sendall(json.dumps(reply).encode() + b"\n")
                    if kill:
                        os.kill(os.getpid(), signal.SIGKILL)
        except OSError as error:
            log.debug("control client: %s", error)
        finally:
            with self._lock:
                self._clients.discard(client)
            self._slots.release()

    def close(self) -> None:
        """Stop listening and remove the socket. Idempotent."""
        if self._closed:
            return
        self._closed = True
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        with self._lock:
            clients = list(self._clients)
        for client in clients:
            with contextlib.suppress(OSError):
                client.shutdown(socket.SHUT_RDWR)
        self._thread.join(5)
        self.path.unlink(missing_ok=True)


def listen_at(path: Path, backlog: int) -> socket.socket:
    """A socket that only its owner may use. One left behind by a killed enclosure is replaced."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode):
            if _answers(path):
                raise EnclosureError(f"another enclosure listens at {path}")
            path.unlink()
        listener.bind(str(path))
        os.chmod(path, 0o600)  # Nobody can connect before listen, so there is no gap.
        listener.listen(backlog)
    except OSError as error:
        listener.close()
        raise EnclosureError(f"cannot listen at {path}: {error}") from error
    except BaseException:
        listener.close()
        raise
    return listener


def _answers(path: Path) -> bool:
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            return False
        return True
