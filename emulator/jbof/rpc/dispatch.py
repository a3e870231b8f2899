"""JSON-RPC 2.0 in SPDK's dialect: from a decoded request, or a batch, to its answer. No I/O.

As with a real target, a missing "jsonrpc" is accepted, an id is a number or a string, a request without one
is a notification, and an error has no "data".
"""

import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from pydantic import BaseModel, ValidationError

from emulator.jbof.enclosure import Enclosure
from emulator.jbof.rpc import faults, parameters
from emulator.jbof.rpc.bdevs import Bdevs
from emulator.jbof.rpc.keyring import Keyring
from emulator.jbof.rpc.subsystems import Subsystems

log = logging.getLogger(__name__)

BATCH_MAX: Final = 64
"""Requests of one batch: bounds the memory of its answer."""

VERSION: Final = "g35 jbof 0.1"

_BEFORE_START: Final = ("framework_start_init", "nvmf_set_config")
"""Methods of a target that is not initialized yet; this one always is."""


@dataclass(frozen=True, slots=True)
class Method:
    """The parameters and the function of a method."""

    takes: type[BaseModel]
    run: Callable[[Any], Any]


class Dispatcher:
    """The methods of one enclosure. From any thread; one request at a time."""

    def __init__(self, enclosure: Enclosure) -> None:
        self._lock = threading.Lock()
        self._bdevs = bdevs = Bdevs(enclosure)
        keyring = Keyring()
        self._subsystems = subsystems = Subsystems(enclosure, bdevs, keyring)
        nothing = parameters.NoParameters
        self.methods: dict[str, Method] = {
            "bdev_aio_create": Method(parameters.CreateAio, bdevs.create_aio),
            "bdev_aio_delete": Method(parameters.Named, lambda asked: self._delete("aio", asked.name)),
            "bdev_get_bdevs": Method(parameters.GetBdevs, bdevs.get),
            "bdev_get_iostat": Method(parameters.GetIostat, bdevs.iostat),
            "bdev_malloc_create": Method(parameters.CreateMalloc, bdevs.create_malloc),
            "bdev_malloc_delete": Method(parameters.Named, lambda asked: self._delete("malloc", asked.name)),
            "bdev_null_create": Method(parameters.CreateNull, bdevs.create_null),
            "bdev_null_delete": Method(parameters.Named, lambda asked: self._delete("null", asked.name)),
            "bdev_wait_for_examine": Method(nothing, lambda _: True),
            "keyring_file_add_key": Method(parameters.AddKey, keyring.add),
            "keyring_file_remove_key": Method(parameters.Named, keyring.remove),
            "keyring_get_keys": Method(nothing, lambda _: keyring.get(subsystems.key_users)),
            "nvmf_create_subsystem": Method(parameters.CreateSubsystem, subsystems.create),
            "nvmf_create_transport": Method(parameters.CreateTransport, subsystems.create_transport),
            "nvmf_delete_subsystem": Method(parameters.OfSubsystem, subsystems.delete),
            "nvmf_get_subsystems": Method(parameters.GetSubsystems, subsystems.get),
            "nvmf_get_transports": Method(parameters.GetTransports, subsystems.get_transports),
            "nvmf_subsystem_add_host": Method(parameters.OfHost, subsystems.add_host),
            "nvmf_subsystem_add_listener": Method(parameters.AddListener, subsystems.add_listener),
            "nvmf_subsystem_add_ns": Method(parameters.AddNamespace, subsystems.add_namespace),
            "nvmf_subsystem_allow_any_host": Method(parameters.AllowAnyHost, subsystems.allow_any_host),
            "nvmf_subsystem_get_controllers": Method(parameters.OfSubsystem, subsystems.get_controllers),
            "nvmf_subsystem_get_listeners": Method(parameters.OfSubsystem, subsystems.get_listeners),
            "nvmf_subsystem_remove_host": Method(parameters.RemoveHost, subsystems.remove_host),
            "nvmf_subsystem_remove_listener": Method(parameters.RemoveListener, subsystems.remove_listener),
            "nvmf_subsystem_remove_ns": Method(parameters.RemoveNamespace, subsystems.remove_namespace),
            "nvmf_subsystem_set_keys": Method(parameters.OfHost, subsystems.set_keys),
            "rpc_get_methods": Method(nothing, lambda _: sorted(self.methods)),
            "spdk_get_version": Method(nothing, lambda _: {"version": VERSION, "fields": {}}),
        }

    def _delete(self, kind: str, name: str) -> bool:
        bdev = self._bdevs.find(name)
        self._bdevs.delete(kind, name)
        self._subsystems.forget(bdev)
        return True

    def answer(self, request: Any) -> dict[str, Any] | list[dict[str, Any]] | None:
        """The answer to a request or a batch; None for notifications."""
        if not isinstance(request, list):
            return self._one(request)
        if not request or len(request) > BATCH_MAX:
            return _error(None, faults.RpcFault(faults.INVALID_REQUEST, "Invalid request"))
        answers = [said for each in request if (said := self._one(each)) is not None]
        return answers or None

    def _one(self, request: Any) -> dict[str, Any] | None:
        invalid = faults.RpcFault(faults.INVALID_REQUEST, "Invalid request")
        if not isinstance(request, dict):
            return _error(None, invalid)
        number = request.get("id")
        known = number is None or type(number) in (int, str)
        method = request.get("method")
        if not known or request.get("jsonrpc", "2.0") != "2.0" or not isinstance(method, str):
            return _error(None, invalid)
        params = request.get("params")
        if params is not None and not isinstance(params, dict | list):
            return _error(number, invalid)
        try:
            result = self._call(method, params)
        except faults.RpcFault as fault:
            return _error(number, fault) if "id" in request else None
        except Exception:
            # A bug fails one call.
            log.exception("the RPC method %s", method)
            return _error(number, faults.internal_error()) if "id" in request else None
        return {"jsonrpc": "2.0", "id": number, "result": result} if "id" in request else None

    def _call(self, name: str, params: dict[str, Any] | list[Any] | None) -> Any:
        if name in _BEFORE_START:
            raise faults.RpcFault(
                faults.WRONG_STATE,
                "Method may only be called before framework is initialized using framework_start_init RPC.",
            )
        method = self.methods.get(name)
        if method is None:
            raise faults.RpcFault(faults.METHOD_NOT_FOUND, "Method not found")
        if method.takes is parameters.NoParameters:
            if params:
                raise faults.RpcFault(faults.INVALID_PARAMETERS, f"{name} method requires no parameters")
            params = {}
        try:
            asked = method.takes.model_validate({} if params is None else params)
        except ValidationError:
            undecodable = faults.RpcFault(faults.INTERNAL_ERROR, "spdk_json_decode_object failed")
            raise (undecodable if name.startswith("bdev_") else faults.invalid_parameters()) from None
        with self._lock:
            return method.run(asked)


def _error(number: Any, fault: faults.RpcFault) -> dict[str, Any]:
    return {"jsonrpc": "2.0", "id": number, "error": {"code": fault.code, "message": str(fault)}}
