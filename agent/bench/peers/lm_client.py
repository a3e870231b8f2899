"""LMCache's lm:// server by LMCache's own connector: `python -m ... SERVER-PORT`; see lines.py.

Each thread has a connector and an event loop. `put` returns when the bytes are with the kernel; a question
whether the value exists, by the same connection, is answered when the server has it.
"""

import asyncio
import functools
import hashlib
import mmap
import socket
import sys
from typing import Any

from agent.bench.peers.lines import PeerFailed, talk

LOCAL_GIB = 0.5
TOKENS = 256
"""Of a block; the shape of a value is (2, 1, TOKENS, bytes / 2 / TOKENS) of one byte each."""


class LmStore:
    """LMCache's memory, out of which values are sent and into which they are received."""

    def __init__(self, port: int) -> None:
        import torch
        from lmcache.v1.config import LMCacheEngineConfig
        from lmcache.v1.memory_management import MemoryFormat
        from lmcache.v1.metadata import LMCacheMetadata
        from lmcache.v1.storage_backend.local_cpu_backend import LocalCPUBackend

        self.port = port
        self._dtype, self._format = torch.uint8, MemoryFormat.KV_2LTD
        self._shape = torch.Size
        config = LMCacheEngineConfig.from_defaults(
            local_cpu=True, max_local_cpu_size=LOCAL_GIB, lmcache_instance_id="g35-bench"
        )
        metadata = LMCacheMetadata("bench", 1, 1, 0, 0, self._dtype, (1, 2, TOKENS, 1, 128))
        self.memory = LocalCPUBackend(config, metadata)

    def new_buffer(self, size: int) -> memoryview:
        return memoryview(mmap.mmap(-1, size))

    def made_ready(self, value: memoryview) -> Any:
        shape = self._shape((2, 1, TOKENS, len(value) // (2 * TOKENS)))
        made = self.memory.allocate(shape, self._dtype, self._format)
        if made is None:
            raise PeerFailed("LMCache's memory is full")
        memoryview(made.byte_array).cast("B")[:] = value
        return made

    def done_with(self, ready: Any) -> None:
        ready.ref_count_down()

    def lane(self, value_bytes: int) -> "LmLane":
        return LmLane(self)

    def close(self) -> None:
        """Its connections end with the process, and its memory."""


class LmLane:
    def __init__(self, store: LmStore) -> None:
        from lmcache.v1.storage_backend.connector.lm_connector import LMCServerConnector

        self._loop = asyncio.new_event_loop()
        self._connector = LMCServerConnector("127.0.0.1", store.port, self._loop, store.memory)
        # The connector leaves Nagle's algorithm on: the question after a put would wait 40 ms for an
        # acknowledgement that the server delays, which is our doing, not LMCache's.
        self._connector.client_socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._last: Any = None

    def get(self, name: str) -> memoryview:
        if self._last is not None:
            self._last.ref_count_down()
        self._last = self._loop.run_until_complete(self._connector.get(_key(name)))
        if self._last is None:
            raise PeerFailed(f"the lm:// server does not have {name}")
        return memoryview(self._last.byte_array).cast("B")

    def put(self, name: str, value: Any) -> None:
        self._loop.run_until_complete(self._stored(_key(name), value))

    async def _stored(self, key: Any, value: Any) -> None:
        await self._connector.put(key, value)
        if not await self._connector.exists(key):
            raise PeerFailed("a value that was put into the lm:// server does not exist")

    def remove(self, name: str) -> None:
        """The protocol has no word for it; the next value of this name takes its place."""


@functools.cache
def _key(name: str) -> Any:
    """Cached, so that making it costs nothing in the time; there are a few hundred names."""
    import torch
    from lmcache.utils import CacheEngineKey

    digest = hashlib.blake2b(name.encode(), digest_size=7).digest()
    return CacheEngineKey("bench", 1, 0, int.from_bytes(digest, "big"), torch.uint8)


if __name__ == "__main__":
    talk(lambda: LmStore(int(sys.argv[1])))
