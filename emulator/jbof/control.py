"""The control socket of an enclosure: faults are set and counters read while it runs.

A Unix socket of mode 0600, lines of JSON each way (`control_requests.py`). One thread per client, a few at
most, each client one request after the other. `apply` is what a request does, without the socket.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
from pathlib import Path
from typing import Any, Final

from emulator.jbof.client_server import ClientServer
from emulator.jbof.control_requests import (
    MAX_LINE_BYTES,
    AccessRequest,
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
    PortRequest,
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
from nvmeof.wire.ana import AnaState

log = logging.getLogger(__name__)

MAX_CLIENTS: Final = 16
CLIENT_IDLE_S: Final = 60.0


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
        case PortRequest(number=number, up=up):
            enclosure.set_port_up(number, up)
        case AccessRequest(number=number, state=state):
            enclosure.set_access(number, AnaState[state.upper().replace("-", "_")])
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


class ControlServer(ClientServer):
    """Listens at `path` from construction to `close`. EnclosureError if it cannot."""

    def __init__(self, enclosure: Enclosure, path: Path) -> None:
        self._enclosure = enclosure
        super().__init__("control", path, MAX_CLIENTS)

    def converse(self, client: socket.socket) -> None:
        client.settimeout(CLIENT_IDLE_S)
        with client.makefile("rb") as lines:
            while line := lines.readline(MAX_LINE_BYTES + 1):
                if len(line) > MAX_LINE_BYTES:
                    client.sendall(b'{"ok": false, "error": "the line is too long"}\n')
                    return
                reply, kill = answer(self._enclosure, line)
                client.sendall(json.dumps(reply).encode() + b"\n")
                if kill:
                    os.kill(os.getpid(), signal.SIGKILL)
