"""The table of queue pair states, and what modify refuses."""

from __future__ import annotations

import errno
import random
from itertools import product

import pytest

from emulator.roce.nic.nic import Nic
from emulator.roce.nic.queue_pair import QueuePair
from emulator.roce.nic.states import MOVES, next_state
from emulator.roce.nic.verbs import (
    GSI_QPN,
    AddressVector,
    Mtu,
    QpAttr,
    QpAttributes,
    QpCapabilities,
    QpState,
    QpType,
    VerbsError,
)
from tests.support.roce.ends import TO_INIT, TO_RTR, TO_RTS

FROM_ANYWHERE = {QpState.RESET, QpState.ERR}


@pytest.mark.parametrize("kind", list(QpType))
def test_exactly_the_moves_of_the_table_are_legal(kind: QpType) -> None:
    for state, target in product(QpState, QpState):
        move = MOVES[kind].get((state, target))
        mask = QpAttr.STATE | (move.required if move else QpAttr(0))
        legal = move is not None or (
            target in FROM_ANYWHERE and (state, target) != (QpState.RESET, QpState.ERR)
        )
        if legal:
            assert next_state(kind, 5, state, mask, target, state) is target
        else:
            with pytest.raises(VerbsError, match="no move") as caught:
                next_state(kind, 5, state, mask, target, state)
            assert caught.value.errno == errno.EINVAL


@pytest.mark.parametrize("kind", list(QpType))
def test_what_a_move_needs_and_takes(kind: QpType) -> None:
    for (state, target), move in MOVES[kind].items():
        for flag in QpAttr:
            mask = QpAttr.STATE | move.required
            if flag in move.required:
                with pytest.raises(VerbsError, match="needs"):
                    next_state(kind, 5, state, mask & ~flag, target, state)
            elif flag in move.optional:
                next_state(kind, 5, state, mask | flag, target, state)
            elif flag not in (QpAttr.STATE, QpAttr.CUR_STATE):
                with pytest.raises(VerbsError, match="does not take"):
                    next_state(kind, 5, state, mask | flag, target, state)


def test_the_state_that_the_caller_believes_in() -> None:
    mask = QpAttr.STATE | QpAttr.CUR_STATE
    assert next_state(QpType.RC, 5, QpState.RTS, mask, QpState.RTS, QpState.RTS) is QpState.RTS
    with pytest.raises(VerbsError, match="is RTS, not SQD"):
        next_state(QpType.RC, 5, QpState.RTS, mask, QpState.RTS, QpState.SQD)


def test_without_the_state_attribute_it_stays() -> None:
    mask = QpAttr.MIN_RNR_TIMER
    assert next_state(QpType.RC, 5, QpState.RTS, mask, QpState.ERR, QpState.RTS) is QpState.RTS


def test_qp1_has_no_port_to_choose() -> None:
    mask = QpAttr.STATE | QpAttr.PKEY_INDEX | QpAttr.QKEY
    state = next_state(QpType.UD, GSI_QPN, QpState.RESET, mask, QpState.INIT, QpState.RESET)
    assert state is QpState.INIT
    with pytest.raises(VerbsError, match="needs PORT"):
        next_state(QpType.UD, 2, QpState.RESET, mask, QpState.INIT, QpState.RESET)


def _qp(mtu: int = 4096) -> QueuePair:
    nic = Nic("10.0.0.1", rng=random.Random(1), mtu=mtu)
    cq = nic.create_cq(1)
    return nic.create_qp(nic.alloc_pd(), QpType.RC, cq, cq, QpCapabilities())


@pytest.mark.parametrize(
    ("refused_at", "changes", "text"),
    [
        (QpState.INIT, {"port_num": 2}, "port"),
        (QpState.INIT, {"pkey_index": 1}, "pkey_index"),
        (QpState.RTR, {"av": None}, "address vector"),
        (QpState.RTR, {"av": AddressVector("host")}, "no way"),
        (QpState.RTR, {"av": AddressVector("fd00::1")}, "no way"),
        (QpState.RTR, {"av": AddressVector("10.0.0.2", sgid_index=1)}, "GID"),
        (QpState.RTR, {"path_mtu": 0}, "path MTU"),
        (QpState.RTR, {"path_mtu": Mtu.MTU_2048}, "path MTU"),
        (QpState.RTR, {"dest_qpn": 1 << 24}, "dest_qpn"),
        (QpState.RTR, {"max_dest_rd_atomic": 129}, "max_dest_rd_atomic"),
        (QpState.RTR, {"min_rnr_timer": 32}, "min_rnr_timer"),
        (QpState.RTS, {"timeout": 32}, "timeout"),
        (QpState.RTS, {"retry_count": 8}, "retry_count"),
        (QpState.RTS, {"rnr_retry": 8}, "rnr_retry"),
        (QpState.RTS, {"max_rd_atomic": 129}, "max_rd_atomic"),
    ],
)
def test_values_that_are_refused_change_nothing(
    refused_at: QpState, changes: dict[str, object], text: str
) -> None:
    qp = _qp(1024)
    values: dict[str, object] = {"av": AddressVector("10.0.0.2"), "path_mtu": Mtu.MTU_256, "port_num": 1}
    attributes = QpAttributes(**(values | changes))  # type: ignore[arg-type]
    for state, mask in ((QpState.INIT, TO_INIT), (QpState.RTR, TO_RTR), (QpState.RTS, TO_RTS)):
        attributes.state = state
        before = qp.query()
        if state is refused_at:
            break
        qp.modify(attributes, mask)
    with pytest.raises(VerbsError, match=text) as caught:
        qp.modify(attributes, mask)
    assert caught.value.errno == errno.EINVAL
    assert qp.query() == before


def test_query_gives_back_what_was_set() -> None:
    qp = _qp()
    attributes = QpAttributes(
        av=AddressVector("10.0.0.2", traffic_class=3),
        path_mtu=Mtu.MTU_1024,
        port_num=1,
        rq_psn=0x1ABCDEF,
        sq_psn=77,
        dest_qpn=9,
        timeout=14,
        retry_count=6,
        rnr_retry=5,
        max_rd_atomic=3,
        max_dest_rd_atomic=2,
        min_rnr_timer=12,
    )
    for state, mask in ((QpState.INIT, TO_INIT), (QpState.RTR, TO_RTR), (QpState.RTS, TO_RTS)):
        attributes.state = state
        qp.modify(attributes, mask)
    found = qp.query()
    assert found.state is found.current_state is QpState.RTS
    assert (found.rq_psn, found.sq_psn) == (0xABCDEF, 77)
    for name in ("av", "path_mtu", "dest_qpn", "timeout", "retry_count", "rnr_retry", "max_rd_atomic"):
        assert getattr(found, name) == getattr(attributes, name)
    qp.modify(QpAttributes(state=QpState.RESET), QpAttr.STATE)
    assert qp.query().av is None


def test_plain_numbers_are_as_good_as_enumerations() -> None:
    qp = _qp()
    attributes = QpAttributes(av=AddressVector("10.0.0.2"), path_mtu=3, port_num=1)  # type: ignore[arg-type]
    for state, mask in ((1, TO_INIT), (2, TO_RTR), (3, TO_RTS)):
        attributes.state = state  # type: ignore[assignment]
        qp.modify(attributes, QpAttr(int(mask)))
    assert qp.state is QpState.RTS
    assert qp.mtu == 1024
    with pytest.raises(VerbsError, match="9 is not a valid QpState"):
        next_state(QpType.RC, 5, QpState.RTS, QpAttr.STATE, 9, QpState.RTS)  # type: ignore[arg-type]
