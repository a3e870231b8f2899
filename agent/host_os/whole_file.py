"""A file that its readers find whole: the text of before, or the new one."""

import os
from pathlib import Path


def write_whole(file: Path, text: str, *, durable: bool = False) -> None:
    """Write the text beside the file, and give it the file's name. `durable`: not before it is on the medium.

    Raises OSError; the file is then as it was.
    """
    partial = file.with_name(f"{file.name}.part")
    with open(partial, "w") as beside:
        beside.write(text)
        if durable:
            beside.flush()
            os.fsync(beside.fileno())
    partial.replace(file)
