"""I/O commands of the NVM command set: judged on arrival (`begin_io`), fed with data (`accept_io`), carried
out (`execute_io`).

Judging happens before a single byte of payload moves, so that the place of the payload is known when it
arrives. Carrying out may be put off by the drive (`Storage.admit`), with nothing held but the request.
"""

from collections.abc import Callable
from typing import Final

from nvmeof.controller.controller import Controller
from nvmeof.controller.kv_commands import accept_kv, begin_kv, execute_kv, open_kv_window
from nvmeof.controller.request import Direction, Outcome, Refusal, Request
from nvmeof.controller.storage import Operation, Scratch, StorageError
from nvmeof.controller.subsystem import KvNamespace, Namespace
from nvmeof.errors import MalformedPdu
from nvmeof.wire.sqe import (
    DATASET_DEALLOCATE,
    DATASET_RANGE,
    MAX_DATASET_RANGES,
    READ_WRITE_FUA,
    WRITE_ZEROES_DEALLOCATE,
    IoOpcode,
    decode_dataset_ranges_untrusted,
)
from nvmeof.wire.status import Status

BROADCAST_NSID: Final = 0xFFFF_FFFF
_READ: Final = IoOpcode.READ.value
_WRITE: Final = IoOpcode.WRITE.value
_FLUSH: Final = IoOpcode.FLUSH.value
_DIRECTIVE_TYPE: Final = 0xF << 20  # command dword 12 of Write
_MOST_RANGES_BYTES: Final = MAX_DATASET_RANGES * DATASET_RANGE.size
_RANGE_COUNT: Final = 0xFF  # command dword 10 of Dataset Management, 0's based


def begin_io(request: Request, controller: Controller) -> None:
    """Find out what the command wants and whether it can be; sets direction, length and window.

    Raises Refusal.
    """
    sqe = request.sqe
    opcode = sqe.opcode
    if not controller.enabled:
        raise Refusal(Status.COMMAND_SEQUENCE_ERROR)
    if opcode == _FLUSH and sqe.nsid == BROADCAST_NSID:
        request.operation = Operation.FLUSH
        return
    namespace = controller.subsystem.namespaces.get(sqe.nsid)
    if namespace is None:
        # An opcode that does not exist is wrong whatever its namespace.
        raise Refusal(Status.INVALID_NAMESPACE if opcode in _BEGIN else Status.INVALID_OPCODE)
    if refusal := controller.path_refusal:
        raise Refusal(refusal, do_not_retry=False)
    if isinstance(namespace, KvNamespace):
        if not controller.all_command_sets:
            raise Refusal(Status.INVALID_NAMESPACE)
        begin_kv(request, namespace, controller)
        return
    if opcode not in _BEGIN:
        raise Refusal(Status.INVALID_OPCODE)
    request.namespace = namespace
    # The commonest two by their names: that is a call of machine code, through the table one of Python.
    if opcode == _READ:
        _begin_read(request, namespace, controller)
    elif opcode == _WRITE:
        _begin_write(request, namespace, controller)
    else:
        _BEGIN[opcode](request, namespace, controller)


def _range(request: Request, namespace: Namespace) -> int:
    """The byte length of the command's blocks; sets its offset. Raises Refusal."""
    sqe = request.sqe
    slba, blocks = sqe.slba, sqe.blocks
    if slba + blocks > namespace.block_count:
        raise Refusal(Status.LBA_OUT_OF_RANGE)
    request.offset = slba * namespace.lba_bytes
    return blocks * namespace.lba_bytes


def _transfer(
    request: Request,
    namespace: Namespace,
    controller: Controller,
    operation: Operation,
    direction: Direction,
    *,
    unknown_field: int = 0,
) -> None:
    """A command that moves its blocks: no more of them than MDTS allows, and no field that we do not know."""
    request.operation = operation  # first: an error is logged with its LBA where there is one
    length = _range(request, namespace)
    if length > controller.settings.max_transfer_bytes or unknown_field:
        raise Refusal(Status.INVALID_FIELD)
    request.direction, request.length = direction, length


def _begin_read(request: Request, namespace: Namespace, controller: Controller) -> None:
    _transfer(request, namespace, controller, Operation.READ, Direction.TO_HOST)


def _begin_write(request: Request, namespace: Namespace, controller: Controller) -> None:
    directive = request.sqe.cdw12 & _DIRECTIVE_TYPE
    _transfer(request, namespace, controller, Operation.WRITE, Direction.FROM_HOST, unknown_field=directive)


def _begin_compare(request: Request, namespace: Namespace, controller: Controller) -> None:
    _transfer(request, namespace, controller, Operation.COMPARE, Direction.FROM_HOST)


def _begin_write_zeroes(request: Request, namespace: Namespace, controller: Controller) -> None:
    # No data move, so MDTS does not bound it; 16 bits of block count do.
    request.operation = Operation.WRITE_ZEROES
    _range(request, namespace)


def _begin_flush(request: Request, namespace: Namespace, controller: Controller) -> None:
    request.operation = Operation.FLUSH


def _begin_dataset(request: Request, namespace: Namespace, controller: Controller) -> None:
    # A host may send a whole list of 256 entries however few it uses: Linux does, for the sake of drives that
    # read one regardless.
    length = max(_ranges_bytes(request), min(request.sqe.sgl.length, _MOST_RANGES_BYTES))
    request.operation = Operation.DEALLOCATE
    request.direction = Direction.FROM_HOST
    request.length = length
    request.window = memoryview(bytearray(length))


_BEGIN: Final[dict[int, Callable[[Request, Namespace, Controller], None]]] = {
    IoOpcode.FLUSH: _begin_flush,
    IoOpcode.WRITE: _begin_write,
    IoOpcode.READ: _begin_read,
    IoOpcode.COMPARE: _begin_compare,
    IoOpcode.WRITE_ZEROES: _begin_write_zeroes,
    IoOpcode.DATASET_MANAGEMENT: _begin_dataset,
}


def open_window(request: Request) -> None:
    """Name the place for the payload of a write, now that it is about to come."""
    if request.operation is Operation.WRITE and request.namespace is not None:
        request.window = request.namespace.storage.write_window(request.offset, request.length)
    elif request.kv is not None:
        open_kv_window(request, request.kv)


def accept_io(request: Request, offset: int, data: memoryview, scratch: Scratch) -> None:
    """`data` have arrived, `offset` bytes into the command; they are in `request.window` if it has one."""
    namespace = request.namespace
    if request.kv is not None:
        accept_kv(request, offset, data)
        return
    if namespace is None or request.status:
        return
    try:
        if request.operation is Operation.WRITE:
            placed = request.window is not None
            namespace.storage.write(request.offset + offset, data, placed=placed)
        elif request.operation is Operation.COMPARE:
            stored = namespace.storage.read(request.offset + offset, len(data), scratch)
            if stored != data:
                request.fail(Status.COMPARE_FAILURE)
    except StorageError as error:
        request.fail(error.status, do_not_retry=error.do_not_retry)


def execute_io(request: Request, controller: Controller, now: float, scratch: Scratch) -> Outcome:
    """Carry the command out, or say when. All its data are here. Raises Refusal and StorageError."""
    sqe, namespace, operation = request.sqe, request.namespace, request.operation
    assert operation is not None
    if refusal := controller.path_refusal:
        # While it waited, or its data came: the host is told that nothing of it happens any more.
        raise Refusal(refusal, do_not_retry=False)
    if request.kv is not None:
        if controller.subsystem.namespaces.get(request.kv.nsid) is not request.kv:
            raise Refusal(Status.INVALID_NAMESPACE)
        return execute_kv(request, request.kv, now, scratch)
    if namespace is None:
        for each in controller.subsystem.namespaces.values():
            each.storage.flush()
        return Outcome.DONE
    if controller.subsystem.namespaces.get(namespace.nsid) is not namespace:
        # It was removed while the command waited.
        raise Refusal(Status.INVALID_NAMESPACE)
    storage = namespace.storage
    if not request.admitted:
        request.admitted = True
        size = request.length or _zeroes_length(request, namespace)
        request.due = storage.admit(operation, request.offset, size, now)
    else:
        request.due = storage.held_until(now)
    if request.due > now:
        return Outcome.LATER
    if operation is Operation.READ:
        request.data = storage.read(request.offset, request.length, scratch)
        return Outcome.DONE
    match operation:
        case Operation.WRITE:
            if sqe.cdw12 & READ_WRITE_FUA:
                storage.flush()
        case Operation.FLUSH:
            storage.flush()
        case Operation.WRITE_ZEROES:
            deallocate = bool(sqe.cdw12 & WRITE_ZEROES_DEALLOCATE)
            length = _zeroes_length(request, namespace)
            storage.write_zeroes(request.offset, length, deallocate=deallocate)
        case Operation.DEALLOCATE:
            _deallocate(request, namespace)
        case _:
            pass  # Compare: piece by piece, as it arrived.
    return Outcome.DONE


def _zeroes_length(request: Request, namespace: Namespace) -> int:
    is_zeroes = request.operation is Operation.WRITE_ZEROES
    return request.sqe.blocks * namespace.lba_bytes if is_zeroes else 0


def _ranges_bytes(request: Request) -> int:
    return ((request.sqe.cdw10 & _RANGE_COUNT) + 1) * DATASET_RANGE.size


def _deallocate(request: Request, namespace: Namespace) -> None:
    """Dataset Management: the ranges are all checked before one is touched."""
    assert request.window is not None
    length = _ranges_bytes(request)
    try:
        ranges = decode_dataset_ranges_untrusted(request.window[:length])
    except MalformedPdu:
        raise Refusal(Status.INVALID_FIELD) from None
    if any(part.slba + part.blocks > namespace.block_count for part in ranges):
        raise Refusal(Status.LBA_OUT_OF_RANGE)
    if not request.sqe.cdw11 & DATASET_DEALLOCATE:
        return  # The other attributes are hints, and we take none.
    for part in ranges:
        if part.blocks:
            namespace.storage.deallocate(part.slba * namespace.lba_bytes, part.blocks * namespace.lba_bytes)
