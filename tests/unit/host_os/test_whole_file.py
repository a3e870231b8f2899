"""A file is written whole, or stays as it was."""

from pathlib import Path

import pytest

from agent.host_os.whole_file import write_whole


@pytest.mark.parametrize("durable", [False, True])
def test_the_text_takes_the_place_of_the_one_before(tmp_path: Path, durable: bool) -> None:
    file = tmp_path / "counts.json"
    for text in ("first\n", "the second\n"):
        write_whole(file, text, durable=durable)
        assert file.read_text() == text
    assert [each.name for each in tmp_path.iterdir()] == [file.name]


def test_a_file_that_cannot_be_written_stays_as_it_was(tmp_path: Path) -> None:
    file = tmp_path / "counts.json"
    write_whole(file, "first\n")
    (tmp_path / "counts.json.part").mkdir()  # nothing can be written under that name
    with pytest.raises(OSError):
        write_whole(file, "second\n")
    assert file.read_text() == "first\n"
