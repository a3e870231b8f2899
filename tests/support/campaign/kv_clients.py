"""Clients of key-value volumes: by path, by sessions, with registered memory, through the virtio-fs device.

A key is stored once, and again in the next version after it was deleted. Promised is what the design says of
/kv: a miss is normal, and bytes that are served are a whole value that was put under this key.
"""

from __future__ import annotations

import errno
import os
import threading
import time
from collections import deque
from contextlib import suppress
from pathlib import Path

from agent.bench.virtio_driver.connection import BackEndFault, BackEndGone
from agent.bench.virtio_driver.machine import Machine
from agent.bench.virtiofs_files import VirtiofsFiles
from host_shim.pool import Pool, Volume
from tests.support.campaign.client import Away, Client
from tests.support.campaign.findings import WRONG, Findings
from tests.support.campaign.pod import (
    AGENTS,
    READ_DEADLINE_MS,
    TTL_SECONDS,
    VALUE_BYTES_MAX,
    WRITE_DEADLINE_MS,
    Pod,
)
from tests.support.campaign.values import HEAD_BYTES, content, judged, name_of

KNOWN_MAX = 300
BATCH = 8
WORKERS_HELD_SECONDS = 2 * WRITE_DEADLINE_MS / 1e3
"""A get may wait in the kernel behind two puts that wait for a drive (docs/limits.md)."""
GET_SECONDS = READ_DEADLINE_MS / 1e3 + WORKERS_HELD_SECONDS
PUT_SECONDS = WRITE_DEADLINE_MS / 1e3 + WORKERS_HELD_SECONDS
AWAY_LOOK_SECONDS = 0.05
TTL_SLACK_SECONDS = 2.0
"""Times to live are whole seconds, and two clocks are read one after the other."""
AGENT_AWAY = frozenset({errno.ENOTCONN, errno.ECONNABORTED, errno.ENODEV, errno.ESTALE, errno.EHOSTDOWN})
PUT_REFUSED = frozenset(
    {
        errno.ENOSPC,
        errno.EDQUOT,
        errno.EAGAIN,
        errno.EBUSY,
        errno.EINTR,
        errno.ENOMEM,
        errno.EIO,
        errno.EEXIST,
    }
)


class Keys:
    """The keys that were put lately into one volume, of all clients."""

    def __init__(self, volume: str) -> None:
        self.volume = volume
        self._known: deque[bytes] = deque(maxlen=KNOWN_MAX)
        self._versions: dict[bytes, int] = {}
        self._lock = threading.Lock()

    def begin(self, key: bytes) -> int:
        """A put of a key begins; its version."""
        with self._lock:
            if key not in self._versions:
                if len(self._known) == KNOWN_MAX:
                    self._versions.pop(self._known[0], None)
                self._known.append(key)
            version = self._versions[key] = self._versions.get(key, 0) + 1
            return version

    def some(self, dice_index: int) -> bytes | None:
        """One of them."""
        with self._lock:
            return self._known[dice_index % len(self._known)] if self._known else None


class KvClient(Client):
    """Gets, puts, batches, deletes and prestages through one agent."""

    def __init__(
        self,
        name: str,
        pod: Pod,
        agent: str,
        keys: Keys,
        seed: int,
        findings: Findings,
        stop: threading.Event,
    ) -> None:
        super().__init__(name, seed, findings, stop)
        self.pod, self.agent, self.keys = pod, agent, keys
        self._seed = seed
        self._number = 0
        self._pool: Pool | None = None

    def turn(self) -> None:
        kind = self.dice.random()
        key = self.keys.some(self.dice.randrange(1 << 30))
        if key is None or kind < 0.3:
            self._number += 1
            self.store(name_of(self._seed, self.name, self._number))
        elif kind < 0.8:
            self.load(key)
        elif kind < 0.88:
            self.load_many(
                [found for _ in range(BATCH) if (found := self.keys.some(self.dice.randrange(1 << 30)))]
            )
        elif kind < 0.93:
            with self.timed("deletes", PUT_SECONDS):
                self.volume.delete([key])
        elif kind < 0.96:
            with self.timed("prestages", GET_SECONDS):
                self.volume.prestage([key])
        else:
            self.store(key)

    @property
    def volume(self) -> Volume:
        if self._pool is None:
            self._pool = self.open_pool()
        return self._pool.volume(self.keys.volume)

    def open_pool(self) -> Pool:
        return self.pod.pool(self.agent, sessions=2, parallel=2)

    def finish(self) -> None:
        if self._pool is not None:
            self._pool.close(1.0)

    def store(self, key: bytes) -> None:
        size = self.dice.choice((HEAD_BYTES, 3000, 50_000, 65_000, self.most))
        value = content(key, self.keys.begin(key), size)
        with self.timed("puts", PUT_SECONDS):
            stored = self.put(key, value)
        self.findings.note("puts acknowledged" if stored else "puts refused")

    @property
    def most(self) -> int:
        return (
            60_000
            if self.keys.volume in ("second", "short")
            else VALUE_BYTES_MAX - (self.dice.randrange(2) << 12)
        )

    def load(self, key: bytes) -> None:
        with self.timed("gets", GET_SECONDS):
            value = self.get(key)
        self.judge(key, value)

    def judge(self, key: bytes, value: bytes | memoryview | None) -> None:
        if value is None:
            self.findings.note("misses")
            return
        read = judged(key, value)
        if read.wrong:
            self.findings.found(WRONG, f"{self.keys.volume}/{key.hex()} by {self.name}: {read.wrong}")
        self.findings.note("hits")

    def put(self, key: bytes, value: bytes) -> bool:
        return self.volume.put(key, value)

    def get(self, key: bytes) -> bytes | memoryview | None:
        return self.volume.get(key)

    def load_many(self, keys: list[bytes]) -> None:
        buffers = [bytearray(VALUE_BYTES_MAX) for _ in keys]
        with self.timed("batches", GET_SECONDS * BATCH):
            found = self.volume.fetch(keys, buffers)
        for key, buffer, each in zip(keys, buffers, found, strict=True):
            self.judge(key, None if each.length is None else memoryview(buffer)[: each.length])
            if each.length is None:
                cause = "no agent" if each.outcome is None else each.outcome.name.lower()
                self.findings.note(f"misses of batches: {cause}")


class RegisteredClient(KvClient):
    """One whose buffers the agent has mapped."""

    _memory: memoryview | None = None

    def _buffer(self) -> memoryview:
        if self._memory is None:
            assert self.volume is not None
            assert self._pool is not None
            self._memory = self._pool.memory(VALUE_BYTES_MAX)
        return self._memory

    def put(self, key: bytes, value: bytes) -> bool:
        buffer = self._buffer()
        buffer[: len(value)] = value
        return self.volume.put(key, buffer[: len(value)])

    def get(self, key: bytes) -> bytes | memoryview | None:
        buffer = self._buffer()
        length = self.volume.get_into(key, buffer)
        return None if length is None else bytes(buffer[:length])

    def finish(self) -> None:
        self._memory = None
        super().finish()


class PathClient(KvClient):
    """One that opens files of the mount."""

    def _path(self, key: bytes) -> Path:
        return self.pod.mount(self.agent) / "kv" / self.keys.volume / key.hex()

    def put(self, key: bytes, value: bytes) -> bool:
        try:
            descriptor = os.open(self._path(key), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
            try:
                middle = self.dice.choice((0, len(value) // 2, 4096))
                for part in (value[:middle], value[middle:]):
                    written = 0
                    while written < len(part):
                        written += os.write(descriptor, part[written:])
            finally:
                os.close(descriptor)
        except OSError as error:
            return self._failed(error, PUT_REFUSED)
        return True

    def get(self, key: bytes) -> bytes | memoryview | None:
        try:
            return self._path(key).read_bytes() or None
        except OSError as error:
            self._failed(error, frozenset({errno.ENOENT, errno.EIO}))
            return None

    def _failed(self, error: OSError, normal: frozenset[int]) -> bool:
        if error.errno in AGENT_AWAY or (
            error.errno == errno.ENOENT and not os.path.exists(self._path(b"").parent)
        ):
            raise Away
        if error.errno not in normal:
            raise error
        return False

    def load_many(self, keys: list[bytes]) -> None:
        for key in keys:
            self.load(key)


class ShortLivedClient(KvClient):
    """One of a volume whose values expire: none is served when its time is over."""

    def __init__(self, *arguments: object, **named: object) -> None:
        super().__init__(*arguments, **named)  # type: ignore[arg-type]
        self._stored: dict[bytes, float] = {}

    def turn(self) -> None:
        now = time.time()
        if self._stored and self.dice.random() < 0.6:
            key = self.dice.choice(list(self._stored))
            asked = time.time()
            with self.timed("gets", GET_SECONDS):
                value = self.get(key)
            self.judge(key, value)
            over = self._stored[key] + TTL_SECONDS + TTL_SLACK_SECONDS
            if value is not None and asked > over:
                self.findings.found(WRONG, f"{key.hex()} was served {asked - over:.1f} s after its time")
            if asked > over + TTL_SECONDS:
                del self._stored[key]
            return
        self._number += 1
        key = name_of(self._seed, self.name, self._number)
        self.store(key)
        self._stored[key] = max(now, time.time())


class DeviceClient(KvClient):
    """One behind the virtio-fs device, as a guest is. It outlives its agent: what was asked of one that died
    is answered by the next."""

    _machine: Machine | None = None
    away_seconds = 20.0
    """While an agent is killed and started again."""

    def open_pool(self) -> Pool:
        machine = Machine(self.pod.virtiofs_socket, request_queues=1, memory_bytes=16 << 20)
        try:
            machine.start(patience=0.5)
            machine.client.init()
        except (BackEndGone, BackEndFault, OSError) as error:
            machine.close()
            raise Away from error
        self._machine = machine
        threading.Thread(target=self._connect_again, args=(machine,), name="guest", daemon=True).start()
        return Pool("", files=VirtiofsFiles(machine), sessions=2, parallel=1)

    def _connect_again(self, machine: Machine) -> None:
        """Find the device of each agent that is started in the place of another."""
        name = f"agent-{self.agent}"
        seen = self.pod.running[name]
        while not self.over.wait(AWAY_LOOK_SECONDS):
            now = self.pod.running[name]
            if now is seen or "ready" not in now.output:
                continue
            with suppress(BackEndGone, BackEndFault, OSError):
                machine.lose()
                machine.start(patience=5)
                seen = now

    def finish(self) -> None:
        super().finish()
        if self._machine is not None:
            with suppress(BackEndGone, BackEndFault, OSError):
                self._machine.close()


def kv_clients(
    pod: Pod, volumes: dict[str, Keys], seed: int, findings: Findings, stop: threading.Event
) -> list[Client]:
    """Clients of every volume, by every door, of both agents."""
    one, two = AGENTS
    made: list[tuple[type[KvClient], str, str]] = [
        (KvClient, one, "through"),
        (PathClient, two, "through"),
        (RegisteredClient, one, "twice"),
        (KvClient, two, "twice"),
        (PathClient, one, "back"),
        (KvClient, two, "second"),
        (KvClient, one, "keys"),
        (RegisteredClient, two, "keys"),
        (ShortLivedClient, one, "short"),
        (DeviceClient, one, "through"),
    ]
    return [
        kind(f"{kind.__name__} {agent} {volume}", pod, agent, volumes[volume], seed, findings, stop)
        for kind, agent, volume in made
    ]
