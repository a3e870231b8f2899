"""How often an agent looks for garbage."""

import gc

from agent.host_os.garbage import search_seldom


def test_garbage_is_searched_for_seldom_and_never_in_what_the_start_has_made() -> None:
    usual, frozen = gc.get_threshold(), gc.get_freeze_count()
    try:
        # A reader that an earlier test ran in this process has called it already.
        gc.set_threshold(700, *usual[1:])
        search_seldom()
        first, *others = gc.get_threshold()
        assert first > 700
        assert tuple(others) == usual[1:]
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual)
