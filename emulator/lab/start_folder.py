"""Whether a guest can start in a folder of this machine.

It sees this machine's files, but has some folders of its own (`init.sh`), in which what is here is not there.
"""

from __future__ import annotations

from pathlib import Path

from emulator.lab.cache import REPOSITORY

OF_THE_GUEST = ("/dev", "/proc", "/run", "/sys", "/tmp", "/var/tmp")
KEPT_IN_VIEW_BELOW = ("/tmp", "/var/tmp")
"""Where a checkout may lie and be seen all the same."""


def start_folder(folder: Path, checkout: Path = REPOSITORY) -> Path:
    """The folder, from the root. Raises ValueError, with a sentence, where a guest cannot start in it."""
    named = folder.absolute()
    try:
        real = named.resolve(strict=True)
    except (OSError, RuntimeError) as error:  # RuntimeError: a ring of links
        reason = error.strerror if isinstance(error, OSError) else error
        raise ValueError(f"{folder}: {reason}") from None
    if not real.is_dir():
        raise ValueError(f"{folder} is no folder")
    # The guest goes there by the name, and then by the links: either may lead into a folder of its own.
    for path in (named, real):
        own = hiding_folder(path, checkout)
        if own:
            raise ValueError(
                f"{folder} is not visible in the guest, whose {own} is its own; name a folder elsewhere"
            )
    return named


def hiding_folder(path: Path, checkout: Path) -> str:
    """The folder of the guest's own that hides `path`, or an empty string."""
    hiding = next((own for own in OF_THE_GUEST if Path(own) in path.parents), "")
    if hiding in KEPT_IN_VIEW_BELOW and path.is_relative_to(checkout):
        return ""
    return hiding
