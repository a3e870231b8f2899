"""An agent of several processes, scripted: what host_shim asks each of them."""

from __future__ import annotations

from host_shim.control_wire import Operation
from tests.support.engines.scripted_agent import PlainFiles, ScriptedAgent


class SeveralProcesses(PlainFiles):
    """An agent and its readers, of which each is a scripted agent with the values of the first."""

    def __init__(self, readers: int) -> None:
        self.all = [ScriptedAgent() for _ in range(readers + 1)]
        self.first = self.all[0]
        for each in self.all:
            each.values = self.first.values
        self.looks = 0

    def _of(self, descriptor: int) -> tuple[ScriptedAgent, int]:
        return self.all[descriptor // 100_000], descriptor % 100_000

    def processes(self, folder: str) -> list[str]:
        assert folder == "/mnt/.g35"
        self.looks += 1
        return [f"process-{number}" for number in range(1, len(self.all))]

    def open(self, path: str) -> int:
        number = int(path.split("process-")[1].split("/")[0]) if "process-" in path else 0
        return number * 100_000 + self.all[number].open(path)

    def close(self, descriptor: int) -> None:
        agent, own = self._of(descriptor)
        agent.close(own)

    def pwrite(self, descriptor: int, data: bytes | memoryview, offset: int) -> int:
        agent, own = self._of(descriptor)
        return agent.pwrite(own, data, offset)

    def preadv(self, descriptor: int, into: memoryview, offset: int) -> int:
        agent, own = self._of(descriptor)
        return agent.preadv(own, into, offset)

    def gets(self) -> list[int]:
        """How many keys each was asked for to get."""
        return [
            sum(len(each.keys) for each in agent.requests if each.operation is Operation.GET)
            for agent in self.all
        ]

    def asked(self, operation: Operation) -> list[int]:
        return [sum(each.operation is operation for each in agent.requests) for agent in self.all]
