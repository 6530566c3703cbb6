"""Which device computes: ggml's registry of devices, and a backend (a stream and its threads) on one.

Knows nothing of experts. `ExpertBank` chooses the device, every `ExpertEngine` opens its own backend on it.
"""

from __future__ import annotations

from dataclasses import dataclass

from swarmnode.compute import ggml
from swarmnode.errors import ComputeError, EngineError

# enum ggml_backend_dev_type, in the order that "auto" prefers; accelerators such as BLAS only help the CPU
_CPU, _GPU, _INTEGRATED_GPU = 0, 1, 2
_AUTO = (_GPU, _INTEGRATED_GPU, _CPU)


@dataclass(frozen=True, slots=True)
class Device:
    """A device of this build. On the CPU weights are used where they lie, elsewhere they are uploaded."""

    address: int
    name: str
    description: str
    is_cpu: bool


def devices() -> list[tuple[int, Device]]:
    """(ggml's type, device) of everything that can compute experts here. Raises LayoutMismatch."""
    ggml.check_layout()
    if ggml.backend_dev_count() == 0:  # a build whose backends are separate libraries
        ggml.backend_load_all_from_path(str(ggml.library_dir()).encode())
    found = []
    for index in range(ggml.backend_dev_count()):
        address = ggml.backend_dev_get(index)
        kind = ggml.backend_dev_type(address)
        if kind in _AUTO:
            name = ggml.backend_dev_name(address).decode()
            description = ggml.backend_dev_description(address).decode(errors="replace")
            found.append((kind, Device(address, name, description, kind == _CPU)))
    return found


def choose_device(backend: str) -> Device:
    """The device for "auto" (a GPU if there is one), "cpu", or ggml's name of it such as "CUDA0"."""
    found = devices()
    if backend == "auto":
        wanted = [device for kind in _AUTO for k, device in found if k == kind]
    elif backend == "cpu":
        wanted = [device for _, device in found if device.is_cpu]
    else:
        wanted = [device for _, device in found if device.name.lower() == backend.lower()]
    if not wanted:
        names = ", ".join(device.name for _, device in found) or "nothing"
        raise EngineError(f"no device {backend!r} here; this build of llama-cpp-python computes on {names}")
    return wanted[0]


class Backend:
    """One open stream on a device; owns its threads. Not thread safe."""

    def __init__(self, device: Device, threads: int) -> None:
        if not 1 <= threads <= 512:
            raise EngineError(f"{threads} threads cannot be meant; use 1 to 512")
        self.device = device
        self._address: int | None = ggml.backend_dev_init(device.address, None)
        if not self._address:
            raise ComputeError(f"device {device.name} could not be opened")
        registry = ggml.backend_dev_backend_reg(device.address)
        set_threads = ggml.backend_reg_get_proc_address(registry, b"ggml_backend_set_n_threads")
        if set_threads:  # only the CPU has it
            ggml.SetThreads(set_threads)(self._address, threads)

    def compute(self, graph: int) -> None:
        """Run a ggml graph to its end. Raises ComputeError."""
        status = ggml.backend_graph_compute(self._address, graph)
        if status != 0:
            raise ComputeError(f"{self.device.name}: {ggml.status_to_string(status).decode()}")

    def close(self) -> None:
        """Free the stream and its threads."""
        if self._address:
            ggml.backend_free(self._address)
            self._address = None
