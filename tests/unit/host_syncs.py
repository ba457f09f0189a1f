"""A stand-in for a GPU that counts the places where the host would wait for it.

Inside `HostSyncs`, tensors on `DEVICE` keep their values on the CPU, but belong to another device:
operations that mix the two raise as they would with a GPU, and an operation whose result the host
needs before it can go on (`.item()`, `bool()`, `.tolist()`, `.cpu()`, `nonzero`, indexing with a
mask) or that copies between the two is noted with the line of ours that asked for it. Copies with
`non_blocking=True` are not noted.

    with HostSyncs() as syncs:
        model, x = model.to(DEVICE), x.to(DEVICE)
        syncs.clear()
        step(model, x)
        assert syncs.places == {}
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map

DEVICE = torch.device("meta")  # with the CPU the only device that every build of torch has
ROOT = Path(__file__).parents[2]
aten = torch.ops.aten
WAITING = {
    aten._local_scalar_dense.default: "item",
    aten.nonzero.default: "nonzero",
    aten.masked_select.default: "masked_select",
    aten.equal.default: "equal",
    aten.bincount.default: "bincount",
    aten._unique2.default: "unique",
    aten.unique_consecutive.default: "unique",
    aten.unique_dim.default: "unique",
    aten.repeat_interleave.Tensor: "repeat_interleave",
}
COPIES = (aten._to_copy.default, aten.copy_.default)
INDEXING = (aten.index.Tensor, aten.index_put.default, aten.index_put_.default)


class OnDevice(Tensor):
    """A tensor that says that it is on `DEVICE`; its values are in `held`, on the CPU."""

    held: Tensor

    @staticmethod
    def __new__(cls, held: Tensor) -> "OnDevice":
        return Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), dtype=held.dtype, device=DEVICE
        )

    def __init__(self, held: Tensor) -> None:
        self.held = held

    def __repr__(self) -> str:
        return f"OnDevice({self.held})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _computed(func, args, kwargs or {})  # outside of `HostSyncs`


class HostSyncs(TorchDispatchMode):
    """`places` counts waits by file, line and operation, such as `components/a.py:12 item`."""

    def __init__(self) -> None:
        super().__init__()
        self.places: Counter[str] = Counter()
        self._values = _DeviceValues()

    def __enter__(self) -> "HostSyncs":
        super().__enter__()
        self._values.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._values.__exit__(*error)
        super().__exit__(*error)

    @property
    def count(self) -> int:
        return self.places.total()

    def clear(self) -> None:
        self.places.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if reason := _reason_to_wait(func, args, kwargs or {}):
            self.places[f"{_line_of_ours()} {reason}"] += 1
        return _computed(func, args, kwargs or {})


class _DeviceValues(TorchFunctionMode):
    """What torch does not do there: `torch.tensor(values, device=DEVICE)`, and `.tolist()`."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor) and _is_device(kwargs.get("device")):
            return func(*args, **kwargs | {"device": "cpu"}).to(DEVICE)
        if func is Tensor.tolist:
            return func(args[0].cpu())
        return func(*args, **kwargs)


def _is_device(device: Any) -> bool:
    return device is not None and torch.device(device) == DEVICE


def _tensors(values: Iterable[Any]) -> Iterator[Tensor]:
    """All tensors of arguments: plain values, tensors, and lists of tensors."""
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors(value)


def _any_on_device(tensors: Iterable[Tensor]) -> bool:
    return any(isinstance(tensor, OnDevice) for tensor in tensors)


def _reason_to_wait(func: Any, args: Any, kwargs: Any) -> str:
    """Why the host waits for the result of this operation; empty if it does not."""
    tensors = [*_tensors(args), *_tensors(kwargs.values())]
    if func in COPIES:
        ends = {isinstance(tensor, OnDevice) for tensor in tensors}
        if kwargs.get("device") is not None:
            ends.add(_is_device(kwargs["device"]))
        asynchronous = kwargs.get("non_blocking", args[2:3] == (True,))
        return "copy" if len(ends) == 2 and not asynchronous else ""
    if not _any_on_device(tensors):
        return ""
    if func in INDEXING:
        return _reason_of_indexing(func, args)
    if func is aten.repeat_interleave.Tensor and kwargs.get("output_size") is not None:
        return ""
    return WAITING.get(func, "")


def _reason_of_indexing(func: Any, args: Any) -> str:
    indices = [index for index in args[1] if index is not None]
    if any(index.dtype in (torch.bool, torch.uint8) for index in indices):
        filled = func is not aten.index.Tensor and args[2].numel() == 1  # by `masked_fill`
        return "" if filled else "mask"
    return "" if all(isinstance(index, OnDevice) for index in indices) else "copy"


def _line_of_ours() -> str:
    """The innermost line of the project, this file apart."""
    frame = sys._getframe(1)
    while frame is not None:
        path = Path(frame.f_code.co_filename)
        if path.is_relative_to(ROOT) and ".venv" not in path.parts and path != Path(__file__):
            return f"{path.relative_to(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back
    return "elsewhere"


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    """The operation on the values, its results on the device if any operand is there."""
    if func is aten._fused_sdp_choice.default:
        return 0  # attention by plain products: fused kernels are chosen by the device
    tensors = [*_tensors(args), *_tensors(kwargs.values())]
    on_device = _any_on_device(tensors)
    if kwargs.get("device") is not None:
        on_device = _is_device(kwargs["device"])
    elif on_device and func not in (*COPIES, *INDEXING):
        _refuse_two_devices(func, tensors)
    held = {name: _held(value) for name, value in kwargs.items()}
    own = held | ({"device": torch.device("cpu")} if "device" in kwargs else {})
    found = func(*map(_held, args), **own)
    if not on_device:
        return found
    placed = tree_map(lambda leaf: OnDevice(leaf) if isinstance(leaf, Tensor) else leaf, found)
    return return_and_correct_aliasing(func, args, kwargs, placed)


def _held(value: Any) -> Any:
    """An argument with the values of its tensors."""
    if isinstance(value, OnDevice):
        return value.held
    return type(value)(map(_held, value)) if type(value) in (list, tuple) else value


def _refuse_two_devices(func: Any, tensors: Iterable[Tensor]) -> None:
    """Single numbers of the host may take part, as with a GPU."""
    if any(tensor.dim() and not isinstance(tensor, OnDevice) for tensor in tensors):
        raise RuntimeError(f"{func}: expected all tensors to be on the same device")
