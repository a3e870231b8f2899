"""The control socket of an enclosure: faults are set and counters read while it serves.

A Unix socket of mode 0600, lines of JSON each way (`control_requests.py`). One thread per client, a few at
most, each client one request after the other.
"""

import json
import logging
import os
import signal
import socket
from pathlib import Path
from typing import Any, Final

from emulator.jbof.client_server import ClientServer
from emulator.jbof.control_requests import MAX_LINE_BYTES, KillRequest, decode_request_untrusted
from emulator.jbof.enclosure import Enclosure, EnclosureError

log = logging.getLogger(__name__)

MAX_CLIENTS: Final = 16
CLIENT_IDLE_S: Final = 60.0


def answer(enclosure: Enclosure, line: bytes) -> tuple[dict[str, Any], bool]:
    """The answer to one line, and whether to kill the process after it."""
    try:
        request = decode_request_untrusted(line)
        return {"ok": True, **(request.carry_out(enclosure) or {})}, isinstance(request, KillRequest)
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
