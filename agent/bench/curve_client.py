"""A client of the curve over processes (process_curve.py): threads that get or put values, batch by batch.

    python -m agent.bench.curve_client MOUNT NUMBER THREADS

Each line on its standard input asks for one thing in JSON, each line on its standard output is the answer:

    {"do": "fill", "size": 65536, "batch": 32, "turns": 2}       put what is to be got; {"values": 128}
    {"do": "get", "seconds": 2.0, "size": 65536, "batch": 32}    {"operations", "bytes", "seconds", "misses"}
    {"do": "put", "seconds": 2.0, "size": 65536, "batch": 32}    the same; values with new keys
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any, Final

from host_shim.block_key import key_of
from host_shim.pool import Pool, Volume

FILLED_BYTES: Final = 64 << 20
"""Of the values that one client puts to get them, at the most."""
FILLED_VALUES: Final = 128
THERE_SECONDS: Final = 10.0
"""For values that were just stored to be got from every process."""


class Client:
    """`number` tells its keys from those of others."""

    def __init__(self, pool: Pool, number: int, threads: int) -> None:
        self._pool, self._number, self._threads = pool, number, threads
        self._volume: Volume = pool.volume("kv")
        self._put = 0
        self._contents = os.urandom(1 << 20)

    def fill(self, size: int, batch: int, turns: int) -> int:
        """Put the values, and get them some times: each process that serves them remembers them then."""
        count = max(batch, min(FILLED_VALUES, FILLED_BYTES // size))
        memory = self._pool.memory(size * batch)
        pieces = [memory[at * size : (at + 1) * size] for at in range(batch)]
        for start in range(0, count, batch):
            keys = self._keys("filled", size, start, batch)
            for piece, key in zip(pieces, keys, strict=True):
                piece[:] = self._value(key, size)
            if not all(self._volume.put_many(keys, pieces)):
                raise SystemExit("a value was not stored")
        for start in range(0, count, batch):
            keys = self._keys("filled", size, start, batch)
            until = time.monotonic() + THERE_SECONDS
            for _ in range(turns):
                # Processes that read their first directories may be late: a miss, and no loss.
                while self._volume.get_many(keys, pieces) != [size] * batch:
                    if time.monotonic() > until:
                        raise SystemExit("a value is not there")
            if any(piece != self._value(key, size) for piece, key in zip(pieces, keys, strict=True)):
                raise SystemExit("a value has wrong bytes")
        return count

    def get(self, size: int, batch: int, seconds: float) -> dict[str, Any]:
        count = max(batch, min(FILLED_VALUES, FILLED_BYTES // size))
        rows = [self._keys("filled", size, start, batch) for start in range(0, count, batch)]

        def work(turn: int, pieces: list[memoryview]) -> int:
            keys = rows[turn % len(rows)]
            if batch == 1:
                return int(self._volume.get_into(keys[0], pieces[0]) == size)
            return sum(length == size for length in self._volume.get_many(keys, pieces))

        return self._timed(work, size, batch, seconds)

    def put(self, size: int, batch: int, seconds: float) -> dict[str, Any]:
        self._put += 1
        name = f"put {self._put}"

        def work(turn: int, pieces: list[memoryview]) -> int:
            return sum(self._volume.put_many(self._keys(name, size, turn * batch, batch), pieces))

        return self._timed(work, size, batch, seconds)

    def _keys(self, name: str, size: int, start: int, count: int) -> list[bytes]:
        return [key_of(f"{name} {self._number} {size} {at}") for at in range(start, start + count)]

    def _value(self, key: bytes, size: int) -> bytes:
        return (key + self._contents)[:size].ljust(size, b"\0")

    def _timed(
        self, work: Callable[[int, list[memoryview]], int], size: int, batch: int, seconds: float
    ) -> dict[str, Any]:
        """`work` by all threads until the time is over; each turn has a number that no other has."""
        done, asked = [0] * self._threads, [0] * self._threads
        memory = [self._pool.memory(size * batch) for _ in range(self._threads)]
        began = time.monotonic()

        def loop(thread: int) -> None:
            pieces = [memory[thread][at * size : (at + 1) * size] for at in range(batch)]
            turn = thread
            # Once at the least: a thread may begin late on a machine that does something else.
            while not asked[thread] or time.monotonic() - began < seconds:
                done[thread] += work(turn, pieces)
                asked[thread] += batch
                turn += self._threads

        threads = [threading.Thread(target=loop, args=(number,)) for number in range(self._threads)]
        for each in threads:
            each.start()
        for each in threads:
            each.join()
        lasted, moved = time.monotonic() - began, sum(done)
        return {"operations": moved, "bytes": moved * size, "seconds": lasted, "misses": sum(asked) - moved}


def main() -> None:
    mount, number, threads = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    with Pool(mount, sessions=threads + 1, parallel=1) as pool:
        client = Client(pool, number, threads)
        print(json.dumps({"ready": True}), flush=True)
        for line in sys.stdin:
            asked = json.loads(line)
            size, batch = asked["size"], asked["batch"]
            if asked["do"] == "fill":
                answer: dict[str, Any] = {"values": client.fill(size, batch, asked["turns"])}
            else:
                answer = {"get": client.get, "put": client.put}[asked["do"]](size, batch, asked["seconds"])
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
