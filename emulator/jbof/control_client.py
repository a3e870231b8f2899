"""The client of the control socket: one request, one answer."""

import json
import socket
from pathlib import Path
from typing import Any, Final

_MOST_ANSWER_BYTES: Final = 16 << 20


NO_ENCLOSURE: Final = "is an enclosure up, and is this the socket that its --control named?"
"""What to look at where nobody answers."""


class ControlError(Exception):
    """The enclosure refused the request (`was_answered`), or could not be reached."""

    def __init__(self, reason: str, *, was_answered: bool = False) -> None:
        super().__init__(reason)
        self.was_answered = was_answered


def ask(path: Path | str, verb: str, *, timeout_s: float = 10.0, **fields: Any) -> dict[str, Any]:
    """Send `{"verb": verb, **fields}` and return the answer, without `ok`. Fields that are None are left out.

    Raises ControlError.
    """
    request = {"verb": verb} | {key: value for key, value in fields.items() if value is not None}
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(timeout_s)
            client.connect(str(path))
            client.sendall(json.dumps(request).encode() + b"\n")
            with client.makefile("rb") as lines:
                line = lines.readline(_MOST_ANSWER_BYTES)
    except OSError as error:
        raise ControlError(f"no enclosure answers at {path}: {error.strerror or error}") from error
    try:
        reply = json.loads(line)
        good = reply.pop("ok")
    except (ValueError, KeyError, AttributeError, TypeError):
        raise ControlError(f"the enclosure at {path} gave no answer") from None
    if not good:
        raise ControlError(str(reply.get("error", "refused")), was_answered=True)
    return dict(reply)
