"""docs/claims.md shows what the command computes."""

from tests.support.rungs.claims_page import MADE, OF_TRACE, PAGE, PICTURES, names_in, page_with


def test_the_tables_of_the_page_are_what_is_computed() -> None:
    text = PAGE.read_text()
    assert names_in(text) == {*MADE, *OF_TRACE}
    made = {name: table() for name, table in MADE.items()}
    assert page_with(text, made) == text, "make claims"


def test_the_plots_of_the_page_are_there() -> None:
    text = PAGE.read_text()
    assert len(list(PICTURES.iterdir())) == 6
    assert all(f"pictures/claims/{path.name}" in text for path in PICTURES.iterdir())
