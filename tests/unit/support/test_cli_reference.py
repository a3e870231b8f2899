"""The reference of the command line says what a user sees in the helps of the verbs."""

from __future__ import annotations

import re

import pytest

from tests.support.rungs import cli_reference


@pytest.fixture(scope="module")
def page() -> str:
    return cli_reference.reference()


def row(page: str, verb: str, option: str) -> str:
    """The line of an option of a verb."""
    section = page.split(f"\n## `g35 {verb}`\n")[1].split("\n## ")[0]
    [found] = re.findall(rf"^\| `{option}` .*$", section, re.MULTILINE)
    return found


def test_no_verb_has_options_for_the_completion_of_shells(page: str) -> None:
    assert "completion" not in page


@pytest.mark.parametrize(
    ("verb", "option", "default"),
    [
        ("enclosure show", "--configfs-root", "`/sys/kernel/config/nvmet`"),
        ("host", "--mount", "`/mnt/g35`"),
        ("lab run", "--folder", "the checkout"),
    ],
)
def test_a_folder_is_shown_unless_it_is_one_of_this_machine(
    page: str, verb: str, option: str, default: str
) -> None:
    assert row(page, verb, option).split(" | ")[1] == default


def test_choices_stand_there_once(page: str) -> None:
    assert "Choices: `aes-256-gcm`, `aes-256-xts+crc64`, `plain+crc64`." in row(page, "up", "--suite")
    assert "Choices" not in row(page, "up", "--transport"), "its help has a word on each"
    assert "Choices: `read`, `write`," in row(page, "jbof fault error", "--operation")
