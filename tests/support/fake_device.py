"""A fake device whose tensors are on the CPU: what runs on it would run on a GPU without mixing devices.

As on a GPU, an operation on tensors of two devices fails, unless one has no dimensions or holds indices; and copies to the CPU and
numbers read from a tensor are waits, which are counted. It is torch's backend "privateuseone", written in Python, which can't be taken
back in a process: run it in one of its own.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode

NAME = "fake"
CPU, DEVICE = torch.device("cpu"), None
aten = torch.ops.aten
COPIES = {aten._to_copy.default, aten.copy_.default}
INDEXING = {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}
READS = {aten._local_scalar_dense.default, aten.equal.default, aten.is_nonzero.default}
SIZES_FROM_DATA = {aten.nonzero.default, aten.masked_select.default, aten._unique2.default}
CPUGenerator = torch.Generator


class FakeDeviceTensor(Tensor):
    """A tensor that says it is on the device; `data_on_cpu` has its values."""

    data_on_cpu: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> "FakeDeviceTensor":
        tensor = Tensor._make_wrapper_subclass(
            cls, values.size(), strides=values.stride(), storage_offset=values.storage_offset(), dtype=values.dtype, device=DEVICE
        )  # fmt: skip
        tensor.data_on_cpu = values
        return tensor

    def __repr__(self, **_: Any) -> str:
        return f"FakeDeviceTensor({self.data_on_cpu})"

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["data_on_cpu"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], *_: Any) -> "FakeDeviceTensor":
        return FakeDeviceTensor(inner["data_on_cpu"])

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return compute(function, args, kwargs or {}, [])


class FakeDevice(TorchDispatchMode):
    """A context in which the device can be used.

    Attributes:
        waits: the names of the operations for which a CPU would have waited for it.
        copies: the shapes of the tensors that were sent to it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.waits: list[str] = []
        self.copies: list[list[int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        device = (kwargs or {}).get("device")
        if function is aten._to_copy.default and not isinstance(args[0], FakeDeviceTensor) and device is not None:
            self.copies += [list(args[0].shape)] if torch.device(device).type == NAME else []
        return compute(function, args, kwargs or {}, self.waits)


def compute(function: Any, args: Any, kwargs: dict[str, Any], waits: list[str]) -> Any:
    """Run an operation on the CPU's values.

    Raises:
        RuntimeError: its tensors are on two devices.
    """
    tensors = [leaf for leaf in _leaves((*args, *kwargs.values())) if isinstance(leaf, Tensor)]
    on_device = any(isinstance(tensor, FakeDeviceTensor) for tensor in tensors)
    device = torch.device(kwargs["device"]) if kwargs.get("device") is not None else DEVICE if on_device else CPU
    if on_device and function not in COPIES | INDEXING:
        others = [tuple(t.shape) for t in tensors if not isinstance(t, FakeDeviceTensor) and t.ndim]
        if others:
            raise RuntimeError(f"{function}: expected all tensors on one device, but those of shape {others} are on the CPU")
    if on_device and (function in READS | SIZES_FROM_DATA or (function is aten._to_copy.default and device.type == "cpu")):
        waits.append(str(function))
    if function is aten.index.Tensor and on_device and any(i is not None and i.dtype == torch.bool for i in args[1]):
        waits.append(str(function))
    values = function(
        *_map(_on_cpu, args), **{key: CPU if key == "device" else _map(_on_cpu, v) for key, v in kwargs.items()}
    )
    if args and isinstance(args[0], FakeDeviceTensor) and values is args[0].data_on_cpu:
        return args[0]  # in place
    if function in READS or device.type != NAME:
        return values
    return _map(lambda leaf: FakeDeviceTensor(leaf) if isinstance(leaf, Tensor) else leaf, values)


def _leaves(values: Iterable[Any]) -> list[Any]:
    """The values, and those of lists and tuples among them: what an operation takes has no other containers."""
    leaves = []
    for value in values:
        leaves.extend(_leaves(value) if isinstance(value, (list, tuple)) else (value,))
    return leaves


def _map(change: Callable[[Any], Any], value: Any) -> Any:
    """The value with each leaf changed; much faster than torch's own trees, which know every container."""
    if isinstance(value, (list, tuple)):
        return type(value)([_map(change, one) for one in value])
    return change(value)


def _on_cpu(leaf: Any) -> Any:
    if isinstance(leaf, FakeDeviceTensor):
        return leaf.data_on_cpu
    return CPU if isinstance(leaf, torch.device) and leaf.type == NAME else leaf


class _Module(backend_registration._DummyBackendModule):
    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16, torch.float16]


class _Generator(CPUGenerator):
    """The device's generator, which is the CPU's."""

    def __new__(cls, device: Any = "cpu") -> CPUGenerator:
        return CPUGenerator.__new__(cls, "cpu")


def register() -> None:
    """Make the device known to torch, for the rest of the process."""
    global DEVICE
    backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=_Module())
    DEVICE = torch.device(NAME, 0)
    torch.Generator = _Generator
