"""`pyverbs.base`: context management, closing children first, errors with an errno.

An object holds its parents strongly and its children weakly, as in pyverbs: a closed parent closes children
that the program forgot, and an unreferenced object closes itself.
"""

import ctypes
import errno
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from operator import attrgetter
from types import TracebackType
from typing import Any, ClassVar, Final, Generic, TypeAlias, TypeVar

from emulator.roce.nic.verbs import VerbsError
from emulator.roce.pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError, PyverbsUserError
from emulator.roce.runtime.device import Device

_Thing = TypeVar("_Thing")

LOG_LEVEL: Final = logging.INFO
LOG_FORMAT: Final = "[%(levelname)s] %(asctime)s %(filename)s:%(lineno)s: %(message)s"


class PyverbsObject:
    """The base of all classes. Its logger has the name of the class."""

    __slots__ = ("__weakref__",)

    def __init__(self) -> None:
        return

    def set_log_level(self, val: int | str) -> None:
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


class EventRow:
    """Events that wait in a channel; it is there with and without any. None of this is in pyverbs 44."""

    __slots__ = ()
    events: Any

    @property
    def fd(self) -> int:
        """For select and poll: readable while there are any."""
        return int(self.events.fileno())

    def __len__(self) -> int:
        return len(self.events)

    def __bool__(self) -> bool:
        return True


Children: TypeAlias = weakref.WeakSet[PyverbsCM]
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


LOCK_WAIT_S: Final = 0.05
"""How long an unreferenced object waits for its device's lock."""

_deferred: deque[Any] = deque()
"""Unreferenced objects that could not be closed at once. Bounded by the tables of the devices."""


def close_or_defer(forgotten: Any) -> None:
    """The program dropped its last reference: close the object, as pyverbs does, now or with a later call.

    The interpreter may finalize it anywhere, even in a thread that holds the device's lock. So the wait for
    the lock is short. Objects that die together may come in any order, while the device wants children before
    their parents.
    """
    device = forgotten.device
    if device.closed:
        return
    if device.lock.acquire(timeout=LOCK_WAIT_S):
        device.lock.release()
        try:
            forgotten.close()
        except PyverbsError:
            _deferred.append(forgotten)
    else:
        _deferred.append(forgotten)


def close_deferred() -> None:
    """Close objects that `close_or_defer` had to defer. Without any device's lock held."""
    for _ in range(len(_deferred)):
        try:
            forgotten = _deferred.popleft()
        except IndexError:
            return
        if forgotten.device.closed:
            continue
        try:
            forgotten.close()
        except PyverbsError:
            _deferred.append(forgotten)


def PyverbsRDMAErrno(msg: str) -> PyverbsRDMAError:
    """An error with the errno that C code has left in this thread."""
    return PyverbsRDMAError(msg, ctypes.get_errno())


def refusal(message: str, error: VerbsError | OSError) -> PyverbsRDMAError:
    """The caller's error, with the device's errno. Without a device its message also says how to name
    devices; otherwise the words are pyverbs'."""
    if isinstance(error, VerbsError) and error.errno == errno.ENODEV:
        message = f"{message}: {error.reason}"
    return PyverbsRDMAError(message, error.errno if error.errno is not None else -1)


@contextmanager
def refusing(message: str) -> Iterator[None]:
    """Tell the caller what the device refuses in here, as `refusal` does."""
    try:
        yield
    except VerbsError as error:
        raise refusal(message, error) from error


@contextmanager
def asking(device: Device, message: str) -> Iterator[None]:
    """Ask the device, with its lock held; `message` is the error where it refuses."""
    with refusing(message), device.turn():
        yield


def not_here(what: str) -> PyverbsRDMAError:
    """The error of a device that does not do this: EOPNOTSUPP, as a kernel device without it says."""
    return PyverbsRDMAError(f"Failed to create {what}", errno.EOPNOTSUPP)


class DeviceObject(PyverbsCM, Generic[_Thing]):
    """An object that a program makes of a device: one call of the device makes it, another takes it back."""

    __slots__ = ("_native", "device")

    CHILDREN: ClassVar[str] = ""
    """Families of objects that are closed before it, in this order: names of attributes."""
    PARENTS: ClassVar[str] = ""
    """Attributes with what it was made of; None when it is closed."""
    DESTROY: ClassVar[str] = ""
    """The method of `Nic` that takes it back."""
    REFUSED: ClassVar[str] = ""
    """The error where the device does not take it back."""

    def __init__(self, device: Device) -> None:
        self._native: _Thing | None = None
        self.device = device
        for family in self.CHILDREN.split():
            setattr(self, family, weakref.WeakSet())

    def _make(self, refused: str, make: Callable[[], _Thing]) -> _Thing:
        """Let the device make it, with its lock held."""
        close_deferred()
        with asking(self.device, refused):
            made = self._native = make()
        return made

    def __del__(self) -> None:
        if getattr(self, "_native", None) is not None:
            close_or_defer(self)

    @property
    def native(self) -> _Thing:
        """The device's own object. PyverbsUserError when closed. Not in pyverbs."""
        if self._native is None:
            raise PyverbsUserError(f"the {type(self).__name__} is closed")
        return self._native

    def close(self) -> None:
        """Close what was made of it, and give it back."""
        native = self._native
        if native is None:
            return
        close_children(*(getattr(self, family) for family in self.CHILDREN.split()))
        self._give_back(native)
        for name in ("_native", *self.PARENTS.split()):
            setattr(self, name, None)

    def _give_back(self, native: _Thing) -> None:
        # With a device that is closed it is gone already.
        with asking(self.device, self.REFUSED):
            if not self.device.closed:
                getattr(self.device.nic, self.DESTROY)(native)


def reads(path: str, doc: str) -> Any:
    """An attribute that only shows another one, `native.lkey` or the like."""
    return property(attrgetter(path), doc=doc)


def inc_rkey(rkey: int) -> int:
    """The next key of a memory window: the caller's part of it, its low byte, one higher (IBTA 10.6.7.2)."""
    return (rkey & 0xFFFFFF00) | ((rkey + 1) & 0xFF)


def listing(pairs: Iterable[tuple[str, object]], indent: str = "") -> str:
    """One line for each pair, name and value in two columns: what `str()` of the records shows."""
    return "".join(f"{indent}{name:22}: {value!s:<20}\n" for name, value in pairs)


def shown(title: str, *lines: tuple[str, str] | tuple[str, str, Callable[[Any], object]]) -> Any:
    """The `__str__` of a record: `title`, and a line for each attribute: pyverbs' name for it, the attribute,
    and the function that puts its value into words."""

    def text(record: object) -> str:
        return title + listing(
            (name, (words[0] if words else str)(getattr(record, attribute)))
            for name, attribute, *words in lines
        )

    return text
