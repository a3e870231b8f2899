"""Keys: every block has one of 16 bytes, whatever an engine calls it.

An engine that hashes its token blocks already should hand over 128 bits of that hash. `key_of` is for
all others, and for names of `/kv/<volume>/<name>`: both ways to a value meet at the same key.
"""

from host_shim.control_wire import KEY_BYTES, key_of_name

key_of = key_of_name


def checked_key(key: bytes) -> bytes:
    """`key` if it is one. Raises TypeError or ValueError, with advice, if it is not."""
    if not isinstance(key, bytes):
        raise TypeError(f"a key is bytes, this is {type(key).__name__}; key_of(name) makes one of a name")
    if len(key) != KEY_BYTES:
        raise ValueError(f"a key has {KEY_BYTES} bytes, this one {len(key)}; key_of(name) makes one")
    return key
