"""Where verbs come from: a package with the names of pyverbs 44, loaded by its name.

`pyverbs` (Debian's python3-pyverbs, on a real RDMA device or the kernel's rdma_rxe) and
`emulator.roce.pyverbs` (a soft-RoCE device in this process) differ here and nowhere else:

* Descriptors. pyverbs 44 has no descriptor of a channel: the one that appears in /proc/self/fd while a
  channel is made is taken for it, and made non-blocking, because calls of pyverbs hold the interpreter lock.
* Waiting. A thread that waits for the emulator receives for everybody meanwhile (`drive_until`); for pyverbs
  it arms the queue and polls.
* Windows. A type 2 window is bound again under a new key, which a program has to note in `ibv_mw.rkey`
  (rdma_rxe compares it); pyverbs lets nobody write it, so there each window serves once.
* Devices. The emulator's are made by their addresses when they are first wanted.
"""

import contextlib
import errno
import importlib
import importlib.util
import logging
import os
import random
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from nvmeof.errors import NvmeofError
from nvmeof.transport.base import DEFAULT_PROVIDER
from nvmeof.transport.verbs_waiting import Channel, Completions

MODULES = ("addr", "cm_enums", "cmid", "cq", "device", "enums", "mr", "pd", "pyverbs_error", "qp", "wr")

_making_channels = threading.Lock()
"""Held while a channel is made, so that the descriptor that appears is its own."""


DEBIANS = "/usr/lib/python3/dist-packages/pyverbs/__init__.py"


def _find_debians() -> None:
    """Let a virtual environment import Debian's pyverbs, and nothing else of the system's packages.

    It cannot be installed from a registry, because it must match the installed rdma-core exactly; whether
    it matches this interpreter shows when its modules are loaded.
    """
    if "pyverbs" in sys.modules or importlib.util.find_spec("pyverbs") is not None:
        return
    spec = importlib.util.spec_from_file_location(
        "pyverbs", DEBIANS, submodule_search_locations=[os.path.dirname(DEBIANS)]
    )
    if os.path.exists(DEBIANS) and spec is not None and spec.loader is not None:
        package = importlib.util.module_from_spec(spec)
        sys.modules["pyverbs"] = package
        spec.loader.exec_module(package)


@contextlib.contextmanager
def _own_log() -> Iterator[None]:
    """The log stays as the program has set it up: pyverbs calls logging.basicConfig where it is imported."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    try:
        yield
    finally:
        root.handlers[:] = handlers
        root.setLevel(level)


class VerbsUnavailable(NvmeofError):
    """The world: the provider cannot be imported, or has no device. Says why, and what would help."""


class Verbs:
    """One provider. Its modules are attributes: `verbs.qp.QPEx`, `verbs.enums.IBV_QPS_RTS`."""

    def __init__(self, name: str) -> None:
        self.name = name
        if name == DEFAULT_PROVIDER:
            _find_debians()
        self._modules: dict[str, Any] = {}
        with _own_log():
            for module in MODULES:
                try:
                    self._modules[module] = importlib.import_module(f"{name}.{module}")
                except Exception as error:
                    # Also what the loader of a shared library says, or a package that is half there.
                    raise VerbsUnavailable(f"{name}: {type(error).__name__}: {error}") from error
        self.error: type[Exception] = self._modules["pyverbs_error"].PyverbsError
        package = name.rpartition(".")[0]
        self._registry: Any = importlib.import_module(f"{package}.runtime.registry") if package else None
        self._loopback = ""
        self._contexts: dict[str, tuple[Any, int]] = {}
        self._lock = threading.Lock()

    def __getattr__(self, module: str) -> Any:
        try:
            return self._modules[module]
        except KeyError:
            raise AttributeError(module) from None

    @property
    def emulated(self) -> bool:
        """The device is in this process."""
        return self._registry is not None

    @property
    def windows_serve_once(self) -> bool:
        """A memory window cannot be bound a second time."""
        return not self.emulated

    def ensure_device(self, address: str) -> None:
        """Make an emulated device at a local address known, if there is none; real ones are there or not."""
        if self._registry is None or any(entry.ip == address for entry in self._registry.devices()):
            return
        if address in ("0.0.0.0", "::"):
            raise VerbsUnavailable(f"an emulated device has one address of this machine, and not {address}")
        if _why_not_bound(address) == errno.EADDRINUSE:
            raise VerbsUnavailable(
                f"{address}: its UDP port {ROCE_PORT} is taken, so the emulated device there is another "
                "program's; give this one a local_address of its own"
            )
        try:
            self._registry.add_device(f"roce-{address}", address)
        except ValueError as error:
            raise VerbsUnavailable(f"no RDMA device at {address}: {error}") from error

    def source_for(self, local_address: str, destination: str) -> str:
        """The address to connect from: the one that was chosen; "" where the provider finds one by itself.

        The emulator needs one. For a destination on loopback it is an address there that is free, the same
        for the life of this process. Raises `VerbsUnavailable`.
        """
        if not local_address and self.emulated:
            if not destination.startswith("127."):
                raise VerbsUnavailable(f"an emulated device needs a local address to reach {destination}")
            with self._lock:
                local_address = self._loopback = self._loopback or free_loopback_address()
        if local_address:
            self.ensure_device(local_address)
        return local_address

    def devices(self) -> list[str]:
        return [
            device.name.decode() if isinstance(device.name, bytes) else str(device.name)
            for device in self.device.get_device_list()
        ]

    def devices_for(self, address: str) -> list[str]:
        """Names of devices that may have a local address: the emulated one, or all real ones."""
        if self._registry is None:
            return self.devices()
        return [entry.name for entry in self._registry.devices() if entry.ip == address]

    def require_device(self) -> None:
        """Raises `VerbsUnavailable` where there is no device: librdmacm would write lines of its own."""
        if not self.emulated and (why := why_unavailable(self.name)) is not None:
            raise VerbsUnavailable(
                f"{self.name}: {why}; g35 doctor says what it takes, and fabric.verbs_provider names another"
            )

    # --- contexts: one for each device, for as long as somebody uses it ------------------------------------

    def open_context(self, device: str) -> Any:
        """The context of a device; give it back with `release_context`."""
        with self._lock:
            context, users = self._contexts.get(device, (None, 0))
            if context is None:
                context = self.device.Context(name=device)
            self._contexts[device] = context, users + 1
            return context

    def release_context(self, device: str) -> None:
        """One user less; the last one closes it."""
        with self._lock:
            context, users = self._contexts[device]
            if users > 1:
                self._contexts[device] = context, users - 1
                return
            del self._contexts[device]
            context.close()

    def make_channel(self, make: Callable[[], Any]) -> Channel:
        """A channel (of completions or of the connection manager), made non-blocking."""
        with _making_channels:
            before = _descriptors()
            channel = make()
            fd = getattr(channel, "fd", None)
            if fd is None:
                fresh = [
                    number
                    for number, leads_to in _descriptors().items()
                    if before.get(number) != leads_to and ("infiniband" in leads_to or "rdma_cm" in leads_to)
                ]
                if len(fresh) != 1:
                    raise VerbsUnavailable(f"{self.name}: the descriptor of a channel cannot be told")
                fd = fresh[0]
        os.set_blocking(fd, False)
        return Channel(channel, fd)

    def make_completions(self, context: Any, entries: int) -> Completions:
        """A completion queue with so many entries, and its channel."""
        channel = self.make_channel(lambda: self.cq.CompChannel(context))
        queue = self.cq.CQ(context, entries, None, channel.channel)
        return Completions(context, queue, channel, self.name, self.error)


def _descriptors() -> dict[int, str]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists the folder has gone by now
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


ROCE_PORT = 4791
LOOPBACK_TRIES = 64


def _why_not_bound(address: str) -> int:
    """Why an emulated device could not listen at a local address, as an errno; 0 where it could."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address, ROCE_PORT))
    except OSError as error:
        return error.errno or errno.EINVAL
    return 0


def free_loopback_address() -> str:
    """An address of 127.0.0.0/8 whose RoCE port is free. Raises `VerbsUnavailable`."""
    for _ in range(LOOPBACK_TRIES):
        address = f"127.{random.randint(1, 254)}.{random.randint(1, 254)}.{random.randint(1, 254)}"
        if not _why_not_bound(address):
            return address
    raise VerbsUnavailable(f"no address on loopback has UDP port {ROCE_PORT} free")


_loaded: dict[str, Verbs] = {}


def load_verbs(name: str = DEFAULT_PROVIDER) -> Verbs:
    """The provider of that name. Raises `VerbsUnavailable`."""
    verbs = _loaded.get(name)
    if verbs is None:
        verbs = _loaded[name] = Verbs(name)
    return verbs


def why_unavailable(name: str) -> str | None:
    """What keeps the provider from being used, in a sentence; None where it can be."""
    try:
        verbs = load_verbs(name)
    except Exception as error:
        return str(error)
    if verbs.emulated:
        return None
    try:
        found = verbs.devices()
    except Exception as error:
        return f"it imports, but there is no RDMA device ({error})"
    return None if found else "it imports, but there is no RDMA device"
