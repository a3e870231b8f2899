"""vLLM's own offloading on vLLM's CPU build: its spec, manager and worker, and a memmove for each copy.

vLLM offloads from a GPU alone. The worker refuses other tensors, and orders its copies by streams and events
of the device. On a CPU the forward pass is over when the worker is called, so a copy is made at once. Named
by `spec_module_path`, and imported by vLLM 0.32 alone (vllm/v1/kv_offload/cpu/gpu_worker.py).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import time
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch
from vllm.v1.kv_offload.cpu import gpu_worker
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec


class _DeviceTensor(torch.Tensor):  # type: ignore[misc]
    """A CPU tensor that the worker takes for one of the device."""

    is_cuda = True


class _Event:
    """A moment on a stream on which everything is over at once."""

    def __init__(self, enable_timing: bool = False) -> None:
        self._at = 0.0

    def record(self, stream: Any = None) -> None:
        self._at = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        pass

    def elapsed_time(self, later: _Event) -> float:
        return 1000.0 * (later._at - self._at)


class _Stream:
    def wait_stream(self, other: Any) -> None:
        pass

    def wait_event(self, event: Any) -> None:
        pass


class _Torch:
    """torch, but for its events."""

    Event = _Event

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


@contextlib.contextmanager
def _stream(stream: _Stream) -> Iterator[None]:
    yield


def _copy(source: Any, target: Any, sizes: Any, **_: Any) -> None:
    for at, to, size in zip(source.tolist(), target.tolist(), sizes.tolist(), strict=True):
        ctypes.memmove(to, at, size)


class CpuTensorsSpec(TieringOffloadingSpec):  # type: ignore[misc]
    """vLLM's spec of tiers, for a worker on the CPU."""

    def get_worker(self, kv_caches: Any) -> Any:
        if self._worker is None:
            gpu_worker.torch = _Torch()
            gpu_worker.current_platform = SimpleNamespace(
                Stream=_Stream, current_stream=_Stream, stream=_stream, is_xpu=lambda: False
            )
            gpu_worker._select_swap_blocks_fn = lambda *arguments, **options: _copy
            tensors = [
                dataclasses.replace(each, tensor=each.tensor.as_subclass(_DeviceTensor))
                for each in kv_caches.tensors
            ]
            self._worker = self.create_worker(dataclasses.replace(kv_caches, tensors=tensors))
        return self._worker
