"""The keyring: DH-HMAC-CHAP secrets by name, each in a private file."""

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from emulator.jbof.rpc import parameters
from emulator.jbof.rpc.faults import invalid_parameters, of_errno
from nvmeof.authentication.private_files import check_private
from nvmeof.authentication.secret import DhchapSecret
from nvmeof.authentication.secret_files import SecretFileError, read_secret_file

KEYS_MAX: Final = 1024


class Keyring:
    """Names and paths. A file is read when a host gets its key: a removed key stays in use."""

    def __init__(self) -> None:
        self._paths: dict[str, str] = {}

    def add(self, asked: parameters.AddKey) -> bool:
        """keyring_file_add_key. -1 for a path that is relative or a file that others may read."""
        if asked.name in self._paths:
            raise of_errno(errno.EEXIST)
        if len(self._paths) >= KEYS_MAX:
            raise of_errno(errno.ENOMEM)
        if not asked.path.startswith("/"):
            raise of_errno(errno.EPERM)
        try:
            os.stat(asked.path)
            check_private(Path(asked.path))
        except (OSError, ValueError) as error:
            raise of_errno(getattr(error, "errno", 0) or errno.EINVAL) from None
        except SecretFileError:
            raise of_errno(errno.EPERM) from None
        self._paths[asked.name] = asked.path
        return True

    def remove(self, asked: parameters.Named) -> bool:
        if self._paths.pop(asked.name, None) is None:
            raise of_errno(errno.ENOKEY)
        return True

    def get(self, users: Callable[[str], int]) -> list[dict[str, Any]]:
        """keyring_get_keys. `users` says how many hosts have a key; the keyring itself is one more."""
        return [
            {
                "name": name, "module": "keyring_file", "removed": False, "probed": False,
                "refcnt": 1 + users(name), "path": path,
            }
            for name, path in self._paths.items()
        ]  # fmt: skip

    def secret(self, name: str | None) -> DhchapSecret | None:
        """The secret of a key; None for no name. RpcFault if there is no such key.

        As with SPDK, which reads the file at an authentication, a file without a secret locks the host out.
        """
        if name is None:
            return None
        if name not in self._paths:
            raise invalid_parameters()
        try:
            return read_secret_file(Path(self._paths[name]))
        except SecretFileError:
            return DhchapSecret(os.urandom(32), None)
