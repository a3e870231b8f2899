"""What no device here has: its attributes are records, as in pyverbs, and the objects are refused."""

from __future__ import annotations

import ctypes
import errno
import importlib

import pytest

from emulator.roce.pyverbs.flow import FlowAttr
from emulator.roce.pyverbs.pyverbs_error import PyverbsError, PyverbsRDMAError, PyverbsUserError
from emulator.roce.pyverbs.spec import EthSpec, Ipv4ExtSpec, Ipv6Spec, Spec, TcpUdpSpec
from emulator.roce.pyverbs.wq import RwqIndTableInitAttr, RxHashConf, WQInitAttr
from emulator.roce.pyverbs.xrcd import XRCDInitAttr


@pytest.mark.parametrize(
    ("module", "kind", "arguments"),
    [
        ("xrcd", "XRCD", (None, XRCDInitAttr(3, 0, -1))),
        ("wq", "WQ", (None, WQInitAttr())),
        ("wq", "RwqIndTable", (None, RwqIndTableInitAttr(1, []))),
        ("flow", "Flow", (None, FlowAttr(num_of_specs=1))),
        ("dmabuf", "DmaBuf", (4096,)),
    ],
)
def test_what_no_device_has_can_be_described_and_not_made(
    module: str, kind: str, arguments: tuple[object, ...]
) -> None:
    refused = getattr(importlib.import_module(f"emulator.roce.pyverbs.{module}"), kind)
    with pytest.raises(PyverbsRDMAError) as error:
        refused(*arguments)
    assert error.value.error_code == errno.EOPNOTSUPP


SPECS = [
    (
        EthSpec("aa:bb:12:13:14:fe", "ff:ff:ff:01:02:03", "12:34:56:78:9a:bc", None, 0x8100, None, 0x123,
                0xFFF, 1),
        "200100002800aabb121314fe123456789abc81000123ffffff010203ffffffffffffffff0fff0000",
    ),
    (
        Ipv4ExtSpec("1.2.3.4", "255.255.255.0", "5.6.7.8", None, 17, None, 2, 3, 64, None, 1, None),
        "3200000020000000050607080102030411024001ffffffffffffff00ff03ffff",
    ),
    (TcpUdpSpec(65, 0x1234, None, 0x5678, 0xFF0F, True), "41010000100012345678ffffff0f0000"),
    (
        Ipv6Spec("a0a1::a2a3", "ffff::", "fe80::1", None, 0xABCDE, None, 6, None, 7, 0x70, 64, None),
        "3100000058000000fe800000000000000000000000000001a0a1000000000000000000000000a2a3000abcde06074000"
        "ffffffffffffffffffffffffffffffffffff0000000000000000000000000000000fffffff70ff00",
    ),
]  # fmt: skip
"""What Debian's pyverbs 44 makes of the same arguments (`_copy_data` on x86-64)."""


@pytest.mark.parametrize(("spec", "structure"), SPECS, ids=lambda value: type(value).__name__)
def test_what_packets_a_rule_is_about_is_the_structure_of_pyverbs(spec: Spec, structure: str) -> None:
    room = ctypes.create_string_buffer(spec.size + 1)
    room[spec.size] = b"x"
    spec._copy_data(ctypes.addressof(room))
    assert room.raw == bytes.fromhex(structure) + b"x"


def test_a_record_of_a_rule_is_read_and_changed() -> None:
    spec = EthSpec(dst_mac="01:02:03:04:05:06", ether_type=0x0800)
    assert (spec.dst_mac, spec.dst_mac_mask) == ("01:02:03:04:05:06", "ff:ff:ff:ff:ff:ff")
    assert (spec.src_mac, spec.src_mac_mask, spec.vlan_tag_mask) == ("", "", 0)
    spec.vlan_tag = 7
    assert spec.vlan_tag == 7
    assert "IBV_FLOW_SPEC_ETH" in str(spec)
    assert "2048 / 65535" in str(spec)
    with pytest.raises(OverflowError):
        spec.vlan_tag = 1 << 16
    assert Ipv6Spec().dst_ip == "::"
    rule = FlowAttr()
    rule.specs.append(spec)
    assert rule.specs == [spec]
    with pytest.raises(RuntimeError):
        Spec()  # type: ignore[abstract]
    with pytest.raises(PyverbsError):
        TcpUdpSpec(32)


def test_records_of_work_queues_refuse_what_makes_no_sense() -> None:
    with pytest.raises(PyverbsUserError):
        RwqIndTableInitAttr(0, [])
    with pytest.raises(PyverbsUserError):
        RwqIndTableInitAttr(1, [None] * 3)  # type: ignore[list-item]  # they are only counted
    with pytest.raises(PyverbsUserError):
        RxHashConf(rx_hash_key_len=3, rx_hash_key=b"four")
    with pytest.raises(PyverbsUserError):
        RxHashConf().rx_hash_key_len = 0
