"""Whether a key file holds a secret, and keeps it, before anything is changed.

SPDK takes any file of mode 0600 into its keyring and looks into it at the first authentication: a file
without a secret would lock its hosts out. It looks at the file's mode alone, not at owner and folders.
The file lies on the enclosure's machine. Where that is not this one, or the file cannot be read here,
there is nothing to be judged.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import Final

from agent.errors import UserError
from nvmeof.authentication.private_files import SecretFileError, check_private
from nvmeof.authentication.secret import parse_secret

_BYTES_MAX: Final = 4096
"""Far above the longest secret, of 64 bytes in base64."""


def check_key_file(name: str, file: str) -> None:
    """UserError where `file` can be read and holds no DH-HMAC-CHAP secret. Quotes nothing of it."""
    try:
        # Not to wait for a FIFO's other end.
        descriptor = os.open(file, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except (OSError, ValueError):
        return
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("it is no ordinary file")
        text = os.read(descriptor, _BYTES_MAX).decode("ascii", "replace")
        if text[:1].isspace():
            raise ValueError("SPDK takes no blanks before the secret")
        parse_secret(text)
    except OSError:
        return
    except ValueError as error:
        raise UserError(
            f"key {name}: {file}: {error}; nothing was changed", "make one with `g35 key make-dhchap`"
        ) from None
    finally:
        os.close(descriptor)


def refuse_exposed(file: str) -> None:
    """UserError where `file` can be read here, and others can read it or put another in its place."""
    try:
        check_private(Path(file))
    except SecretFileError as refused:
        # A file that cannot be read here is the enclosure's to judge.
        if os.access(file, os.R_OK):
            raise UserError(refused.message, refused.advice) from None
