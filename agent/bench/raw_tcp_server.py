"""The other end of raw_tcp_*: `python -m agent.bench.raw_tcp_server READY-FILE` writes its port there.

A connection begins with a `BEGIN`: the size of the blocks, and over how much memory they lie. Each `ASK` asks
for so many blocks. Those of `raw_tcp_*` are all the same memory: nothing that stores values can be faster.
What the processor time of a get is compared with (work_floors.py) comes out of as much memory as values do,
and may go to the socket by reference, as an enclosure sends it.
"""

import contextlib
import itertools
import mmap
import os
import select
import socket
import struct
import sys
import threading
from pathlib import Path

from agent.bench.contents import Contents
from nvmeof.transport.drive_memory import DriveMemory
from nvmeof.transport.page_sender import PageSender
from nvmeof.transport.socket_options import set_options

BEGIN = struct.Struct("<QQ?")
"""Bytes of a block, bytes of the memory that blocks lie in one behind the other, whether by reference."""
ASK = struct.Struct("<Q")
BLOCK_BYTES_MAX = 1 << 24
MEMORY_BYTES_MAX = 1 << 28


def serve(connection: socket.socket) -> None:
    with connection, contextlib.suppress(OSError):
        set_options(connection)
        size, memory_bytes, by_reference = BEGIN.unpack(connection.recv(BEGIN.size, socket.MSG_WAITALL))
        if not 0 < size <= BLOCK_BYTES_MAX or memory_bytes > MEMORY_BYTES_MAX:
            return
        if memory_bytes > size or by_reference:
            blocks = itertools.cycle(drive_blocks(size, memory_bytes))
        else:
            blocks = itertools.cycle([Contents(size).value(0)])
        sender = PageSender(connection, by_reference=by_reference)
        while len(asked := connection.recv(ASK.size, socket.MSG_WAITALL)) == ASK.size:
            for block in itertools.islice(blocks, ASK.unpack(asked)[0]):
                send(connection, sender, block, by_reference)


def drive_blocks(size: int, memory_bytes: int) -> list[memoryview]:
    """Blocks in memory like a drive's, which have all been written."""
    count = max(1, memory_bytes // size)
    room, block = DriveMemory(count * size), Contents(size).value(0)
    with contextlib.suppress(OSError):  # no such pages in this kernel: slower, else the same
        room.madvise(mmap.MADV_HUGEPAGE)
    memory = memoryview(room)
    blocks = [memory[at : at + size] for at in range(0, count * size, size)]
    for each in blocks:
        each[:] = block
    return blocks


def send(connection: socket.socket, sender: PageSender, block: memoryview, by_reference: bool) -> None:
    """All of a block, waiting for room in the socket where it has none."""
    if not by_reference:
        connection.sendall(block)
        return
    while block:
        try:
            block = block[sender.send([block]) :]
        except BlockingIOError:
            poll = select.poll()
            poll.register(connection, select.POLLOUT)
            poll.poll()


def main() -> None:
    ready = Path(sys.argv[1])
    with socket.create_server(("127.0.0.1", 0)) as listener:
        partial = ready.with_suffix(".part")
        partial.write_text(f"{listener.getsockname()[1]}\n")
        os.replace(partial, ready)
        while True:
            connection, _peer = listener.accept()
            threading.Thread(target=serve, args=(connection,), daemon=True).start()


if __name__ == "__main__":
    main()
