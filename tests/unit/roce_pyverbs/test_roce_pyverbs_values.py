"""What of the stand-in needs no device: records, words, memory by its address; what cannot be imported."""

from __future__ import annotations

import errno
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from emulator.roce.nic.verbs import Address, AddressVector, VerbsError
from emulator.roce.pyverbs import MODULES, mem_alloc
from emulator.roce.pyverbs import cm_enums as ce
from emulator.roce.pyverbs import enums as e
from emulator.roce.pyverbs.addr import GID, AHAttr, GlobalRoute, sender_gid
from emulator.roce.pyverbs.base import inc_rkey
from emulator.roce.pyverbs.cmid import AddrInfo, ConnParam
from emulator.roce.pyverbs.cq import swapped
from emulator.roce.pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError, PyverbsUserError
from emulator.roce.pyverbs.qp import QPAttr, QPCap, QPInitAttr
from emulator.roce.pyverbs.utils import gid_str, gid_str_to_array
from emulator.roce.pyverbs.wr import SGE, RecvWR, SendWR

MAPPED = "0000:0000:0000:0000:0000:ffff:7f00:0002"


@pytest.mark.parametrize("how", ["ours.install()", "sys.modules['pyverbs'] = ours"])
def test_installed_it_is_pyverbs_for_who_imports_it(repository: Path, how: str) -> None:
    """In a process of its own, where a real pyverbs may be installed, too."""
    program = (
        "import sys, emulator.roce.pyverbs as ours\n"
        f"{how}\n"
        "import pyverbs, pyverbs.enums as e\n"
        "from pyverbs.qp import QP\n"
        "from pyverbs.pyverbs_error import PyverbsRDMAError\n"
        "import emulator.roce.pyverbs.qp as here\n"
        "assert pyverbs is ours and QP is here.QP and e.IBV_QPT_RC == 2\n"
        "assert here.__spec__.name == 'emulator.roce.pyverbs.qp'\n"
        f"for name in {MODULES!r}:\n"
        "    __import__('pyverbs.' + name)\n"
        "    assert sys.modules['pyverbs.' + name] is sys.modules['emulator.roce.pyverbs.' + name]\n"
        "for name in ('providers.mlx5.mlx5dv', 'dma_util'):\n"
        "    try:\n"
        "        __import__('pyverbs.' + name)\n"
        "    except ImportError as error:\n"
        "        assert 'emulated device' in str(error), error\n"
        "    else:\n"
        "        raise SystemExit(name)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=repository,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_an_error_says_its_number_in_words() -> None:
    error = PyverbsRDMAError("Failed to do it", errno.EINVAL)
    assert str(error) == "Failed to do it. Errno: 22, Invalid argument"
    assert error.error_code == errno.EINVAL
    assert PyverbsRDMAError("Without").error_code == -1
    assert issubclass(PyverbsUserError, PyverbsError)


@given(st.binary(min_size=16, max_size=16))
def test_gids_as_text_and_back(raw: bytes) -> None:
    text = raw.hex(":", 2)
    assert str(GID(text)) == text
    assert bytes.fromhex("".join(gid_str_to_array(text))) == raw
    assert gid_str(int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:], "little")) == text


@pytest.mark.parametrize("text", ["", "::1", "0" * 39, "0000:0000:0000:0000:0000:ffff:7f00", MAPPED + "0"])
def test_what_is_no_gid(text: str) -> None:
    with pytest.raises(PyverbsUserError):
        GID(text)


def test_an_address_vector_is_made_of_its_route() -> None:
    route = GlobalRoute(dgid=GID(MAPPED), flow_label=0xABCDE, hop_limit=9, traffic_class=32)
    attr = AHAttr(sl=3, is_global=1, gr=route)
    assert attr.vector() == AddressVector("127.0.0.2", 1, 0, 32, 0xABCDE, 9, 3)
    assert AHAttr.of(attr.vector()).dgid == MAPPED
    without = AHAttr()
    assert (without.dgid, without.hop_limit) == (None, None)
    with pytest.raises(VerbsError) as refused:
        without.vector()
    assert refused.value.errno == errno.EINVAL
    with pytest.raises(PyverbsUserError):
        AHAttr(is_global=1)


def test_the_sender_stands_in_the_bytes_before_a_datagram() -> None:
    over_ipv4 = (
        bytes(20) + bytes.fromhex("4500003c000040004011") + bytes(2) + bytes([10, 1, 2, 3, 10, 1, 2, 4])
    )
    assert sender_gid(over_ipv4) == bytes(10) + b"\xff\xff" + bytes([10, 1, 2, 3])
    over_ipv6 = bytes.fromhex("6000000000001b40") + bytes(range(16)) + bytes(16)
    assert sender_gid(over_ipv6) == bytes(range(16))


def test_attributes_give_and_take_copies() -> None:
    attr = QPAttr()
    cap = QPCap(1, 2, 3, 4, 5)
    attr.cap = cap
    cap.max_send_wr = 100
    attr.cap.max_recv_wr = 100
    assert (attr.cap.max_send_wr, attr.cap.max_recv_wr) == (1, 2)
    attr.ah_attr = AHAttr(dlid=1)
    attr.ah_attr.dlid = 2
    assert attr.ah_attr.dlid == 1
    initial = QPInitAttr(cap=QPCap(1, 2, 3, 4, 5))
    initial.max_inline_data = 6
    assert initial.cap.max_inline_data == 6
    with pytest.raises(PyverbsUserError):
        QPInitAttr(scq=cap)  # type: ignore[arg-type]  # what is refused


def test_a_request_to_send_needs_memory_except_for_keys() -> None:
    with pytest.raises(PyverbsUserError):
        SendWR()
    with pytest.raises(PyverbsUserError):
        SendWR(num_sge=1)
    assert SendWR(opcode=e.IBV_WR_LOCAL_INV, imm_data=0x1234).request().invalidate_rkey == 0x1234
    assert RecvWR().request().sges == ()


def test_a_request_that_was_handed_over_is_not_changed_any_more() -> None:
    wr = SendWR(1, e.IBV_WR_SEND_WITH_IMM, 2, 0x01020304, [SGE(10, 1, 7), SGE(20, 2, 7)])
    posted = wr.request()
    assert (posted.imm, [tuple(sge) for sge in posted.sges]) == (0x04030201, [(10, 1, 7), (20, 2, 7)])
    wr.wr_id, wr.num_sge, wr.opcode = 2, 1, e.IBV_WR_RDMA_WRITE
    wr.set_wr_rdma(5, 6)
    assert (posted.wr_id, len(posted.sges), posted.rkey) == (1, 2, 0)
    again = wr.request()
    assert (again.wr_id, len(again.sges), again.rkey, again.remote_address) == (2, 1, 5, 6)
    wr.send_flags = e.IBV_SEND_INLINE
    assert wr.request() is not wr.request()


@given(st.integers(0, 0xFFFFFFFF))
def test_numbers_that_are_turned_round_come_back(number: int) -> None:
    assert swapped(swapped(number)) == number
    assert inc_rkey(number) >> 8 == number >> 8
    assert inc_rkey(number) & 0xFF == (number + 1) & 0xFF


def test_memory_by_its_address() -> None:
    address = mem_alloc.posix_memalign(64, 4096)
    try:
        assert address % 4096 == 0
        assert mem_alloc.read(address, 64) == bytes(64)
        mem_alloc.write(address, "text", 4, 8)
        mem_alloc.writebe32(address, 0x01020304, 4)
        mem_alloc.writebe64(address, 0x0102030405060708, 3)
        assert mem_alloc.read(address, 4, 8) == b"text"
        assert mem_alloc.read32(address, 4) == 0x04030201
        assert mem_alloc.read64(address, 3) == 0x0807060504030201
    finally:
        mem_alloc.free(address)
    mapped = mem_alloc.mmap(length=4096)
    mem_alloc.munmap(mapped, 4096)
    with pytest.raises(MemoryError):
        mem_alloc.mmap(length=0)


def test_private_data_is_cut_to_the_room_that_was_asked_for() -> None:
    param = ConnParam(data_len=4)
    param.set_private_data(b"longer")
    assert param.private_data == b"long"
    without = ConnParam()
    without.set_private_data(b"lost")
    assert without.private_data == b""


def test_more_than_the_device_can_do_is_refused() -> None:
    assert ConnParam(resources=255, depth=255).parameters(2, 128).responder_resources == 128
    with pytest.raises(VerbsError):
        ConnParam(resources=129).parameters(2, 128)


def test_addresses_are_resolved_as_the_flags_say() -> None:
    passive = AddrInfo(src_service="4420", flags=ce.RAI_PASSIVE)
    assert passive.source == Address("0.0.0.0", 4420)
    active = AddrInfo(src="127.0.0.2", dst=b"127.0.0.3", dst_service="1", port_space=ce.RDMA_PS_TCP)
    assert (active.source, active.destination) == (Address("127.0.0.2", 0), Address("127.0.0.3", 1))
    for wrong in ({"dst": "no such name", "flags": ce.RAI_NUMERICHOST}, {}):
        with pytest.raises(PyverbsRDMAError):
            AddrInfo(**wrong)  # type: ignore[arg-type]  # of several types
