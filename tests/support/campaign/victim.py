"""A client to be killed amid its puts: it says what it begins and what was acknowledged, line by line.

    python -m tests.support.campaign.victim FOLDER path 35-7

puts value after value below FOLDER (`MOUNT/kv/VOLUME`), by path or by a session, until it is killed. The keys
follow from the label, so that the one who kills it knows what to look for.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from host_shim.pool import Pool
from tests.support.campaign.values import content, name_of

SIZES = (20_000, 65_000, 200_000, 262_144)
PIECE = 16 << 10


def key_of(label: str, number: int) -> bytes:
    """The n-th key of a victim."""
    return name_of("victim", label, number)


def put_by_path(folder: Path, key: bytes, value: bytes) -> bool:
    """In pieces with pauses, as a program does that computes what it writes."""
    try:
        descriptor = os.open(folder / key.hex(), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        try:
            for start in range(0, len(value), PIECE):
                os.write(descriptor, value[start : start + PIECE])
                time.sleep(0.0005)
        finally:
            os.close(descriptor)
    except OSError:
        return False
    return True


def main(words: list[str]) -> int:
    """The entry point of `python -m tests.support.campaign.victim`."""
    folder, door, label = Path(words[0]), words[1], words[2]
    pool = Pool(folder.parent.parent)
    number = 0
    while True:
        number += 1
        key = key_of(label, number)
        value = content(key, 1, SIZES[number % len(SIZES)])
        print(f"begun {number}", flush=True)
        if door == "path":
            stored = put_by_path(folder, key, value)
        else:
            stored = pool.volume(folder.name).put(key, value)
        if stored:
            print(f"stored {number}", flush=True)
        else:
            time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
