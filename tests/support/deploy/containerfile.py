"""Reading a container file: stages and instructions, as far as ours uses the language."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

WORDS = frozenset(
    {"FROM", "RUN", "COPY", "USER", "HEALTHCHECK", "STOPSIGNAL", "ENTRYPOINT", "CMD", "ENV", "WORKDIR"}
)


@dataclass(frozen=True, slots=True)
class Instruction:
    """One instruction, its continuation lines joined."""

    word: str
    rest: str

    def arguments(self) -> list[str]:
        """The words of a JSON array, as ENTRYPOINT and CMD are written."""
        found: list[str] = json.loads(self.rest)
        return found


@dataclass(slots=True)
class Stage:
    """What begins with a FROM."""

    base: str
    name: str
    instructions: list[Instruction] = field(default_factory=list)

    def all(self, word: str) -> list[Instruction]:
        return [each for each in self.instructions if each.word == word]

    def last(self, word: str) -> Instruction | None:
        return next((each for each in reversed(self.instructions) if each.word == word), None)


def parse(text: str) -> list[Stage]:
    """The stages. Raises ValueError for an instruction that is not in `WORDS`, or stands before a FROM."""
    lines = [line for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    joined = "\n".join(lines).replace("\\\n", " ")
    stages: list[Stage] = []
    for line in joined.splitlines():
        word, _, rest = line.strip().partition(" ")
        rest = " ".join(rest.split())
        if word not in WORDS:
            raise ValueError(f"an instruction that is not known here: {line}")
        if word == "FROM":
            base, _, name = rest.partition(" AS ")
            stages.append(Stage(base, name or str(len(stages))))
        elif not stages:
            raise ValueError(f"before any FROM: {line}")
        else:
            stages[-1].instructions.append(Instruction(word, rest))
    return stages
