"""`pyverbs.wq`: work queues and receive side scaling. Attributes are records, the rest is refused."""

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Any, ClassVar

from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs.base import PyverbsCM, PyverbsObject, not_here
from emulator.roce.pyverbs.cq import CQ
from emulator.roce.pyverbs.device import Context
from emulator.roce.pyverbs.pd import PD
from emulator.roce.pyverbs.pyverbs_error import PyverbsUserError
from emulator.roce.pyverbs.wr import RecvWR


@dataclass(slots=True, eq=False)
class WQInitAttr(PyverbsObject):
    wq_context: object = None
    wq_pd: InitVar[PD | None] = None
    wq_cq: InitVar[CQ | None] = None
    wq_type: int = e.IBV_WQT_RQ
    max_wr: int = 100
    max_sge: int = 1
    comp_mask: int = 0
    create_flags: int = 0
    pd: PD | None = field(default=None, init=False)
    cq: CQ | None = field(default=None, init=False)

    def __post_init__(self, wq_pd: PD | None, wq_cq: CQ | None) -> None:
        self.pd, self.cq = wq_pd, wq_cq


@dataclass(slots=True, eq=False)
class WQAttr(PyverbsObject):
    attr_mask: int = 0
    wq_state: int = 0
    curr_wq_state: int = 0
    flags: int = 0
    flags_mask: int = 0


class WQ(PyverbsCM):
    """A work queue: refused with EOPNOTSUPP."""

    __slots__ = ()

    def __init__(self, ctx: Context, attr: WQInitAttr) -> None:
        raise not_here("WQ")

    def add_ref(self, obj: object) -> None:
        """There is no queue to hold it."""

    def modify(self, wq_attr: WQAttr) -> None:
        """There is no queue to change."""

    def post_recv(self, wr: RecvWR, bad_wr: RecvWR | None = None) -> None:
        """There is no queue to post to."""

    wqn: ClassVar[int] = 0
    """There is none."""


class RwqIndTableInitAttr(PyverbsObject):
    """struct ibv_rwq_ind_table_init_attr. PyverbsUserError where the queues do not fit into the table."""

    __slots__ = ("_comp_mask", "_log_size", "_wqs")

    def __init__(
        self, log_ind_tbl_size: int = 5, wqs_list: Sequence[WQ] | None = None, comp_mask: int = 0
    ) -> None:
        if log_ind_tbl_size <= 0:
            raise PyverbsUserError("Invalid indirection table size. Log size must be > 0")
        if wqs_list is None:
            raise TypeError("wqs_list is a list of WQs")
        if 1 << log_ind_tbl_size < len(wqs_list):
            raise PyverbsUserError(
                f"Requested table size ({1 << log_ind_tbl_size}) is smaller than the number of wqs "
                f"({len(wqs_list)})"
            )
        self._log_size = log_ind_tbl_size
        self._wqs = wqs_list
        self._comp_mask = comp_mask


class RwqIndTable(PyverbsCM):
    """An indirection table: refused with EOPNOTSUPP."""

    __slots__ = ()

    def __init__(self, ctx: Context, attr: RwqIndTableInitAttr) -> None:
        raise not_here("RwqIndTable")

    def add_ref(self, obj: object) -> None:
        """There is no table to hold it."""

    @property
    def wqs(self) -> list[WQ]:
        """There are none."""
        return []


class RxHashConf(PyverbsObject):
    """struct ibv_rx_hash_conf: how packets are spread."""

    __slots__ = ("_key_len", "rx_hash_fields_mask", "rx_hash_function", "rx_hash_key")

    def __init__(
        self,
        rx_hash_function: int = 0,
        rx_hash_key_len: int = 0,
        rx_hash_key: Any = None,
        rx_hash_fields_mask: int = 0,
    ) -> None:
        if rx_hash_key and rx_hash_key_len != len(rx_hash_key):
            raise PyverbsUserError("Length of rx_hash_key not equal to rx_hash_key_len")
        self.rx_hash_function = rx_hash_function
        self._key_len = rx_hash_key_len
        self.rx_hash_key: Any = rx_hash_key or 0
        self.rx_hash_fields_mask = rx_hash_fields_mask

    @property
    def rx_hash_key_len(self) -> int:
        return self._key_len

    @rx_hash_key_len.setter
    def rx_hash_key_len(self, val: int) -> None:
        if val <= 0:
            raise PyverbsUserError("Invalid rx_hash_key_len. Must be greater then 0")
        self._key_len = val
