"""Each verb refused as libibverbs refuses it, and the device's own small parts."""

from __future__ import annotations

import errno
import random
from collections.abc import Callable

import pytest

from emulator.roce.nic.completion import CompletionQueue
from emulator.roce.nic.nic import Nic
from emulator.roce.nic.retry import PROBE_S, Due, RetryClock
from emulator.roce.nic.verbs import (
    AddressVector,
    Limits,
    Mtu,
    MwType,
    QpAttributes,
    QpCapabilities,
    QpState,
    QpType,
    SendFlags,
    SendOpcode,
    Sge,
    SrqAttr,
    VerbsError,
    WcOpcode,
    WcStatus,
    WorkCompletion,
)
from emulator.roce.nic.work_requests import ReceiveRequest, SendRequest
from tests.support.roce.ends import ALL_ACCESS, Pair

SMALL = Limits(
    max_qp=1, max_cq=1, max_cqe=8, max_pd=2, max_ah=1, max_srq=1, max_qp_wr=16, max_sge=4, max_inline_data=64
)


def _nic() -> Nic:
    return Nic("10.0.0.1", rng=random.Random(3), limits=SMALL)


def _refused(number: int, call: Callable[[], object]) -> None:
    with pytest.raises(VerbsError) as caught:
        call()
    assert caught.value.errno == number, caught.value


def test_what_is_used_cannot_go() -> None:
    nic = _nic()
    pd, cq = nic.alloc_pd(), nic.create_cq(4)
    srq = nic.create_srq(pd, 4, 1)
    qp = nic.create_qp(pd, QpType.RC, cq, cq, QpCapabilities(), srq=srq)
    ah = nic.create_ah(pd, AddressVector("10.0.0.2"))
    region = nic.reg_mr(pd, bytearray(8), 0, ALL_ACCESS)
    window = nic.alloc_mw(pd, MwType.TYPE_2)
    for call in (lambda: nic.destroy_cq(cq), lambda: nic.destroy_srq(srq), lambda: nic.dealloc_pd(pd)):
        _refused(errno.EBUSY, call)
    nic.destroy_qp(qp)
    nic.destroy_cq(cq)
    nic.destroy_srq(srq)
    _refused(errno.EBUSY, lambda: nic.dealloc_pd(pd))
    nic.destroy_ah(ah)
    nic.dereg_mr(region)
    nic.dealloc_mw(window)
    nic.dealloc_pd(pd)
    for again in (
        lambda: nic.destroy_qp(qp),
        lambda: nic.destroy_cq(cq),
        lambda: nic.destroy_srq(srq),
        lambda: nic.destroy_ah(ah),
        lambda: nic.dereg_mr(region),
        lambda: nic.dealloc_mw(window),
        lambda: nic.dealloc_pd(pd),
        lambda: nic.reg_mr(pd, bytearray(8), 0, ALL_ACCESS),
        lambda: nic.alloc_mw(pd, MwType.TYPE_1),
    ):
        _refused(errno.EINVAL, again)


def test_tables_are_bounded() -> None:
    nic = _nic()
    pd, cq = nic.alloc_pd(), nic.create_cq(4)
    nic.alloc_pd()
    nic.create_srq(pd, 4, 1)
    nic.create_qp(pd, QpType.RC, cq, cq, QpCapabilities())
    nic.create_ah(pd, AddressVector("10.0.0.2"))
    for call in (
        nic.alloc_pd,
        lambda: nic.create_cq(4),
        lambda: nic.create_srq(pd, 4, 1),
        lambda: nic.create_qp(pd, QpType.RC, cq, cq, QpCapabilities()),
        lambda: nic.create_ah(pd, AddressVector("10.0.0.2")),
    ):
        _refused(errno.ENOMEM, call)


def test_sizes_that_are_refused() -> None:
    nic = _nic()
    pd, cq = nic.alloc_pd(), nic.create_cq(8)
    for entries in (0, 9):
        _refused(errno.EINVAL, lambda entries=entries: nic.create_cq(entries))
        _refused(errno.EINVAL, lambda entries=entries: cq.resize(entries))
    for caps in (
        QpCapabilities(max_send_wr=17),
        QpCapabilities(max_recv_wr=17),
        QpCapabilities(max_send_sge=5),
        QpCapabilities(max_recv_sge=5),
        QpCapabilities(max_inline_data=65),
    ):
        _refused(errno.EINVAL, lambda caps=caps: nic.create_qp(pd, QpType.RC, cq, cq, caps))
    _refused(errno.EOPNOTSUPP, lambda: nic.create_qp(pd, 9, cq, cq, QpCapabilities()))  # type: ignore
    for size, sges, limit in ((0, 1, 0), (1, 33, 0), (1, 1, 2), (1 << 20, 1, 0)):
        _refused(errno.EINVAL, lambda a=size, b=sges, c=limit: nic.create_srq(pd, a, b, c))
    srq = nic.create_srq(pd, 4, 1)
    for _ in range(2):
        srq.post_recv(ReceiveRequest())
    _refused(errno.EINVAL, lambda: srq.modify(SrqAttr.MAX_WR, max_wr=1))
    _refused(errno.EINVAL, lambda: srq.modify(SrqAttr.LIMIT, limit=5))
    srq.modify(SrqAttr.MAX_WR | SrqAttr.LIMIT, max_wr=2, limit=1)
    _refused(errno.ENOMEM, lambda: srq.post_recv(ReceiveRequest()))
    for av in (AddressVector("fd00::1"), AddressVector("x"), AddressVector("10.0.0.2", port_num=2)):
        _refused(errno.EINVAL, lambda av=av: nic.create_ah(pd, av))


@pytest.mark.parametrize("state", list(QpState)[:3])
def test_posting_too_early(state: QpState) -> None:
    nic = _nic()
    pd, cq = nic.alloc_pd(), nic.create_cq(8)
    qp = nic.create_qp(pd, QpType.RC, cq, cq, QpCapabilities())
    qp.state = state
    _refused(errno.EINVAL, lambda: qp.post_send(SendRequest()))
    if state is QpState.RESET:
        _refused(errno.EINVAL, lambda: qp.post_recv(ReceiveRequest()))
    else:
        qp.post_recv(ReceiveRequest())


def test_requests_that_make_no_sense() -> None:
    pair = Pair(depth=2)
    a = pair.a
    wrong = [
        SendRequest(sges=(a.sge(0, 1),) * 5),
        SendRequest(sges=(Sge(0, 1 << 31, 1), Sge(0, 1, 1))),
        SendRequest(flags=SendFlags.INLINE, sges=(a.sge(0, 257),)),
        SendRequest(flags=SendFlags.INLINE, sges=(Sge(0, 8, 1),)),
        SendRequest(flags=SendFlags.INLINE, opcode=SendOpcode.RDMA_READ, inline=b""),
        SendRequest(inline=b"without the flag"),
        SendRequest(opcode=SendOpcode.ATOMIC_FETCH_AND_ADD, sges=(a.sge(0, 4),)),
        SendRequest(opcode=SendOpcode.BIND_MW),
        SendRequest(opcode=10),  # type: ignore[arg-type]
    ]
    for request in wrong:
        _refused(errno.EINVAL, lambda request=request: a.qp.post_send(request))
    _refused(errno.EINVAL, lambda: a.receive(*(a.sge(0, 1),) * 5))
    for _ in range(2):
        a.receive()
        a.post(SendOpcode.SEND)
    _refused(errno.ENOMEM, a.receive)
    _refused(errno.ENOMEM, lambda: a.post(SendOpcode.SEND))
    assert len(a.cq) == 0


def test_a_shared_queue_takes_the_place_of_ones_own() -> None:
    pair = Pair(srq=True)
    _refused(errno.EINVAL, pair.a.receive)


def test_datagrams_need_an_address_of_their_domain() -> None:
    nic = _nic()
    pd, cq = nic.alloc_pd(), nic.create_cq(8)
    qp = nic.create_qp(pd, QpType.UD, cq, cq, QpCapabilities())
    qp.state = QpState.RTS
    other = nic.create_ah(nic.alloc_pd(), AddressVector("10.0.0.2"))
    _refused(errno.EINVAL, lambda: qp.post_send(SendRequest()))
    _refused(errno.EINVAL, lambda: qp.post_send(SendRequest(ah=other)))
    _refused(errno.EINVAL, lambda: qp.post_send(SendRequest(opcode=SendOpcode.RDMA_WRITE)))


def test_close_lets_go_of_everything() -> None:
    pair = Pair()
    pair.a.post(SendOpcode.SEND)
    pair.a.nic.close()
    assert pair.a.region.view is None
    assert not pair.a.nic.ready
    assert pair.a.nic.deadline() is None
    pair.a.nic.receive(memoryview(b"\0" * 64), 64, ("10.0.0.2", 4791), 0.0)


def _completion(status: WcStatus = WcStatus.SUCCESS) -> WorkCompletion:
    return WorkCompletion(1, status, WcOpcode.RECV, 5)


@pytest.mark.parametrize(
    ("solicited_only", "pushes", "fires"),
    [
        (False, [(WcStatus.SUCCESS, False)], 1),
        (True, [(WcStatus.SUCCESS, False)], 0),
        (True, [(WcStatus.SUCCESS, True)], 1),
        (True, [(WcStatus.WR_FLUSH_ERR, False)], 1),
        (False, [(WcStatus.SUCCESS, False)] * 3, 1),
    ],
)
def test_a_queue_fires_once_for_each_arm(
    solicited_only: bool, pushes: list[tuple[WcStatus, bool]], fires: int
) -> None:
    cq = CompletionQueue(8, 8, lambda _: None)
    fired: list[int] = []
    cq.on_completion = lambda queue: fired.append(len(queue))
    cq.push(_completion())
    cq.arm(solicited_only)
    assert not fired
    for status, solicited in pushes:
        cq.push(_completion(status), solicited)
    assert len(fired) == fires


def test_to_arm_for_all_lasts_for_one_event() -> None:
    cq = CompletionQueue(8, 8, lambda _: None)
    fired: list[int] = []
    cq.on_completion = lambda queue: fired.append(len(queue))
    cq.arm()
    cq.push(_completion())
    cq.arm(solicited_only=True)
    cq.push(_completion())
    assert fired == [1]


def test_poll_gives_no_more_than_asked_for_oldest_first() -> None:
    cq = CompletionQueue(8, 8, lambda _: None)
    for number in range(5):
        cq.push(WorkCompletion(number, WcStatus.SUCCESS, WcOpcode.SEND, 1))
    assert [c.wr_id for c in cq.poll(2)] == [0, 1]
    assert [c.wr_id for c in cq.poll(10)] == [2, 3, 4]
    assert cq.poll() == []


def test_the_retry_clock_probes_early_and_gives_up_late() -> None:
    # Code 17 is 0.537 s (IBTA 9.7.6.1); early repeats come after 20, 40, 80, ... ms.
    clock = RetryClock(QpAttributes(timeout=17, retry_count=1))
    clock.restart(0.0)
    seen: list[tuple[Due, float]] = []
    while len(seen) < 8:
        assert clock.deadline is not None
        now = clock.deadline
        assert clock.advance(now - 1e-9) is Due.NOTHING
        seen.append((clock.advance(now), now))
    probes = [round(at / PROBE_S) for due, at in seen[:4] if due is Due.PROBE]
    assert probes == [1, 3, 7, 15]
    timeouts = [at for due, at in seen if due is Due.TIMEOUT]
    assert timeouts[0] == pytest.approx(4.096e-6 * (1 << 17))
    assert clock.take_retry()
    assert not clock.take_retry()
    clock.forget_failures()
    assert clock.take_retry()


def test_a_time_out_of_zero_never_gives_up() -> None:
    clock = RetryClock(QpAttributes(timeout=0))
    clock.restart(0.0)
    for _ in range(30):
        assert clock.deadline is not None
        assert clock.advance(clock.deadline) is Due.PROBE


@pytest.mark.parametrize(
    ("size", "mtu"), [(256, Mtu.MTU_256), (1500, Mtu.MTU_1024), (4096, Mtu.MTU_4096), (9000, Mtu.MTU_4096)]
)
def test_the_largest_mtu_that_fits(size: int, mtu: Mtu) -> None:
    assert Mtu.of(size) is mtu


def test_no_mtu_below_256() -> None:
    with pytest.raises(ValueError, match="255"):
        Mtu.of(255)
