"""A stand-in for Debian's pyverbs 44 over the emulated device: the same modules, classes and names.

    import emulator.roce.pyverbs
    emulator.roce.pyverbs.install()
    from pyverbs.device import Context        this package's

See docs/roce.md for what is not there and what is there besides.
"""

import importlib
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Final

MODULES: Final = (
    "addr", "base", "cm_enums", "cmid", "cq", "device", "dmabuf", "enums", "flow", "fork", "mem_alloc", "mr",
    "pd", "pyverbs_error", "qp", "spec", "srq", "utils", "wq", "wr", "xrcd",
)  # fmt: skip
"""pyverbs' modules that exist here. To import `providers` or `dma_util` is an ImportError that says why."""


class _StandIn(Loader, MetaPathFinder):
    """Maps imports of `pyverbs.*` to the modules of this package, where `pyverbs` is this package.

    Python would find them by the package's path and make a second copy of each, whose classes are others.
    """

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.partition(".")
        if package != "pyverbs" or name not in MODULES:
            return None
        if sys.modules.get(package) is not sys.modules[__name__]:
            return None
        return ModuleSpec(fullname, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = importlib.import_module(f"{__name__}.{spec.name.partition('.')[2]}")
        self._own = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._own  # the import has just replaced it


sys.meta_path.insert(0, _StandIn())


def install() -> None:
    """Be `pyverbs` for all later imports in this process.

    Modules that hold a real pyverbs keep it. To put this package
    at `sys.modules["pyverbs"]` is enough where no module of a real pyverbs has been imported before.
    """
    for name in [name for name in sys.modules if name == "pyverbs" or name.startswith("pyverbs.")]:
        del sys.modules[name]
    sys.modules["pyverbs"] = sys.modules[__name__]
    for name in MODULES:
        importlib.import_module(f"pyverbs.{name}")
