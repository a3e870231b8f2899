"""Runs modules of rdma-core's tests on the stand-in for pyverbs: one JSON line for each, on standard output.

    python rdma_core_program.py FOLDER DEVICE ADDRESS MODULE...

What is not under test is replaced: providers of single vendors, names that came after pyverbs 44, and the
questions to sysfs and iproute2 about a kernel device. The connection manager's tests fork; here both sides
are threads, since one address is one device of one process.
"""

from __future__ import annotations

import importlib
import io
import queue
import sys
import threading
import traceback
import types
import unittest
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import emulator.roce.pyverbs
from emulator.roce.runtime import registry

VENDORS = (
    "pyverbs.providers", "pyverbs.providers.mlx5", "pyverbs.providers.mlx5.mlx5dv", "pyverbs.providers.efa",
    "pyverbs.providers.efa.efadv", "tests.mlx5_base", "tests.efa_base",
)  # fmt: skip

LATER = {
    "IBV_QUERY_QP_DATA_IN_ORDER_RETURN_CAPS": 1, "IBV_QUERY_QP_DATA_IN_ORDER_WHOLE_MSG": 1,
    "IBV_QUERY_QP_DATA_IN_ORDER_ALIGNED_128_BYTES": 2, "IBV_FLUSH_GLOBAL": 1, "IBV_FLUSH_PERSISTENT": 2,
    "IBV_FLUSH_RANGE": 0, "IBV_FLUSH_MR": 1, "IBV_QP_EX_WITH_FLUSH": 1 << 11, "IBV_WR_FLUSH": 14,
    "IBV_ACCESS_FLUSH_GLOBAL": 1 << 8, "IBV_ACCESS_FLUSH_PERSISTENT": 1 << 9,
}  # fmt: skip
"""Enumerators that rdma-core 57 has and 44 has not."""

ARGUMENTS = {
    "dev": None, "pci_dev": None, "port": 1, "gid": None, "gpu": 0, "gtt": False, "verbosity": 0,
    "list_tests": False,
}  # fmt: skip


class Anything(types.ModuleType):
    """A module in which every name is an empty class."""

    __path__: ClassVar[list[str]] = []

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        made = type(name, (), {})
        setattr(self, name, made)
        return made


class Side(threading.Thread):
    """A process of the tests, as a thread: with an exit code."""

    def __init__(self, target: Callable[..., None], kwargs: dict[str, Any]) -> None:
        super().__init__(daemon=True)
        self._work = target
        self._arguments = kwargs
        self.exitcode: object = None

    def run(self) -> None:
        try:
            self._work(**self._arguments)
            self.exitcode = 0
        except SystemExit as end:
            self.exitcode = end.code or 0
        except Exception:
            traceback.print_exc()
            self.exitcode = 2

    def terminate(self) -> None:
        """A thread cannot be ended from outside; the test fails all the same."""


class Threads:
    """What multiprocessing's context is to the tests."""

    Queue = queue.Queue
    Process = Side

    @staticmethod
    def Barrier(parties: int, timeout: float | None = None) -> threading.Barrier:
        return threading.Barrier(parties, timeout=timeout)


def prepare(folder: Path, device: str, ip: str) -> None:
    """Put the tests and everything that they take for granted in place."""
    registry.add_device(device, ip)
    emulator.roce.pyverbs.install()
    for name in VENDORS:
        sys.modules[name] = Anything(name)
    tests = types.ModuleType("tests")
    tests.__path__ = [str(folder)]
    sys.modules["tests"] = tests
    sys.path.insert(0, str(folder))
    enums, memory, of_device = (
        importlib.import_module(f"pyverbs.{name}") for name in ("enums", "mem_alloc", "device")
    )
    vars(enums).update(LATER)
    memory.madvise = lambda *_: None
    shown = of_device.speed_to_str
    of_device.speed_to_str = lambda speed, _extended=0: shown(speed)
    of_device.PortAttr.active_speed_ex = 0
    importlib.import_module("args_parser").parser.args = ARGUMENTS
    base, utils = importlib.import_module("tests.base"), importlib.import_module("tests.utils")
    base.RDMATestCase.get_net_name = staticmethod(lambda *_: "lo")
    base.RDMATestCase.get_ip_mac_address = staticmethod(lambda *_: (ip, "00:00:00:00:00:00"))
    base.mp.get_context = lambda *_: Threads
    utils.get_pkey_from_kernel = lambda **_: 0xFFFF


def run(module: str) -> dict[str, object]:
    """What came of one module."""
    suite = unittest.defaultTestLoader.loadTestsFromModule(importlib.import_module(f"tests.{module}"))
    result = unittest.TextTestRunner(stream=io.StringIO(), verbosity=0).run(suite)
    bad = [*result.failures, *result.errors]
    return {
        "module": module,
        "passed": result.testsRun - len(bad) - len(result.skipped),
        "failed": {test.id(): trace for test, trace in bad},
        "skipped": {test.id(): why for test, why in result.skipped},
    }


if __name__ == "__main__":
    import json

    prepare(Path(sys.argv[1]), sys.argv[2], sys.argv[3])
    for wanted in sys.argv[4:]:
        print(json.dumps(run(wanted)), flush=True)
