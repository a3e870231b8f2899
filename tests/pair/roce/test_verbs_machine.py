"""Any sequence of verbs calls on two devices, against a model that is a few lists.

The model knows which moves are legal, what may be posted when, and which requests have not completed yet.
Whatever is called, the device must refuse exactly what the model refuses, complete each request once and in
order, write what a successful request says and nothing around it, and end in the state that the model is in.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from emulator.roce.nic.verbs import (
    Mtu,
    QpAttr,
    QpState,
    SendFlags,
    SendOpcode,
    VerbsError,
    WcStatus,
)
from tests.support.roce.ends import ALL_ACCESS, TO_INIT, TO_RTR, TO_RTS, End, Pair, attributes_for
from tests.support.roce.weather import CALM, Weather

S = QpState
DEPTH = 4
STEPS = {S.INIT: TO_INIT, S.RTR: TO_RTR, S.RTS: TO_RTS, S.RESET: QpAttr.STATE, S.ERR: QpAttr.STATE}
LEGAL = {
    S.RESET: {S.RESET, S.INIT},
    # The masks name all that the move from the state before needs; a move to itself takes less.
    S.INIT: {S.INIT, S.RTR, S.RESET, S.ERR},
    S.RTR: {S.RTS, S.RESET, S.ERR},
    S.RTS: {S.RESET, S.ERR},
    S.ERR: {S.RESET, S.ERR},
}
SENDS = (
    SendOpcode.RDMA_WRITE,
    SendOpcode.RDMA_READ,
    SendOpcode.SEND,
    SendOpcode.ATOMIC_FETCH_AND_ADD,
    SendOpcode.LOCAL_INV,
)
ends = st.sampled_from(["a", "b"])


@dataclass
class Model:
    """What an end should be like."""

    state: QpState = S.RTS
    sends: list[int] = field(default_factory=list)
    silent: set[int] = field(default_factory=set)
    """Sends that complete only if they fail."""
    receives: list[int] = field(default_factory=list)


class Machine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    @initialize(weather=st.sampled_from([CALM, Weather(loss=0.1, duplicate=0.1)]))
    def connect(self, weather: Weather) -> None:
        self.pair = Pair(8192, weather=weather, depth=DEPTH, changes={"path_mtu": Mtu.MTU_256})
        self.models = {"a": Model(), "b": Model()}

    def _end(self, name: str) -> tuple[End, End, Model]:
        a, b = self.pair.a, self.pair.b
        return (a, b, self.models["a"]) if name == "a" else (b, a, self.models["b"])

    @rule(name=ends, wanted=st.sampled_from(list(STEPS)))
    def move(self, name: str, wanted: QpState) -> None:
        end, peer, model = self._end(name)
        self._poll()
        attributes = attributes_for(end, peer, state=wanted)
        legal = wanted in LEGAL[model.state]
        try:
            end.qp.modify(attributes, STEPS[wanted])
        except VerbsError:
            assert not legal
            return
        assert legal
        model.state = wanted
        if wanted is S.RESET:
            model.sends.clear()
            model.silent.clear()
            model.receives.clear()

    @rule()
    def connect_again(self) -> None:
        for name in ("a", "b"):
            self.move(name, S.RESET)
        for name in ("a", "b"):
            for wanted in (S.INIT, S.RTR, S.RTS):
                self.move(name, wanted)

    @rule(
        name=ends,
        opcode=st.sampled_from(SENDS),
        size=st.integers(0, 2000),
        signaled=st.booleans(),
        wrong=st.sampled_from([None, None, None, "rkey", "lkey"]),
    )
    def send(self, name: str, opcode: SendOpcode, size: int, signaled: bool, wrong: str | None) -> None:
        end, peer, model = self._end(name)
        self.number += 1
        size = 8 if opcode is SendOpcode.ATOMIC_FETCH_AND_ADD else size
        sge = end.sge(0, size)
        rest = {"rkey": 5} if wrong == "rkey" else {}
        allowed = model.state in (S.RTS, S.ERR) and len(model.sends) < DEPTH
        try:
            end.post(
                opcode,
                sge._replace(lkey=5) if wrong == "lkey" else sge,
                wr_id=self.number,
                flags=SendFlags.SIGNALED if signaled else SendFlags(0),
                to=peer,
                at=4096,
                **rest,
            )
        except VerbsError:
            assert not allowed or model.silent
            return
        # Silent requests may have completed unseen, so a full queue is only certain without them.
        assert allowed or (model.silent and model.state in (S.RTS, S.ERR))
        model.sends.append(self.number)
        if not signaled:
            model.silent.add(self.number)

    @rule(name=ends)
    def receive(self, name: str) -> None:
        end, _, model = self._end(name)
        self.number += 1
        allowed = model.state is not S.RESET and (len(model.receives) < DEPTH or model.state is S.ERR)
        try:
            end.receive(end.sge(6144, 2048), wr_id=self.number)
        except VerbsError:
            assert not allowed
            return
        assert allowed
        model.receives.append(self.number)

    @rule(seconds=st.sampled_from([0.0, 20e-6, 1e-3, 0.5]))
    def run_network(self, seconds: float) -> None:
        self.pair.network.run(most_seconds=seconds)

    @rule(name=ends)
    def register_again(self, name: str) -> None:
        end, _, _ = self._end(name)
        end.nic.dereg_mr(end.region)
        end.region = end.nic.reg_mr(end.pd, end.memory.view, end.region.address, ALL_ACCESS)

    @rule()
    def poll(self) -> None:
        self._poll()

    def _poll(self) -> None:
        for name in ("a", "b"):
            end, _, model = self._end(name)
            for completion in end.polled():
                if completion.opcode & 128:
                    assert model.receives.pop(0) == completion.wr_id
                    continue
                # Silent ones before it have succeeded without a word.
                while model.sends[0] != completion.wr_id:
                    assert completion.status is not WcStatus.WR_FLUSH_ERR or model.sends[0] in model.silent
                    passed = model.sends.pop(0)
                    assert passed in model.silent, f"{passed} never completed"
                model.sends.pop(0)
                assert completion.wr_id not in model.silent or completion.status is not WcStatus.SUCCESS

    @invariant()
    def is_as_the_model_says(self) -> None:
        if not hasattr(self, "pair"):
            return
        for name in ("a", "b"):
            end, _, model = self._end(name)
            if end.qp.state is S.ERR and model.state in (S.RTR, S.RTS):
                # Something that was asked for failed: the peer is told by packets, and late.
                model.state = S.ERR
            assert end.qp.state is model.state
            assert end.memory.intact
            if model.state is S.ERR:
                self._poll()
                assert set(model.sends) <= model.silent
                model.sends.clear()
                assert not model.receives

    def teardown(self) -> None:
        if not hasattr(self, "pair"):
            return
        for name in ("a", "b"):
            if self.models[name].state is not S.RESET:
                self.move(name, S.ERR)
        self._poll()
        self.is_as_the_model_says()


TestVerbs = Machine.TestCase
TestVerbs.settings = settings(max_examples=80, stateful_step_count=30, deadline=None)
