"""The states of queue pairs as a table: which moves are legal, and what each must and may set.

IBTA 10.3.1 and 11.2.5.2 (Modify Queue Pair); the kernel's `ib_modify_qp_is_ok` draws the same lines, and so
do all drivers that use it. Everything about legal moves is in this file, and nothing else is.
"""

import errno
from typing import Final, NamedTuple, TypeAlias

from emulator.roce.nic.verbs import GSI_QPN, QpAttr, QpState, QpType, VerbsError


class Move(NamedTuple):
    """What a modify call must name, and what it may name besides."""

    required: QpAttr = QpAttr(0)
    optional: QpAttr = QpAttr(0)


_NONE: Final = Move()
_S: Final = QpState
_A: Final = QpAttr

_RC_RTS_OPTIONAL: Final = _A.CUR_STATE | _A.ACCESS_FLAGS | _A.ALT_PATH | _A.PATH_MIG_STATE | _A.MIN_RNR_TIMER
_RELIABLE: Final = (
    _A.TIMEOUT | _A.RETRY_CNT | _A.RNR_RETRY | _A.MIN_RNR_TIMER | _A.MAX_QP_RD_ATOMIC | _A.MAX_DEST_RD_ATOMIC
)
"""What a pair without answers has no use for."""

_Moves: TypeAlias = dict[tuple[QpState, QpState], Move]

_RC_MOVES: Final[_Moves] = {
    (_S.RESET, _S.RESET): _NONE,
    (_S.RESET, _S.INIT): Move(_A.PKEY_INDEX | _A.PORT | _A.ACCESS_FLAGS),
    (_S.INIT, _S.INIT): Move(_A(0), _A.PKEY_INDEX | _A.PORT | _A.ACCESS_FLAGS),
    (_S.INIT, _S.RTR): Move(
        _A.AV | _A.PATH_MTU | _A.DEST_QPN | _A.RQ_PSN | _A.MAX_DEST_RD_ATOMIC | _A.MIN_RNR_TIMER,
        _A.ALT_PATH | _A.ACCESS_FLAGS | _A.PKEY_INDEX,
    ),
    (_S.RTR, _S.RTS): Move(
        _A.TIMEOUT | _A.RETRY_CNT | _A.RNR_RETRY | _A.SQ_PSN | _A.MAX_QP_RD_ATOMIC, _RC_RTS_OPTIONAL
    ),
    (_S.RTS, _S.RTS): Move(_A(0), _RC_RTS_OPTIONAL),
    (_S.RTS, _S.SQD): Move(_A(0), _A.EN_SQD_ASYNC_NOTIFY),
    (_S.SQD, _S.RTS): Move(_A(0), _RC_RTS_OPTIONAL),
    (_S.SQD, _S.SQD): Move(
        _A(0),
        _RELIABLE | _A.PORT | _A.AV | _A.ALT_PATH | _A.ACCESS_FLAGS | _A.PKEY_INDEX | _A.PATH_MIG_STATE,
    ),
}

MOVES: Final[dict[QpType, _Moves]] = {
    QpType.RC: _RC_MOVES,
    QpType.UC: {
        **{way: Move(m.required & ~_RELIABLE, m.optional & ~_RELIABLE) for way, m in _RC_MOVES.items()},
        (_S.SQD, _S.SQD): Move(
            _A(0), _A.AV | _A.ALT_PATH | _A.ACCESS_FLAGS | _A.PKEY_INDEX | _A.PATH_MIG_STATE
        ),
        (_S.SQE, _S.RTS): Move(_A(0), _A.CUR_STATE | _A.ACCESS_FLAGS),
    },
    QpType.UD: {
        (_S.RESET, _S.RESET): _NONE,
        (_S.RESET, _S.INIT): Move(_A.PKEY_INDEX | _A.PORT | _A.QKEY),
        (_S.INIT, _S.INIT): Move(_A(0), _A.PKEY_INDEX | _A.PORT | _A.QKEY),
        (_S.INIT, _S.RTR): Move(_A(0), _A.PKEY_INDEX | _A.QKEY),
        (_S.RTR, _S.RTS): Move(_A.SQ_PSN, _A.CUR_STATE | _A.QKEY),
        (_S.RTS, _S.RTS): Move(_A(0), _A.CUR_STATE | _A.QKEY),
        (_S.RTS, _S.SQD): Move(_A(0), _A.EN_SQD_ASYNC_NOTIFY),
        (_S.SQD, _S.RTS): Move(_A(0), _A.CUR_STATE | _A.QKEY),
        (_S.SQD, _S.SQD): Move(_A(0), _A.PKEY_INDEX | _A.QKEY),
        (_S.SQE, _S.RTS): Move(_A(0), _A.CUR_STATE | _A.QKEY),
    },
}
"""Moves to RESET and to ERR are not listed: they are legal from everywhere but ERR from RESET, and set
nothing else."""


def mask_to(kind: QpType, state: QpState) -> QpAttr:
    """What the move to INIT, RTR or RTS, from the state before it, must name."""
    return MOVES[kind][QpState(state - 1), state].required | QpAttr.STATE


_CURRENT: Final = frozenset({_S.RTR, _S.RTS, _S.SQD, _S.SQE})

MAY_POST_RECEIVE: Final = frozenset({_S.INIT, _S.RTR, _S.RTS, _S.SQD, _S.SQE, _S.ERR})
MAY_POST_SEND: Final = frozenset({_S.RTS, _S.SQD, _S.SQE, _S.ERR})
RECEIVING: Final = frozenset({_S.RTR, _S.RTS, _S.SQD, _S.SQE})
"""Packets that arrive in another state are dropped without an answer."""


def next_state(
    kind: QpType, number: int, state: QpState, mask: QpAttr, wanted: QpState, current: QpState
) -> QpState:
    """The state after a modify call with this mask. VerbsError(EINVAL) where it is not legal, saying why.

    `wanted` and `current` count where the mask names them; `current` is what the caller takes the state for.
    QP1 has no port to choose.
    """
    if mask & _A.CUR_STATE and (current not in _CURRENT or current != state):
        raise VerbsError(errno.EINVAL, f"the state is {state.name}, not {current.name}")
    try:
        target = QpState(wanted) if mask & _A.STATE else state
    except ValueError as error:
        raise VerbsError(errno.EINVAL, str(error)) from error
    if target in (_S.RESET, _S.ERR) and (state, target) != (_S.RESET, _S.ERR):
        move: Move | None = _NONE
    else:
        move = MOVES[kind].get((state, target))
    if move is None:
        raise VerbsError(errno.EINVAL, f"{kind.name}: no move from {state.name} to {target.name}")
    required = move.required & ~_A.PORT if number == GSI_QPN else move.required
    given = mask & ~_A.STATE
    if missing := required & ~given:
        raise VerbsError(errno.EINVAL, f"{state.name} to {target.name} needs {_names(missing)}")
    if excess := given & ~(move.required | move.optional):
        raise VerbsError(errno.EINVAL, f"{state.name} to {target.name} does not take {_names(excess)}")
    return target


def _names(mask: QpAttr) -> str:
    return ", ".join(flag.name or hex(flag) for flag in QpAttr if flag & mask) or hex(mask)
