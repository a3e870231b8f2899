"""Planner and executor against the enclosure's RPC, both real, with nothing but memory in between."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.enclosure_control.apply import ApplyFailed, apply, planned
from agent.enclosure_control.description import Description, parse_description
from agent.enclosure_control.plan import PlanConflict
from agent.enclosure_control.rpc_client import RpcClient
from agent.enclosure_control.rpc_errors import RpcError
from agent.enclosure_control.rpc_target import RpcTarget
from emulator.jbof.enclosure import Enclosure, EnclosureSettings
from emulator.jbof.rpc.dispatch import Dispatcher

NQNS = ("nqn.2026-01.io.g35:a", "nqn.2026-01.io.g35:b")


class InMemory(RpcClient):
    """Calls as JSON text to a dispatcher; `fuse` is how many more changes are carried out."""

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__(Path("nowhere"))
        self._dispatcher = dispatcher
        self.changes = 0
        self.fuse = 1 << 30

    def call(self, method: str, params: dict[str, Any] | None = None) -> Any:
        if "_get_" not in method:
            if self.fuse == 0:
                raise RpcError(method, -5, "Input/output error")
            self.fuse -= 1
            self.changes += 1
        request = {"jsonrpc": "2.0", "id": 1, "method": method, "params": params or {}}
        answer = json.loads(json.dumps(self._dispatcher.answer(json.loads(json.dumps(request)))))
        if "error" in answer:
            raise RpcError(method, answer["error"]["code"], answer["error"]["message"])
        return answer["result"]


@st.composite
def descriptions(draw: st.DrawFn) -> Description:
    """Without listeners and key files: those touch the machine."""
    subsystems: list[dict[str, Any]] = []
    names = draw(st.permutations("XYZ"))[: draw(st.integers(0, 3))]
    nguids = [nguid if draw(st.booleans()) else None for nguid in ("11" * 16, "22" * 16, "33" * 16)]
    free = list(zip(draw(st.permutations(range(1, 5))), names, nguids, strict=False))
    for nqn in draw(st.sets(st.sampled_from(NQNS))):
        anybody = draw(st.booleans())
        count = draw(st.integers(0, len(free)))
        spaces = [
            {"nsid": nsid, "bdev": bdev} | ({"nguid": nguid} if nguid else {})
            for nsid, bdev, nguid in free[:count]
        ]
        del free[:count]
        hosts = [{"nqn": f"nqn.{each}"} for each in draw(st.sets(st.sampled_from("pqr")))]
        subsystems.append(
            {"nqn": nqn, "serial": "S", "namespaces": spaces}
            | ({"allow_any_host": True} if anybody else {"hosts": hosts})
        )
    return parse_description(
        {
            "transports": [{"type": "tcp"}],
            "malloc": [{"name": name, "size": "64K"} for name in sorted(names)],
            "subsystems": subsystems,
        },
        "test",
    )


@given(before=descriptions(), after=descriptions(), prune=st.booleans(), fuse=st.integers(0, 12))
def test_from_any_state_to_any_other_also_when_it_breaks_half_way(
    before: Description, after: Description, prune: bool, fuse: int
) -> None:
    with Enclosure(EnclosureSettings(bare=True)) as enclosure:
        client = InMemory(Dispatcher(enclosure))
        target = RpcTarget(client)
        apply(target, before)
        client.fuse = fuse
        try:
            steps = planned(target, after, prune=prune).steps
        except PlanConflict:
            # A bdev is at a namespace that stays; what is not described goes with `prune` alone.
            assert not prune
            return
        if fuse < len(steps):
            with pytest.raises(ApplyFailed) as caught:
                apply(target, after, prune=prune)
            assert len(caught.value.done) == fuse
            assert (*caught.value.done, caught.value.failed, *caught.value.left) == steps
        else:
            assert apply(target, after, prune=prune).done == steps
        client.fuse = 1 << 30
        apply(target, after, prune=prune)
        client.changes = 0
        again = apply(target, after, prune=prune)
        assert (again.done, client.changes) == ((), 0)
        present = {each.nqn: each for each in target.read().subsystems}
        for wanted in after.subsystems:
            served = {each.nsid: (each.bdev, each.nguid) for each in present[wanted.nqn].namespaces}
            for space in wanted.namespaces:
                bdev, nguid = served[space.nsid]
                assert bdev == space.bdev
                assert space.nguid in (None, nguid)
            assert present[wanted.nqn].allow_any_host == wanted.allow_any_host
            let_in = {each.nqn for each in present[wanted.nqn].hosts}
            assert {each.nqn for each in wanted.hosts} <= let_in
            if prune:
                assert served.keys() == {each.nsid for each in wanted.namespaces}
        if prune:
            assert present.keys() == {each.nqn for each in after.subsystems}
            assert again.left_alone == ()
