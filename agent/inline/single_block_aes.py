"""AES-256 of single blocks, for pseudonyms and derived keys: a context a thread, made once.

Contexts may not be used by two threads at once, and making one costs twenty times what using it does.
"""

import threading
from collections.abc import Callable

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes


class BlockCipher:
    """AES-256 under one key, block by block. Safe from any thread."""

    __slots__ = ("_algorithm", "_contexts")

    def __init__(self, key: bytes) -> None:
        self._algorithm = algorithms.AES256(key)
        self._contexts = threading.local()

    def encrypt(self, blocks: bytes) -> bytes:
        """Each 16-byte block of `blocks`, encrypted by itself."""
        try:
            update: Callable[[bytes], bytes] = self._contexts.update
        except AttributeError:
            update = self._contexts.update = Cipher(self._algorithm, modes.ECB()).encryptor().update
        return update(blocks)

    def decrypt(self, blocks: bytes) -> bytes:
        """The opposite of `encrypt`. For rare uses: it makes a context each time."""
        return Cipher(self._algorithm, modes.ECB()).decryptor().update(blocks)
