"""From a request of S3 and its tenant to the operation."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Final

from agent.config.s3_section import S3Section
from agent.host_os.per_user_bounds import SHARED, Limit
from agent.http.patience import Patience
from agent.http.shares import Shares
from agent.http.workers import Workers
from agent.s3.answers import Answer
from agent.s3.body import Body
from agent.s3.copy_object import ObjectCopies
from agent.s3.counters import S3Counters
from agent.s3.credentials import AccessKey
from agent.s3.errors import S3Error, slow_down
from agent.s3.get_object import ObjectReads
from agent.s3.listing import Listings
from agent.s3.put_object import ObjectWrites
from agent.s3.rdma.engine import TransferEngine
from agent.s3.rdma.service import Answering, HttpClient, S3Rdma
from agent.s3.requests import Hosts, Operation, S3Request
from agent.s3.signature import HttpRequest, Signer, SigningKeys
from agent.s3.store import ObjectStore

CONNECTIONS: Final = Limit(
    "s3-connections", "connections of S3 (`s3.connections`)", 256,
    by="peer, until it shows a key", share=SHARED, refused="the oldest without a key is closed, or it",
    bytes_each=640 << 10,
)  # fmt: skip


class Serving(ABC):
    """What a connection has behind it. Lives in the door's event loop."""

    def __init__(
        self,
        section: S3Section,
        keys: Mapping[str, AccessKey],
        stores: Mapping[str, Hashable],
        workers: Workers,
        counters: S3Counters,
    ) -> None:
        """`keys` by their ids, `stores` by their tenants."""
        self.patience = Patience()
        self.transfers = Shares(section.transfers, stores.values(), refusal=slow_down)
        self.keys = keys
        self.region = section.region
        self.signing_keys = SigningKeys(section.region)
        self.connections = Shares(section.connections, stores)
        """Connections of known tenants; the door counts all."""
        self.counters = counters
        self.hosts = Hosts(section.domain, section.bucket_of_host)
        self.rests = workers.rests

    @abstractmethod
    async def answer(self, request: S3Request, tenant: str, body: Body) -> Answer:
        """Carry the operation out on the tenant's own store. Raises S3Error."""

    @abstractmethod
    def by_rdma(self, http: HttpRequest, signer: Signer, client: HttpClient) -> Answering:
        """What answers a request that `wants_rdma`. Raises S3Error."""


class S3Service(Serving):
    """All operations."""

    def __init__(
        self,
        section: S3Section,
        keys: Mapping[str, AccessKey],
        stores: Mapping[str, ObjectStore],
        workers: Workers,
        counters: S3Counters,
        engine: TransferEngine | None = None,
        enclosures: Callable[[], Iterable[str]] = tuple,
    ) -> None:
        """`engine`: where objects move by RDMA; `enclosures`: see `S3Rdma`."""
        super().__init__(section, keys, stores, workers, counters)
        self.rdma = S3Rdma(section, stores, counters, self.answer, engine, enclosures, patience=self.patience)
        self._stores = stores
        transfers, rests = self.transfers, self.rests
        listings = Listings(workers, section.region, transfers, rests)
        reads = ObjectReads(workers, counters, transfers)
        writes = ObjectWrites(workers, counters, transfers, section.object_max, rests)
        copies = ObjectCopies(workers, transfers, section.object_max)
        self._with_body = {
            Operation.PUT_OBJECT: writes.put,
            Operation.UPLOAD_PART: writes.put_part,
            Operation.COMPLETE_UPLOAD: writes.complete_upload,
            Operation.DELETE_OBJECTS: listings.delete_several,
            Operation.CREATE_BUCKET: listings.create_bucket,
        }
        self._without_body = {
            Operation.GET_OBJECT: reads.get,
            Operation.HEAD_OBJECT: reads.head,
            Operation.COPY_OBJECT: copies.copy,
            Operation.UPLOAD_PART_COPY: copies.copy_part,
            Operation.DELETE_OBJECT: listings.delete,
            Operation.LIST_OBJECTS: listings.page,
            Operation.LIST_OBJECTS_V1: listings.page,
            Operation.LIST_PARTS: listings.page,
            Operation.LIST_UPLOADS: listings.page,
            Operation.CREATE_UPLOAD: writes.begin_upload,
            Operation.ABORT_UPLOAD: writes.abort_upload,
            Operation.HEAD_BUCKET: listings.head_bucket,
            Operation.GET_BUCKET_LOCATION: listings.location,
            Operation.GET_BUCKET_VERSIONING: listings.versioning,
            Operation.GET_OBJECT_TAGGING: listings.tagging,
            Operation.DELETE_BUCKET: listings.delete_bucket,
            Operation.LIST_BUCKETS: listings.buckets,
        }

    def by_rdma(self, http: HttpRequest, signer: Signer, client: HttpClient) -> Answering:
        """Raises S3Error."""
        return self.rdma.prepare(http, signer, client)

    async def answer(self, request: S3Request, tenant: str, body: Body) -> Answer:
        """Raises S3Error."""
        store, operation = self._stores[tenant], request.operation
        if store.is_erased():
            # As after the next start of the agent, which knows no keys of such a tenant.
            raise S3Error("InvalidAccessKeyId", "The tenant of this access key was erased.")
        self.counters.requests[operation.value] += 1
        if operation in self._with_body:
            return await self._with_body[operation](store, request, body)
        await body.nothing()
        return await self._without_body[operation](store, request)
