"""`pyverbs.base`: what all objects share: context management, closing children first, errors with an errno.

An object holds its parents strongly and its children weakly, as in pyverbs: children that the program forgot
are closed by whoever is closed above them, and an object that nobody holds any longer closes itself.
"""

from __future__ import annotations

import ctypes
import errno
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias, TypeVar

from emulator.roce.nic.verbs import VerbsError
from emulator.roce.pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError

if TYPE_CHECKING:
    from emulator.roce.runtime.device import Device

_Thing = TypeVar("_Thing")

LOG_LEVEL: Final = logging.INFO
LOG_FORMAT: Final = "[%(levelname)s] %(asctime)s %(filename)s:%(lineno)s: %(message)s"


class Resource(Protocol):
    """Something of a device that has to be given back."""

    @property
    def device(self) -> Device: ...
    def close(self) -> None: ...


class PyverbsObject:
    """The base of everything. Its logger is named after the class, and made when it is first asked for."""

    __slots__ = ("__weakref__",)

    def __init__(self) -> None:
        return

    def set_log_level(self, val: int | str) -> None:
        """Set the level of the logger of this class."""
        logging.getLogger(type(self).__name__).setLevel(val)


class PyverbsCM(PyverbsObject):
    """An object with something to give back: a context manager that closes itself."""

    __slots__ = ()

    def __enter__(self) -> Any:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Give everything back. Closing twice is fine."""


Children: TypeAlias = "weakref.WeakSet[PyverbsCM]"
"""A family of objects that go before their parent. Each child registers itself with its parents."""


def close_children(*families: Children) -> None:
    """Close every object in the sets, family by family, and empty them."""
    for family in families:
        while True:
            try:
                child = family.pop()
            except KeyError:
                break
            child.close()


FORSAKEN_WAIT_S: Final = 0.05
"""How long the end of a forgotten object waits for its device's lock."""

_forsaken: deque[Resource] = deque()
"""Forgotten objects that could not be closed at once. Bounded by the tables of the devices."""


def forsake(forgotten: Resource) -> None:
    """Nobody holds this object any more: close it, as pyverbs does, now or with a later call.

    The interpreter may come upon a forgotten object anywhere, in the midst of the device's work too, in a
    thread that holds the device's lock. So the lock is waited for a moment only. And objects that died
    together may come in any order, where the device wants children before their parents.
    """
    device = forgotten.device
    if device.closed:
        return
    if device.lock.acquire(timeout=FORSAKEN_WAIT_S):
        device.lock.release()
        try:
            forgotten.close()
        except PyverbsError:
            _forsaken.append(forgotten)
    else:
        _forsaken.append(forgotten)


def bury() -> None:
    """Close what was forgotten when it could not be; without any device's lock held."""
    for _ in range(len(_forsaken)):
        try:
            forgotten = _forsaken.popleft()
        except IndexError:
            return
        if forgotten.device.closed:
            continue
        try:
            forgotten.close()
        except PyverbsError:
            _forsaken.append(forgotten)


def PyverbsRDMAErrno(msg: str) -> PyverbsRDMAError:
    """An error with the errno that C code has left in this thread."""
    return PyverbsRDMAError(msg, ctypes.get_errno())


def refusal(message: str, error: VerbsError | OSError) -> PyverbsRDMAError:
    """The error that the caller sees, with the errno of what the device said. Without a device it also says
    how devices are named; else the words are pyverbs'."""
    if isinstance(error, VerbsError) and error.errno == errno.ENODEV:
        message = f"{message}: {error.reason}"
    return PyverbsRDMAError(message, error.errno if error.errno is not None else -1)


def give_back(device: Device, destroy: Callable[[_Thing], None], thing: _Thing, refused: str) -> None:
    """Destroy an object of the device. With a device that is closed it is gone already."""
    try:
        with device.turn():
            if not device.closed:
                destroy(thing)
    except VerbsError as error:
        raise refusal(refused, error) from error


def inc_rkey(rkey: int) -> int:
    """The next key of a memory window: the caller's part of it, its low byte, one higher (IBTA 10.6.7.2)."""
    return (rkey & 0xFFFFFF00) | ((rkey + 1) & 0xFF)


def listing(pairs: Iterable[tuple[str, object]], indent: str = "") -> str:
    """One line for each pair, name and value in two columns: what `str()` of the records shows."""
    return "".join(f"{indent}{name:22}: {value!s:<20}\n" for name, value in pairs)
