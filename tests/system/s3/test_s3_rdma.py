"""Objects by RDMA: a door and clients, each with an emulated NIC of its own."""

from __future__ import annotations

import http.client
import random
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.exceptions import ClientError

from agent.bench.s3_rdma_client import Refused, S3RdmaClient, crc_of
from agent.s3.chunked import UNSIGNED_TRAILER
from agent.s3.get_object import Rooms
from agent.s3.rdma import engine
from agent.s3.rdma.service import CRC
from agent.s3.rdma.token import TOKEN
from agent.s3.signature import UNSIGNED
from nvmeof.rdma.work import Access
from nvmeof.transport.rdma_direct import PairEnd, gid_of
from nvmeof.transport.verbs_provider import free_loopback_address
from tests.support.engines.s3_rdma import lossy, rdma_client, rdma_served
from tests.support.engines.s3_served import OTHER_KEY, Served, answer_of, served, signed_head
from tests.support.processes import Processes
from tests.support.waiting import wait_until

MIB = 1 << 20
DATA = random.Random(20).randbytes(2_500_001)
GUARD = b"\xa5" * 4096
ANY_CRC = {CRC: crc_of(memoryview(b""))}
UNSUPPORTED = {"x-amz-rdma-reply": "501", "x-amz-rdma-protocol-status": "unsupported"}


@pytest.fixture
def s3(tmp_path: Path) -> Iterator[Served]:
    with rdma_served(tmp_path, rdma_connections=8, transfers=4) as made:
        made.client().put_object(Bucket="blocks", Key="a", Body=DATA, ChecksumAlgorithm="CRC64NVME")
        yield made


@pytest.fixture
def client(s3: Served) -> Iterator[S3RdmaClient]:
    with rdma_client(s3) as made:
        made.connect()
        yield made


def refused(client: S3RdmaClient, method: str, path: str, token: str, **headers: str) -> Refused:
    with pytest.raises(Refused) as caught:
        client.request(method, path, {TOKEN: token, **headers})
    return caught.value


def memory(size: int, guard: bytes = GUARD) -> tuple[memoryview, memoryview]:
    """Memory to register, and everything round it: a guard on either side."""
    whole = memoryview(bytearray(guard + bytes(size) + guard))
    return whole[len(guard) : len(guard) + size], whole


def is_untouched(whole: memoryview, size: int) -> bool:
    return whole == GUARD + bytes(size) + GUARD


# --- what it is for -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [0, 1, 4096, MIB, MIB + 1, len(DATA)])
def test_an_object_goes_there_and_comes_back(s3: Served, client: S3RdmaClient, size: int) -> None:
    out, (into, whole) = client.register(memoryview(bytearray(DATA))), memory(3 * MIB)
    etag = client.put("/blocks/b", out, size)
    assert client.get("/blocks/b", client.register(into)) == size
    assert whole == GUARD + DATA[:size] + bytes(3 * MIB - size) + GUARD
    found = s3.client().get_object(Bucket="blocks", Key="b", ChecksumMode="ENABLED")
    assert (found["ETag"], found["Body"].read()) == (etag, DATA[:size])
    assert found["ChecksumCRC64NVME"] == crc_of(memoryview(DATA[:size]))
    status = s3.door.snapshot()
    assert status["rdma_connections"] == 1
    assert (status["rdma_bytes_read"], status["rdma_bytes_written"]) == (size, size)


def test_what_boto_stored_comes_in_ranges_and_under_conditions(client: S3RdmaClient) -> None:
    into, _ = memory(MIB)
    region = client.register(into)
    assert client.get("/blocks/a", region, "bytes=1000-1999") == 1000
    assert into[:1000] == DATA[1000:2000]
    _, answer = client.request("GET", "/blocks/a", {TOKEN: client.token(region), "range": "bytes=-10"})
    assert answer["content-range"] == f"bytes {len(DATA) - 10}-{len(DATA) - 1}/{len(DATA)}"
    assert (answer["x-amz-rdma-reply"], answer["content-length"]) == ("206", "0")
    assert into[:10] == DATA[-10:]
    for headers, status in (
        ({"if-match": '"other"'}, 412),
        ({"if-none-match": "*"}, 304),
        ({"range": f"bytes={len(DATA)}-"}, 416),
    ):
        assert refused(client, "GET", "/blocks/a", client.token(region), **headers).status == status
    assert refused(client, "GET", "/blocks/none", client.token(region)).status == 404
    assert client.get("/blocks/a", region, "bytes=0-9") == 10


def test_an_object_is_written_in_parts(s3: Served, client: S3RdmaClient) -> None:
    data = random.Random(1).randbytes(5 * MIB + 77)
    boto = s3.client()
    upload = boto.create_multipart_upload(Bucket="blocks", Key="parts")["UploadId"]
    out = client.register(memoryview(bytearray(data)))
    parts = []
    for number, (start, end) in enumerate(((0, 5 * MIB), (5 * MIB, len(data))), 1):
        token = client.token(out, start, end - start)
        asked = {TOKEN: token, CRC: crc_of(memoryview(data[start:end]))}
        _, answer = client.request("PUT", "/blocks/parts", asked, f"partNumber={number}&uploadId={upload}")
        assert answer["x-amz-checksum-crc64nvme"] == crc_of(memoryview(data[start:end]))
        parts.append({"PartNumber": number, "ETag": answer["etag"]})
    boto.complete_multipart_upload(
        Bucket="blocks", Key="parts", UploadId=upload, MultipartUpload={"Parts": parts}
    )
    assert boto.get_object(Bucket="blocks", Key="parts")["Body"].read() == data


def test_clients_of_two_tenants_do_not_disturb_each_other(s3: Served) -> None:
    failures: list[BaseException] = []

    def work(seed: int) -> None:
        dice = random.Random(seed)
        try:
            with rdma_client(s3, OTHER_KEY if seed % 2 else None) as one:
                one.connect()
                out, into = one.register(memoryview(bytearray(MIB))), one.register(memoryview(bytearray(MIB)))
                for _ in range(4):
                    size = dice.randrange(MIB)
                    out.view[:size] = dice.randbytes(size)
                    one.put(f"/blocks/{seed}", out, size)
                    assert one.get(f"/blocks/{seed}", into) == size
                    assert into.view[:size] == out.view[:size]
                one.disconnect()
        except BaseException as failure:
            failures.append(failure)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failures
    assert s3.door.snapshot()["rdma_connections"] == 0


def test_bytes_are_whole_where_datagrams_are_lost(s3: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    with lossy(monkeypatch, 0.02) as links, rdma_client(s3) as client:
        client.connect()
        out, into = (
            client.register(memoryview(bytearray(DATA))),
            client.register(memoryview(bytearray(3 * MIB))),
        )
        while sum(link.count for link in links) < 20:
            into.view[:] = bytes(3 * MIB)
            client.put("/blocks/lossy", out, len(DATA))
            assert client.get("/blocks/lossy", into) == len(DATA)
            assert into.view[: len(DATA)] == DATA


# --- what is refused ----------------------------------------------------------------------------------------


def test_a_client_whose_memory_is_too_short_gets_nothing(client: S3RdmaClient) -> None:
    into, whole = memory(MIB)
    region = client.register(into)
    answer = refused(client, "GET", "/blocks/a", client.token(region))
    assert (answer.status, "do not fit" in answer.words) == (400, True)
    assert is_untouched(whole, MIB)
    # The connection is as good as before.
    assert client.get("/blocks/a", region, "bytes=0-9") == 10


def test_a_wrong_key_address_or_length_fails_the_request_and_touches_nothing(
    s3: Served, client: S3RdmaClient
) -> None:
    into, whole = memory(MIB)
    region = client.register(into)
    inside = region.address
    wrong = {
        "key": (inside, MIB, region.rkey ^ 0x100),
        "no key": (inside, MIB, 0),
        "before": (inside - 64, MIB, region.rkey),
        "beyond": (inside + 64, MIB, region.rkey),
        "far": (1 << 62, MIB, region.rkey),
        "null": (0, MIB, region.rkey),
    }
    for why, (address, length, key) in wrong.items():
        for method, path, headers in (
            ("GET", "/blocks/a", {"range": f"bytes=0-{MIB - 1}"}),
            ("PUT", "/blocks/bad", ANY_CRC),
        ):
            token = f"rc:{client.session}:{address:016x}:{length:x}:{key:08x}"
            answer = refused(client, method, path, token, **headers)
            assert (answer.status, "device refused" in answer.words) == (400, True), (why, method)
            assert answer.headers["x-amz-rdma-protocol-status"] == "unconnected"
            assert is_untouched(whole, MIB), (why, method)
            # The connection is over, as with every device after such a refusal; the next one is not.
            assert "connect again" in refused(client, method, path, token, **headers).words
            client.connect()
    with pytest.raises(ClientError, match="NoSuchKey"):
        s3.client().get_object(Bucket="blocks", Key="bad")
    assert client.get("/blocks/a", region, "bytes=0-9") == 10
    assert s3.door.snapshot()["rdma_failures"] == 2 * len(wrong)


def test_what_lies_beyond_the_memory_is_not_touched_where_its_length_is_a_lie(client: S3RdmaClient) -> None:
    into, whole = memory(MIB)
    region = client.register(into)
    token = f"rc:{client.session}:{region.address:x}:{3 * MIB:x}:{region.rkey:08x}"
    assert refused(client, "GET", "/blocks/a", token).status == 400
    assert whole[: len(GUARD)] == GUARD
    assert whole[-len(GUARD) :] == GUARD


def test_memory_serves_for_what_its_client_allows(s3: Served, client: S3RdmaClient) -> None:
    into, whole = memory(MIB)
    read_only = client.register(into, Access.LOCAL_WRITE | Access.REMOTE_READ)
    asked = {"range": "bytes=0-99"}
    assert refused(client, "GET", "/blocks/a", client.token(read_only), **asked).status == 400
    assert is_untouched(whole, MIB)
    client.connect()
    write_only = client.register(memory(MIB)[0], Access.LOCAL_WRITE | Access.REMOTE_WRITE)
    assert refused(client, "PUT", "/blocks/bad", client.token(write_only), **ANY_CRC).status == 400
    assert s3.client().list_objects_v2(Bucket="blocks", Prefix="bad")["KeyCount"] == 0


def test_bytes_that_are_not_those_of_the_checksum_are_not_stored(s3: Served, client: S3RdmaClient) -> None:
    out = client.register(memoryview(bytearray(DATA)))
    token = client.token(out)
    wrong = crc_of(memoryview(DATA[::-1]))
    for header, value in (("x-amz-checksum-crc64nvme", wrong), ("content-md5", "1B2M2Y8AsgTpgAmY7PhCfg==")):
        assert "BadDigest" in refused(client, "PUT", "/blocks/bad", token, **{header: value}).words
    assert s3.client().list_objects_v2(Bucket="blocks", Prefix="bad")["KeyCount"] == 0


def test_a_connection_is_of_no_use_to_another_tenant(s3: Served, client: S3RdmaClient) -> None:
    into, whole = memory(MIB)
    token = client.token(client.register(into))
    with rdma_client(s3, OTHER_KEY) as stranger:
        stranger.connect()
        assert "no such RDMA connection" in refused(stranger, "PUT", "/blocks/stolen", token, **ANY_CRC).words
        own, stranger.session = stranger.session, client.session
        with pytest.raises(Refused, match="no such RDMA connection"):
            stranger.disconnect()
        stranger.session = own
    assert is_untouched(whole, MIB)
    assert client.put("/blocks/still", client.register(memoryview(bytearray(9))), 9)


FORMS = {
    "cuObject": f"00007f3a12345000:00100000:0001e240:0000:007a03:1:{'00' * 10}ffff7f000001",
    "hipObject": f"01{'12' * 43}",
    "unknown": "ofi1:tcp:7",
}


@pytest.mark.parametrize("form", FORMS)
def test_another_form_of_rdma_is_declined(s3: Served, client: S3RdmaClient, form: str) -> None:
    for method, path in (("GET", "/blocks/a"), ("PUT", "/blocks/bad"), ("HEAD", "/blocks/a")):
        answer = refused(client, method, path, FORMS[form])
        assert answer.status == 501
        assert UNSUPPORTED.items() <= answer.headers.items()
    assert s3.client().list_objects_v2(Bucket="blocks", Prefix="bad")["KeyCount"] == 0


def test_other_operations_and_paths_have_no_rdma(client: S3RdmaClient) -> None:
    token = client.token(client.register(memory(4096)[0]))
    for method, path in (("HEAD", "/blocks/a"), ("DELETE", "/blocks/a"), ("GET", "/blocks"), ("GET", "/")):
        assert refused(client, method, path, token).status == 501
    for method, path, status in (
        ("POST", "/.hipobj-rc/prepare", 501),
        ("POST", "/.s3rdma-rc/prepare", 405),
        ("GET", "/.s3rdma-rc/connect", 405),
    ):
        with pytest.raises(Refused) as caught:
            client.request(method, path, {})
        assert caught.value.status == status


def test_a_door_without_rdma_declines_it_and_stores_no_empty_object(tmp_path: Path) -> None:
    with served(tmp_path) as s3, rdma_client(s3) as client:
        s3.client().put_object(Bucket="blocks", Key="a", Body=DATA)
        with pytest.raises(Refused, match="501"):
            client.connect()
        for method, path in (("GET", "/blocks/a"), ("PUT", "/blocks/bad")):
            answer = refused(client, method, path, f"rc:{'0' * 32}:1:1:1")
            assert answer.status == 501
            assert UNSUPPORTED.items() <= answer.headers.items()
        assert s3.client().list_objects_v2(Bucket="blocks", Prefix="bad")["KeyCount"] == 0
        status = s3.door.snapshot()
        assert (status["rdma"], status["rdma_connections"]) == ("", 0)


def test_the_headers_of_rdma_are_signed(s3: Served) -> None:
    head, _ = signed_head("GET", "/blocks/a")
    connection = s3.connect()
    connection.sendall(head.replace(b"\r\n\r\n", f"\r\n{TOKEN}: rc:{'0' * 32}:1:1:1\r\n\r\n".encode()))
    status, body = answer_of(connection)
    connection.close()
    assert (status, b"not signed" in body) == (403, True)


def test_a_put_by_rdma_has_no_other_body(s3: Served, client: S3RdmaClient) -> None:
    token = {TOKEN: client.token(client.register(memory(4096)[0]))}
    chunked = {"x-amz-decoded-content-length": "4096", "content-length": "0"}
    for body, payload, headers in (
        (b"12345", UNSIGNED, {"content-length": "5"}),
        (b"", UNSIGNED_TRAILER, chunked),
        (b"5\r\n12345\r\n0\r\n\r\n", UNSIGNED, {"transfer-encoding": "chunked"}),
    ):
        connection = s3.connect()
        connection.sendall(signed_head("PUT", "/blocks/bad", {**token, **headers}, payload)[0] + body)
        status, words = answer_of(connection)
        connection.close()
        assert (status, b"InvalidRequest" in words) == (400, True)
    assert s3.client().list_objects_v2(Bucket="blocks", Prefix="bad")["KeyCount"] == 0


# --- who may connect, and how often -------------------------------------------------------------------------


def test_a_queue_pair_of_another_host_is_refused(s3: Served, tmp_path: Path) -> None:
    with rdma_client(s3) as client:
        with pytest.raises(Refused, match="from where this request does not come"):
            client.connect(PairEnd(17, gid_of("127.0.0.9"), 1))
        client.connect()
    (tmp_path / "wide").mkdir()
    with (
        rdma_served(tmp_path / "wide", rdma_clients=("127.0.0.0/8",)) as wide,
        rdma_client(wide, source="127.0.0.1") as client,
    ):
        client.connect()
        assert client.put("/blocks/b", client.register(memoryview(bytearray(99))), 99)


def test_a_tenant_that_connects_again_and_again_loses_its_oldest(s3: Served) -> None:
    limit = s3.section.rdma_connections
    clients = [rdma_client(s3) for _ in range(2)]
    for _ in range(limit):
        clients[0].connect()
    clients[1].connect()
    assert s3.door.snapshot()["rdma_connections"] <= limit
    assert clients[1].put("/blocks/b", clients[1].register(memoryview(bytearray(9))), 9)
    with rdma_client(s3, OTHER_KEY) as other:
        other.connect()
        assert other.put("/blocks/b", other.register(memoryview(bytearray(9))), 9)
    for each in clients:
        each.close()


# --- who goes away ------------------------------------------------------------------------------------------


def test_a_client_that_goes_before_the_write_costs_its_own_request_alone(
    s3: Served, client: S3RdmaClient
) -> None:
    into, whole = memory(3 * MIB)
    token = client.token(client.register(into))
    client.drop_pair()
    answers: list[Refused] = []
    waiting = threading.Thread(target=lambda: answers.append(refused(client, "GET", "/blocks/a", token)))
    waiting.start()
    with rdma_client(s3) as other:
        other.connect()
        region = other.register(memoryview(bytearray(3 * MIB)))
        served_meanwhile = 0
        while waiting.is_alive():
            assert other.get("/blocks/a", region) == len(DATA)
            served_meanwhile += 1
    waiting.join()
    assert served_meanwhile
    assert (answers[0].status, "RequestTimeout" in answers[0].words) == (400, True)
    assert is_untouched(whole, 3 * MIB)
    wait_until(lambda: s3.door.snapshot()["rdma_connections"] == 1)  # the other's, which said nothing


def test_a_client_that_is_killed_in_the_middle_leaves_a_door_that_serves(
    s3: Served, client: S3RdmaClient, processes: Processes
) -> None:
    killed = processes.python(
        "-m", "tests.support.engines.s3_rdma_program", str(s3.port), free_loopback_address(), "/blocks/a"
    )
    killed.wait_for_line("second round")
    killed.process.kill()
    killed.process.wait()
    into = client.register(memoryview(bytearray(3 * MIB)))
    for _ in range(3):
        assert client.get("/blocks/a", into) == len(DATA)
    assert into.view[: len(DATA)] == DATA
    wait_until(lambda: s3.door.snapshot()["connections"] == 1, 30.0)
    client.put("/blocks/b", into, 100)


def test_bytes_of_one_piece_are_read_where_they_are_sent_from(
    client: S3RdmaClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not into memory of the door's that would have to be copied."""
    taken, take = list[int](), Rooms.take

    def counted(self: Rooms, size: int) -> memoryview:
        taken.append(size)
        return take(self, size)

    monkeypatch.setattr(Rooms, "take", counted)
    into, _ = memory(MIB)
    region = client.register(into)
    assert client.get("/blocks/a", region, f"bytes=0-{MIB - 1}") == MIB
    assert into == DATA[:MIB]
    assert not taken
    assert client.get("/blocks/a", client.register(memory(3 * MIB)[0])) == len(DATA)
    assert taken, "several pieces go by way of those"


@pytest.mark.parametrize("of_one_piece", [False, True])
def test_a_transfer_that_is_late_ends_and_its_buffer_serves_the_next(
    s3: Served, client: S3RdmaClient, monkeypatch: pytest.MonkeyPatch, *, of_one_piece: bool
) -> None:
    wanted = {"range": "bytes=0-999999"} if of_one_piece else {}
    monkeypatch.setattr(engine, "TRANSFER_SECONDS", 0.05)
    region = client.register(memory(3 * MIB)[0])
    token = client.token(region)
    client.drop_pair()
    for _ in range(s3.section.transfers + 1):
        assert "RequestTimeout" in refused(client, "GET", "/blocks/a", token, **wanted).words
        client.connect()
        token = client.token(region)
        client.drop_pair()
    monkeypatch.undo()
    client.connect()
    assert client.put("/blocks/b", client.register(memoryview(bytearray(DATA))), len(DATA))


@pytest.mark.parametrize("of_one_piece", [False, True])
def test_a_door_that_stops_ends_transfers_that_nobody_answers(
    s3: Served, client: S3RdmaClient, *, of_one_piece: bool
) -> None:
    wanted = {"range": "bytes=0-999999"} if of_one_piece else {}
    token = client.token(client.register(memory(3 * MIB)[0]))
    client.drop_pair()
    failures: list[BaseException] = []

    def get() -> None:
        try:
            client.request("GET", "/blocks/a", {TOKEN: token, **wanted})
        except (OSError, http.client.HTTPException) as failure:  # and no answer, late or not
            failures.append(failure)

    waiting = threading.Thread(target=get)
    waiting.start()
    wait_until(lambda: any(row["name"] == "s3-transfers" and row["held"] for row in s3.bounds.snapshot()))
    s3.door.stop(0.0)
    waiting.join()
    assert failures
