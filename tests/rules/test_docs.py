"""What the documents say can be typed, and what can be typed is documented."""

from __future__ import annotations

import io
import itertools
import re
import shlex
from contextlib import redirect_stdout
from pathlib import Path

import pytest
from typer.exceptions import TyperException

from agent.pool.counters import MissCause
from agent.pool.read.prestage_cache import PrestageCache
from agent.remote.enclosure import Enclosure
from agent.remote.fabric import Fabric
from agent.telemetry import metrics, snapshot
from tests.support.pool.memory_pool import MemoryPool
from tests.support.rungs import cli_reference, state_tables
from tests.support.rungs.tree import text_files

_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_SHELLS = ("", "sh", "bash", "console", "shell")
_LINK = re.compile(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)")
_CODE = re.compile(r"^```.*?^```$|`[^`\n]*`", re.MULTILINE | re.DOTALL)
_HEADING = re.compile(r"^#+ +(.*)$", re.MULTILINE)


def _pages(repository: Path) -> dict[str, str]:
    return {name: text for name, text in text_files(repository) if name.endswith(".md")}


def _typed_lines(text: str) -> list[list[str]]:
    """The words of every command in the shell blocks of a page; what a prompt shows is not output."""
    lines = []
    for language, block in _BLOCK.findall(text):
        if language not in _SHELLS:
            continue
        joined = block.replace("\\\n", " ")
        has_prompt = any(line.startswith("$ ") for line in joined.splitlines())
        for line in joined.splitlines():
            if has_prompt and not line.startswith("$ "):
                continue
            # Three spaces and more set off a remark in a second column.
            typed = re.split(r" {3,}", line.removeprefix("$ ").strip())[0]
            try:
                words = shlex.split(typed, comments=True)
            except ValueError:
                continue
            if words:
                lines.append(words)
    return lines


def _commands(repository: Path) -> list[tuple[str, list[str]]]:
    return [(name, words) for name, text in _pages(repository).items() for words in _typed_lines(text)]


def test_typed_lines_are_those_of_shell_blocks() -> None:
    page = "```python\nmake = 1\n```\nmake prose\n```sh\nmake one\n```\ng35 prose\n```\n$ g35 two\nout\n```\n"
    assert _typed_lines(page) == [["make", "one"], ["g35", "two"]]


def test_every_make_verb_in_a_document_exists(repository: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", (repository / "Makefile").read_text(), re.MULTILINE))
    wrong = [
        (page, words)
        for page, words in _commands(repository)
        if words[0] == "make"
        for word in words[1:]
        if "=" not in word and not word.startswith("-") and word not in targets
    ]
    assert not wrong


def test_every_g35_command_in_a_document_parses(repository: Path) -> None:
    """Its values and what it requires, too: as if it was typed, but that nothing is done then."""
    known = {tuple(words.split()): command for words, command in cli_reference.verbs()}
    wrong = []
    for page, words in _commands(repository):
        program, *rest = [word for word in words if not re.match("[A-Z0-9_]+=", word)] or [""]
        if program.rpartition("/")[2] != "g35" or not rest:
            continue
        rest = list(itertools.takewhile(lambda word: word not in ("|", ">"), rest))
        verb: tuple[str, ...] = ()
        while rest and (*verb, rest[0]) in known:
            verb = (*verb, rest.pop(0))
        try:
            known[verb].make_context("g35", rest)
        except KeyError:
            wrong.append(f"{page}: {shlex.join(words)}: no such verb")
        except TyperException as refused:
            wrong.append(f"{page}: {shlex.join(words)}: {refused}")
    assert not wrong


def _anchors(text: str) -> set[str]:
    """Of the headings, as GitHub makes them: small letters, hyphens for spaces, no other signs. A second of
    the same words gets a number."""
    found: dict[str, int] = {}
    for heading in _HEADING.findall(re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)):
        words = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
        anchor = re.sub(r"[^\w\- ]", "", words).replace(" ", "-")
        times = found[anchor] = found.get(anchor, -1) + 1
        if times:
            found[f"{anchor}-{times}"] = 0
    return set(found)


def _dead_links(page: Path, text: str) -> list[str]:
    dead = []
    for target, anchor in _LINK.findall(_CODE.sub("", text)):
        if "://" in target or target.startswith("mailto:"):
            continue
        path = page.parent / target if target else page
        if not path.exists():
            dead.append(target)
        elif anchor and path.suffix == ".md" and anchor not in _anchors(path.read_text(encoding="utf-8")):
            dead.append(f"{target}#{anchor}")
    return dead


def test_links_between_documents_lead_somewhere(repository: Path) -> None:
    dead = {page: _dead_links(repository / page, text) for page, text in _pages(repository).items()}
    assert not {page: targets for page, targets in dead.items() if targets}


def test_a_dead_anchor_is_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# One `two`, three\n\n## Again\n\n## Again\n\n```\n# no heading\n```\n")
    assert not _dead_links(page, "[a](#one-two-three) [b](page.md#again-1) `[c](no.md)`")
    assert _dead_links(page, "[a](#no-heading) [b](page.md#again-2) [c](no.md)") == [
        "#no-heading",
        "page.md#again-2",
        "no.md",
    ]


def test_every_decision_is_in_the_list(repository: Path) -> None:
    listed = (repository / "docs/README.md").read_text(encoding="utf-8")
    decisions = [each.name for each in (repository / "docs/decisions").glob("*.md")]
    assert [name for name in decisions if f"(decisions/{name})" not in listed] == []


def test_the_reference_of_the_command_line_is_what_the_verbs_say(repository: Path) -> None:
    page = (repository / "docs/reference/cli.md").read_text()
    assert page == cli_reference.reference(), (
        "make it anew: python -m tests.support.rungs.cli_reference > docs/reference/cli.md"
    )


def test_every_option_of_a_verb_has_a_help() -> None:
    assert not [
        f"{words} {spelling}"
        for words, command in cli_reference.verbs()
        for spelling, parameter in cli_reference.options_of(command)
        if not parameter.help
    ]


def test_the_reference_of_states_is_what_the_tables_say(repository: Path) -> None:
    page = (repository / "docs/reference/states.md").read_text()
    assert page == state_tables.reference(), (
        "make it anew: python -m tests.support.rungs.state_tables > docs/reference/states.md"
    )


def test_the_reference_of_the_configuration_is_what_the_program_reads(repository: Path) -> None:
    from agent.cli.main import main

    shown = io.StringIO()
    with redirect_stdout(shown), pytest.raises(SystemExit) as ended:
        main(["config", "reference"])
    assert ended.value.code == 0
    page = (repository / "docs/reference/configuration.md").read_text()
    assert page == shown.getvalue(), "make it anew: g35 config reference > docs/reference/configuration.md"


@pytest.mark.parametrize(
    "page",
    [
        "README.md", "CHANGELOG.md", "LICENSE", "docs/architecture.md", "docs/a_read_in_order.md",
        "docs/security.md", "docs/concurrency.md", "docs/reference/cli.md",
        "docs/reference/configuration.md", "docs/reference/metrics.md",
    ],
)  # fmt: skip
def test_the_documents_are_there(repository: Path, page: str) -> None:
    assert (repository / page).is_file()


def test_the_metrics_are_documented_each_as_its_kind(repository: Path) -> None:
    """What an agent with a volume and an enclosure exports, against the tables of the page."""
    enclosure = Enclosure("shelf")
    agent = MemoryPool().agent()
    sources = snapshot.Sources(
        pool_id="pool", map_version=lambda: 1, mount="/mnt", door="fuse", volumes=[agent.volume],
        fabric=Fabric([enclosure]), directories=agent.cache, prestage=PrestageCache(1 << 20),
        tallies=lambda: [agent.channel.tallies], files=lambda: None,
    )  # fmt: skip
    exported = {
        family.name: family.type for family in metrics.Collector(lambda: snapshot.take(sources)).collect()
    }
    page = (repository / "docs/reference/metrics.md").read_text()
    documented = dict(re.findall(r"^\| `(g35_\w+)` \| (\w+) \|", page, re.MULTILINE))
    assert documented == exported
    assert all(f"`{cause.name.lower()}`" in page for cause in MissCause)


def test_make_help_lists_every_verb(repository: Path) -> None:
    makefile = (repository / "Makefile").read_text()
    listed = set(re.findall(r"^([a-z0-9-]+):.*## ", makefile, re.MULTILINE))
    assert listed >= set(
        ["setup", "run", "test", "bench", "lab", "help", "fmt", "lint", "types", "clean", "wheels"]
    )
