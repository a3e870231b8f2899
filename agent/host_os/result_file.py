"""A file that is written at the end of long work: whether it can be, is found out before the work begins."""

import os
from pathlib import Path


def why_not_writable(file: Path) -> str:
    """Why no file of this name can be made or replaced, as far as Linux says before; empty where it can."""
    folder = file.absolute().parent
    if not folder.is_dir():
        return f"there is no folder {folder}"
    if file.is_dir():
        return f"{file} is a folder"
    if not os.access(file if file.exists() else folder, os.W_OK):
        return f"{file} may not be written"
    return ""


def result_file(text: str) -> Path:
    """The `type` of an option of argparse. Raises ArgumentTypeError."""
    import argparse  # here, for verbs by typer do without it

    if why := why_not_writable(file := Path(text)):
        raise argparse.ArgumentTypeError(why)
    return file
