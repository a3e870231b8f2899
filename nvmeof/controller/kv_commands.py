"""I/O commands of the Key Value command set, in the same three steps as those on blocks: judged on arrival
(`begin_kv`), fed with data (`accept_kv`), carried out (`execute_kv`). Read `io_commands.py` first.

KV Command Set 1.0, chapter 3. Where it leaves a choice: keys are listed in the order of their bytes. A List
fills the host's whole buffer, with zeros behind the last key. Values are not compressed, so the options about
compression change nothing.
"""

from collections.abc import Callable
from typing import Final

from nvmeof.controller.controller import Controller
from nvmeof.controller.request import Direction, Outcome, Refusal, Request
from nvmeof.controller.storage import Operation, Scratch, StorageError
from nvmeof.controller.subsystem import KvNamespace
from nvmeof.errors import MalformedPdu
from nvmeof.wire.kv import (
    LIST_BYTES_MIN,
    KvOpcode,
    RetrieveOption,
    StoreOption,
    decode_key_untrusted,
    encode_key_list,
    options,
)
from nvmeof.wire.status import Status

_STORE_OPTIONS: Final = ~int(
    StoreOption.ONLY_IF_PRESENT | StoreOption.ONLY_IF_ABSENT | StoreOption.NO_COMPRESSION
)
_RETRIEVE_OPTIONS: Final = ~int(RetrieveOption.RAW)
_LEAST_LIST_ENTRY: Final = 4  # a key of one or two bytes


def begin_kv(request: Request, namespace: KvNamespace, controller: Controller) -> None:
    """Find out what the command wants and whether it can be; sets direction and length. Raises Refusal."""
    operation, begin = _BEGIN.get(request.sqe.opcode, (None, None))
    if operation is None:
        raise Refusal(Status.INVALID_OPCODE)
    request.kv, request.operation = namespace, operation
    if operation is not Operation.FLUSH:
        _take_key(request, namespace, may_be_empty=operation is Operation.LIST)
    if begin is not None:
        begin(request, namespace, controller)


def _take_key(request: Request, namespace: KvNamespace, *, may_be_empty: bool = False) -> None:
    try:
        request.key = decode_key_untrusted(request.sqe)
    except MalformedPdu:
        raise Refusal(Status.INVALID_KEY_SIZE) from None
    if len(request.key) > namespace.storage.format.key_max or not (request.key or may_be_empty):
        raise Refusal(Status.INVALID_KEY_SIZE)


def _begin_store(request: Request, namespace: KvNamespace, controller: Controller) -> None:
    asked = options(request.sqe)
    both = int(StoreOption.ONLY_IF_PRESENT | StoreOption.ONLY_IF_ABSENT)
    if asked & _STORE_OPTIONS or asked & both == both:
        raise Refusal(Status.INVALID_FIELD)
    length = request.sqe.cdw10
    if length > namespace.storage.format.value_max or length > controller.settings.max_transfer_bytes:
        raise Refusal(Status.INVALID_VALUE_SIZE)
    if length:
        request.direction, request.length = Direction.FROM_HOST, length


def _begin_retrieve(request: Request, namespace: KvNamespace, controller: Controller) -> None:
    if options(request.sqe) & _RETRIEVE_OPTIONS:
        raise Refusal(Status.INVALID_FIELD)
    _to_host(request, controller)


def _begin_list(request: Request, namespace: KvNamespace, controller: Controller) -> None:
    if request.sqe.cdw10 < LIST_BYTES_MIN:
        raise Refusal(Status.INVALID_FIELD)
    _to_host(request, controller)


def _to_host(request: Request, controller: Controller) -> None:
    length = request.sqe.cdw10
    if length > controller.settings.max_transfer_bytes:
        raise Refusal(Status.INVALID_FIELD)
    if length:
        request.direction, request.length = Direction.TO_HOST, length


_BEGIN: Final[dict[int, tuple[Operation, Callable[[Request, KvNamespace, Controller], None] | None]]] = {
    KvOpcode.FLUSH: (Operation.FLUSH, None),
    KvOpcode.STORE: (Operation.STORE, _begin_store),
    KvOpcode.RETRIEVE: (Operation.RETRIEVE, _begin_retrieve),
    KvOpcode.LIST: (Operation.LIST, _begin_list),
    KvOpcode.DELETE: (Operation.DELETE, None),
    KvOpcode.EXIST: (Operation.EXIST, None),
}


def open_kv_window(request: Request, namespace: KvNamespace) -> None:
    """The value of a Store is about to come: set room aside. A command that gets none fails."""
    if request.operation is not Operation.STORE or request.staged is not None:
        return
    try:
        request.staged = namespace.storage.stage(request.length)
    except StorageError as error:
        request.fail(error.status, do_not_retry=error.do_not_retry)
    else:
        request.window = request.staged.window


def accept_kv(request: Request, offset: int, data: memoryview) -> None:
    """`data` of a Store have arrived, `offset` bytes into the value; in `request.window` if it has one."""
    if request.staged is None or request.window is not None or request.status:
        return
    try:
        request.staged.put(offset, data)
    except StorageError as error:
        request.fail(error.status, do_not_retry=error.do_not_retry)


def execute_kv(request: Request, namespace: KvNamespace, now: float, scratch: Scratch) -> Outcome:
    """Carry the command out, or say when. All its data are here. Raises Refusal and StorageError."""
    storage, operation = namespace.storage, request.operation
    assert operation is not None
    if not request.admitted:
        request.admitted = True
        request.due = storage.admit(operation, 0, _moved(request, namespace), now)
    else:
        request.due = storage.held_until(now)
    if request.due > now:
        return Outcome.LATER
    match operation:
        case Operation.STORE:
            if request.staged is None:  # a value of no bytes
                request.staged = storage.stage(0)
            asked = options(request.sqe) & ~int(StoreOption.NO_COMPRESSION)
            request.staged.commit(request.key, StoreOption(asked))
            request.staged = None
        case Operation.RETRIEVE:
            data, request.result = storage.retrieve(request.key, request.length, scratch)
            request.data = data if len(data) else None
        case Operation.LIST:
            most = (request.length - LIST_BYTES_MIN) // _LEAST_LIST_ENTRY
            keys = storage.keys_from(request.key, most)
            request.data = memoryview(bytearray(encode_key_list(keys, request.length)))
        case Operation.DELETE:
            storage.delete(request.key)
        case Operation.EXIST:
            if not storage.exists(request.key):
                raise Refusal(Status.KEY_NOT_FOUND)
        case Operation.FLUSH:
            storage.flush()
        case _:  # begin_kv has let nothing else through
            raise Refusal(Status.INVALID_OPCODE)
    return Outcome.DONE


def _moved(request: Request, namespace: KvNamespace) -> int:
    """Bytes of value that the command moves, for the model of the drive's speed."""
    if request.operation is Operation.RETRIEVE:
        return min(request.length, namespace.storage.value_bytes(request.key))
    return request.length
