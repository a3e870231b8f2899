"""The S3 door of `s3_served`, and that of a reader in front of it: clients talk to the latter."""

from __future__ import annotations

import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from agent.fs.files.sealed_reads import Blocks
from agent.s3.processes.reader_door import ReaderDoor
from tests.support.engines.s3_served import KEY, OTHER_KEY, Served
from tests.support.pool.inline_runner import inline_runner


class WithReader(Served):
    """`door` is that of the first process, which listens at a port of its own; `port` is the reader's."""

    def __init__(self, folder: Path, **section: Any) -> None:
        super().__init__(folder, **section)
        for name, store in self.stores.items():
            store.home_volumes[1] = name
        self.serves = True
        """Whether the reader has the volumes of blocks."""
        pairs = [
            socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET) for _ in range(self.door.links_of_reader)
        ]
        self.ours, theirs = [one for one, _ in pairs], [other for _, other in pairs]
        self.reader = ReaderDoor(
            self.section, [KEY, OTHER_KEY], theirs[:-1], theirs[-1], self._blocks_of, inline_runner
        )
        self._theirs = theirs
        self.door.serve_reader(self.ours[:-1], self.ours[-1])
        self.reader.start()

    def _blocks_of(self, home: Mapping[int, str]) -> Blocks | None:
        return self.blocks[home[1]] if self.serves else None

    @property
    def port(self) -> int:
        return self.reader.ports[0]

    def held(self) -> int:
        """Files of objects that are held for readers."""
        return sum(store.files_held() for store in self.stores.values())

    def end_reader(self) -> None:
        """As at the end of its process."""
        self.reader.stop(0.0)
        for link in self._theirs:
            link.close()

    def end(self) -> None:
        self.end_reader()
        self.door.stop(0.0)


@contextmanager
def with_reader(folder: Path, **section: Any) -> Iterator[WithReader]:
    made = WithReader(folder, **section)
    try:
        yield made
    finally:
        made.end()
