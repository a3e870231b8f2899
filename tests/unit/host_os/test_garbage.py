"""How often an agent looks for garbage."""

import gc

from agent.host_os.garbage import search_seldom


def test_garbage_is_searched_for_seldom_and_never_in_what_the_start_has_made() -> None:
    usual, frozen = gc.get_threshold(), gc.get_freeze_count()
    try:
        search_seldom()
        first, *others = gc.get_threshold()
        assert first > usual[0]
        assert tuple(others) == usual[1:]
        assert gc.get_freeze_count() > frozen
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual)
