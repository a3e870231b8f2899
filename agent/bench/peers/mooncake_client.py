"""Mooncake Store by its own Python client, over TCP: `python -m ... MASTER-PORT`; see lines.py.

As an engine's connector uses it: values are got into and put from memory that is registered with the
client, without a copy in Python. One client serves all threads, as in an engine.
"""

import ctypes
import mmap
import sys

from agent.bench.peers.lines import PeerFailed, talk

LOCAL_BUFFER_BYTES = 64 << 20


class MooncakeStore:
    """A client without memory of its own in the pool: all values lie with the provider."""

    def __init__(self, master: str) -> None:
        from mooncake.store import MooncakeDistributedStore

        self.client = MooncakeDistributedStore()
        failed = self.client.setup("127.0.0.1", "P2PHANDSHAKE", 0, LOCAL_BUFFER_BYTES, "tcp", "", master)
        if failed:
            raise PeerFailed(f"Mooncake's client does not start: {failed}")

    def new_buffer(self, size: int) -> memoryview:
        room = memoryview(mmap.mmap(-1, size))
        for at in range(0, size, mmap.PAGESIZE):
            room[at] = 0
        if self.client.register_buffer(address(room), size):
            raise PeerFailed("Mooncake does not register a buffer")
        return room

    def made_ready(self, value: memoryview) -> tuple[int, int]:
        return address(value), len(value)

    def done_with(self, ready: tuple[int, int]) -> None:
        """It is an address in memory that stays registered."""

    def lane(self, value_bytes: int) -> "MooncakeLane":
        return MooncakeLane(self, value_bytes)

    def close(self) -> None:
        self.client.close()


class MooncakeLane:
    """A thread's buffer."""

    def __init__(self, store: MooncakeStore, value_bytes: int) -> None:
        self._client = store.client
        self._buffer = store.new_buffer(value_bytes)
        self._address = address(self._buffer)

    def get(self, name: str) -> memoryview:
        length = self._client.get_into(name, self._address, len(self._buffer))
        if length < 0:
            raise PeerFailed(f"a get of Mooncake failed: {length}")
        return self._buffer[:length]

    def put(self, name: str, value: tuple[int, int]) -> None:
        failed = self._client.put_from(name, *value)
        if failed:
            raise PeerFailed(f"a put of Mooncake failed: {failed}")

    def remove(self, name: str) -> None:
        # Forced: who has just read a value holds a lease on it.
        failed = self._client.remove(name, True)
        if failed:
            raise PeerFailed(f"a value that was put into Mooncake was not there to be removed: {failed}")


def address(view: memoryview) -> int:
    """Where a writable buffer lies."""
    return ctypes.addressof(ctypes.c_char.from_buffer(view))


if __name__ == "__main__":
    talk(lambda: MooncakeStore(f"127.0.0.1:{sys.argv[1]}"))
