"""The keyring: DH-HMAC-CHAP secrets by name, each in a file that nobody else may read."""

from __future__ import annotations

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
    """Names and paths. A file is read when a host is given its key: one that was removed stays in use."""

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
        except OSError as error:
            raise of_errno(error.errno or errno.EINVAL) from None
        except ValueError:
            raise of_errno(errno.EINVAL) from None
        except SecretFileError:
            raise of_errno(errno.EPERM) from None
        self._paths[asked.name] = asked.path
        return True

    def remove(self, asked: parameters.Named) -> bool:
        """keyring_file_remove_key."""
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

        A file without a secret is taken as SPDK does, which looks into it at an authentication: nobody proves
        to have its secret, so the host is locked out.
        """
        if name is None:
            return None
        if name not in self._paths:
            raise invalid_parameters()
        try:
            return read_secret_file(Path(self._paths[name]))
        except SecretFileError:
            return DhchapSecret(os.urandom(32), None)
