"""A ggml buffer type that stores nothing: where the backbone's expert weights "live".

llama.cpp must believe that the expert tensors exist, or it builds no graph for them; it must never read them. Every
tensor takes 64 bytes here, writes are dropped, and the eval hook clears the compute flag of every node that would read.

`is_host` is False while a model loads, so that the loader stages data and hands it to our `set_tensor`, and True
afterwards, so that the scheduler accepts the tensors on the CPU.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

from swarmnode.compute import ggml
from swarmnode.errors import ComputeError

PATTERN = rb"\.ffn_(gate_up|gate|up|down)_(ch)?exps\.weight$"
_ALIGNMENT = 64
_ARENA = 1 << 20  # bytes: 64 per expert tensor leaves room for 16,384 of them


class _Override(ctypes.Structure):
    """struct llama_model_tensor_buft_override."""

    _fields_ = (("pattern", ctypes.c_char_p), ("buft", ctypes.c_void_p))


class NullBuffer:
    """The buffer type with everything ctypes must keep alive; it has to outlive the model."""

    def __init__(self) -> None:
        self._host = True
        self._name = ctypes.create_string_buffer(b"RemoteExperts")
        self._arena = ctypes.create_string_buffer(_ARENA + _ALIGNMENT)
        base = (ctypes.addressof(self._arena) + _ALIGNMENT - 1) // _ALIGNMENT * _ALIGNMENT
        address = ctypes.addressof(self._name)

        def drop(_buffer: int, _tensor: int, _data: int, _offset: int, _size: int) -> None:
            return None

        callbacks = {
            "get_name": ggml.GetName(lambda _type: address),
            "alloc_buffer": ggml.AllocBuffer(self._allocate),
            "get_alignment": ggml.GetSize(lambda _type: _ALIGNMENT),
            "get_alloc_size": ggml.GetAllocSize(lambda _type, _tensor: _ALIGNMENT),
            "is_host": ggml.IsHost(lambda _type: self._host),
        }
        storage = {
            "free_buffer": ggml.FreeBuffer(lambda _buffer: None),
            "get_base": ggml.GetBase(lambda _buffer: base),
            "memset_tensor": ggml.MemsetTensor(lambda _buffer, _tensor, _value, _offset, _size: None),
            "set_tensor": ggml.SetTensor(drop),
            "get_tensor": ggml.GetTensor(drop),
            "clear": ggml.Clear(lambda _buffer, _value: None),
        }
        self._alive = (callbacks, storage)
        self._interface = ggml.BufferInterface(**_addresses(storage))
        self._type = ggml.BufferType(iface=ggml.BufferTypeInterface(**_addresses(callbacks)))
        self._overrides = (_Override * 2)(_Override(PATTERN, ctypes.addressof(self._type)), _Override(None, None))

    def overrides(self) -> int:
        """Address for `llama_model_params.tensor_buft_overrides`."""
        return ctypes.addressof(self._overrides)

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """Wrap the call that loads the model."""
        self._host = False
        try:
            yield
        finally:
            self._host = True

    def _allocate(self, _type: int, size: int) -> int | None:
        if size > _ARENA:
            return None  # llama.cpp reports that it cannot allocate
        buffer: int | None = ggml.backend_buffer_init(ctypes.addressof(self._type), self._interface, None, size)
        return buffer


def _addresses(callbacks: dict[str, ctypes._CFunctionType]) -> dict[str, int]:
    out = {}
    for name, callback in callbacks.items():
        value = ctypes.cast(callback, ctypes.c_void_p).value
        if value is None:
            raise ComputeError(f"ctypes gives no address for the callback {name}")
        out[name] = value
    return out
