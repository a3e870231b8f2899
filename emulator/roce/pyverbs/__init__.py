"""A stand-in for Debian's pyverbs 44 over the emulated device: the same modules, classes and names.

    import emulator.roce.pyverbs
    emulator.roce.pyverbs.install()
    from pyverbs.device import Context        this package's

See docs/roce.md for what is not there and what is there besides.
"""

from __future__ import annotations

import importlib
import sys
from typing import Final

MODULES: Final = (
    "addr", "base", "cm_enums", "cmid", "cq", "device", "dmabuf", "enums", "flow", "fork", "mem_alloc", "mr",
    "pd", "pyverbs_error", "qp", "spec", "srq", "utils", "wq", "wr", "xrcd",
)  # fmt: skip
"""pyverbs' modules that exist here. To import `providers` or `dma_util` is an ImportError that says why."""


def install() -> None:
    """Be `pyverbs` for everything that is imported in this process from now on.

    A real pyverbs that has been imported already stays what it is to those who hold it.
    """
    for name in [name for name in sys.modules if name == "pyverbs" or name.startswith("pyverbs.")]:
        del sys.modules[name]
    sys.modules["pyverbs"] = sys.modules[__name__]
    for name in MODULES:
        sys.modules[f"pyverbs.{name}"] = importlib.import_module(f"{__name__}.{name}")
