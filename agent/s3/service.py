"""A request of S3 to the operation that it asks for, and the access key to the tenant that it stands for."""

from __future__ import annotations

from collections.abc import Mapping

from agent.config.s3_section import S3Section
from agent.s3.answers import Answer
from agent.s3.body import Body
from agent.s3.counters import S3Counters
from agent.s3.credentials import AccessKey
from agent.s3.errors import S3Error
from agent.s3.listing import Listings
from agent.s3.reading import ObjectReads
from agent.s3.requests import Hosts, Operation, S3Request
from agent.s3.shares import Shares
from agent.s3.store import ObjectStore
from agent.s3.workers import Workers
from agent.s3.writing import ObjectWrites


class S3Service:
    """All that is behind the listener. Lives in the door's event loop."""

    def __init__(
        self,
        section: S3Section,
        keys: Mapping[str, AccessKey],
        stores: Mapping[str, ObjectStore],
        workers: Workers,
        counters: S3Counters,
    ) -> None:
        """`keys` by their ids, `stores` by their tenants."""
        self.transfers = transfers = Shares(section.transfers, stores.values())
        self.keys = keys
        self.connections = Shares(section.connections, stores)
        """Of those whose tenant is known; the door counts all."""
        self.counters = counters
        self.hosts = Hosts(section.domain, section.bucket_of_host)
        self._stores = stores
        self._listings = Listings(workers, section.region, transfers)
        self._reads = ObjectReads(workers, counters, transfers)
        self._writes = ObjectWrites(workers, counters, transfers, section.object_max)

    async def answer(self, request: S3Request, tenant: str, body: Body) -> Answer:
        """Raises S3Error. The store is the tenant's, so of others there is nothing to be found in it."""
        store, operation = self._stores[tenant], request.operation
        if store.is_erased():
            # As after the next start of the agent, which knows no keys of such a tenant.
            raise S3Error("InvalidAccessKeyId", "The tenant of this access key was erased.")
        self.counters.requests[operation.value] += 1
        match operation:
            case Operation.PUT_OBJECT:
                return await self._writes.put(store, request, body)
            case Operation.UPLOAD_PART:
                return await self._writes.put_part(store, request, body)
            case Operation.COMPLETE_UPLOAD:
                return await self._writes.complete_upload(store, request, body)
            case Operation.DELETE_OBJECTS:
                return await self._listings.delete_several(store, request, body)
            case Operation.CREATE_BUCKET:
                return await self._listings.create_bucket(store, request, body)
        await body.nothing()
        match operation:
            case Operation.GET_OBJECT:
                return await self._reads.get(store, request)
            case Operation.HEAD_OBJECT:
                return await self._reads.head(store, request)
            case Operation.DELETE_OBJECT:
                return await self._listings.delete(store, request)
            case (
                Operation.LIST_OBJECTS
                | Operation.LIST_OBJECTS_V1
                | Operation.LIST_PARTS
                | Operation.LIST_UPLOADS
            ):
                return await self._listings.page(store, request)
            case Operation.CREATE_UPLOAD:
                return await self._writes.begin_upload(store, request)
            case Operation.ABORT_UPLOAD:
                return await self._writes.abort_upload(store, request)
            case Operation.HEAD_BUCKET:
                return await self._listings.head_bucket(store, request)
            case Operation.GET_BUCKET_LOCATION:
                return await self._listings.location(store, request)
            case Operation.DELETE_BUCKET:
                return await self._listings.delete_bucket(store, request)
            case Operation.LIST_BUCKETS:
                return await self._listings.buckets(store, request)
        raise AssertionError(f"{operation} has no place here")
