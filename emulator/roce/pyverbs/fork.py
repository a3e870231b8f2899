"""`pyverbs.fork`. The device keeps no pages that a fork could take away: nothing is to be prepared."""

from emulator.roce.pyverbs import enums as e


def fork_init() -> None:
    """ibv_fork_init(3). The opened devices do not live on in a child: their threads stay with the parent."""


def is_fork_initialized() -> int:
    """An `ibv_fork_status`."""
    return e.IBV_FORK_UNNEEDED
