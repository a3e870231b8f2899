"""The commands of one read, write or flush of blocks: one, unless it is longer than the controller takes."""

from __future__ import annotations

from collections.abc import Sequence

from agent.inline.scatter import Buffer
from nvmeof.host import commands
from nvmeof.host.command import Command


def block_commands(
    nsid: int,
    lba_bytes: int,
    offset: int,
    size: int,
    into: memoryview | None,
    parts: Sequence[Buffer],
    max_transfer: int,
) -> Sequence[Command]:
    """Commands that move `size` bytes at `offset`: into `into`, or else those of `parts`; 0 bytes flush."""
    if not size:
        return (commands.flush(nsid),)
    first = offset // lba_bytes
    if size <= max_transfer:
        if into is not None:
            return (commands.read(nsid, first, size // lba_bytes, into),)
        return (commands.write(nsid, first, size // lba_bytes, parts),)
    step = max_transfer // lba_bytes * lba_bytes
    if into is not None:
        return [
            commands.read(
                nsid,
                first + at // lba_bytes,
                len(into[at : at + step]) // lba_bytes,
                into[at : at + step],
            )
            for at in range(0, size, step)
        ]
    return [
        commands.write(nsid, first + at // lba_bytes, sum(map(len, piece)) // lba_bytes, piece)
        for at, piece in _pieces(parts, step)
    ]


def _pieces(parts: Sequence[Buffer], step: int) -> list[tuple[int, list[memoryview]]]:
    """Buffers cut into pieces of `step` bytes, without copying: (offset of the piece, its buffers)."""
    pieces: list[tuple[int, list[memoryview]]] = [(0, [])]
    room = step
    for part in parts:
        view = memoryview(part)
        while len(view):
            if not room:
                pieces.append((pieces[-1][0] + step, []))
                room = step
            taken = view[:room]
            pieces[-1][1].append(taken)
            room -= len(taken)
            view = view[len(taken) :]
    return pieces
