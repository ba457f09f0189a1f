"""Forward passes of many variants of a network that share the blocks before their first difference.

Each variant changes some blocks. In `shared_order` the outputs of the last pass are valid up to the
first block that the next variant treats differently; these blocks return their kept outputs, all
others run. The logits are those of plain passes, bit for bit.
"""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from components.analyze.blocks import Blocks
from components.core.errors import CasemateError
from components.core.types import Images, IntArray, Labels, Logits, LogitsFn
from components.models.attention.discover import BlockSite
from components.models.attention.shadow import shadowed

NOT_FINITE = -1  # prediction of an item whose logits are not finite: wrong for every label
SCHEMA = pa.schema(
    [
        ("item_id", pa.string()),
        ("label", pa.int32()),
        ("predictions", pa.list_(pa.int32())),  # in the order of the variants
    ]
)


class Change(Protocol):
    """What is done to one block; equal changes compare equal."""

    @property
    def key(self) -> str:
        """Determines the order of variants; differs between different changes."""
        ...

    def on(self, blocks: Blocks, site: BlockSite) -> AbstractContextManager[Any]:
        """The block is changed inside the context."""
        ...


Variant = tuple[Change | None, ...]  # one entry per block; None: unchanged


def shared_order(variants: Sequence[Variant]) -> list[int]:
    """Indices of the variants, those with equal first blocks next to each other."""
    keys = [tuple("" if change is None else change.key for change in v) for v in variants]
    return sorted(range(len(variants)), key=lambda index: (keys[index], index))


def num_shared(one: Variant, other: Variant) -> int:
    """Number of blocks before the first that the two variants treat differently."""
    pairs = enumerate(zip(one, other, strict=True))
    return next((place for place, (a, b) in pairs if a != b), len(one))


class SharedPasses:
    """Passes of one batch through variants of a network; keeps the outputs of the last one.

    Memory: one output per block. Outputs are copied when kept and when handed out, so a network may
    change them in place.
    """

    def __init__(self, logits_of: LogitsFn, blocks: Blocks, x: Images) -> None:
        self.logits_of, self.blocks, self.x = logits_of, blocks, x
        self.variant: Variant | None = None
        self.outputs: list[Tensor] = []
        self.calls: list[int] = []

    @torch.no_grad()
    def logits(self, variant: Variant) -> Logits:
        """Logits of the batch under one variant."""
        self.blocks.check_eval()
        valid = 0 if self.variant is None else num_shared(self.variant, variant)
        del self.outputs[valid:]
        self.variant, self.calls = None, []  # nothing is valid after an exception
        with ExitStack() as stack:
            for place, site in enumerate(self.blocks.sites):
                change = variant[place]
                if place < valid:
                    stack.enter_context(shadowed(site.module, "forward", _Kept(self, place)))
                elif change is not None:
                    stack.enter_context(change.on(self.blocks, site))
                hook = site.module.register_forward_hook(self._keeper(place, valid))
                stack.callback(hook.remove)
            logits = self.logits_of(self.x)
        names = self.blocks.names
        self.blocks.check_calls([names[place] for place in self.calls])
        self.variant = variant
        return logits

    def _keeper(self, place: int, valid: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            self.calls.append(place)
            if place < valid:
                return
            if not isinstance(output, Tensor):
                name, kind = self.blocks.sites[place].name, type(output).__name__
                raise CasemateError("blocks.names", name, f"returns a {kind}, not one tensor")
            self.outputs.append(output.clone())

        return keep


class _Kept:
    """Forward pass that returns the kept output of a block."""

    def __init__(self, passes: SharedPasses, place: int) -> None:
        self.passes, self.place = passes, place

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        return self.passes.outputs[self.place].clone()


def variant_predictions(
    logits_of: LogitsFn, blocks: Blocks, x: Images, variants: Sequence[Variant]
) -> IntArray:
    """(V, B) predictions of every variant; the lowest class wins a tie, -1: logits not finite.

    A prediction does not depend on the other variants. Hold `attack_mode(model)` around the call.
    """
    found = torch.empty(len(variants), len(x), dtype=torch.int64)
    for index, logits in variant_logits(logits_of, blocks, x, variants):
        finite = logits.isfinite().all(dim=1)
        found[index] = torch.where(finite, logits.argmax(dim=1), NOT_FINITE).cpu()
    predictions: IntArray = found.numpy()
    return predictions


def variant_logits(
    logits_of: LogitsFn, blocks: Blocks, x: Images, variants: Sequence[Variant]
) -> Iterator[tuple[int, Logits]]:
    """(index, logits) of every variant, in shared order."""
    passes = SharedPasses(logits_of, blocks, x)
    for index in shared_order(variants):
        yield index, passes.logits(variants[index])


def variant_table(item_ids: Sequence[str], labels: Labels, predictions: IntArray) -> pa.Table:
    """One row per item (`SCHEMA`) from (V, B) predictions: the durable result of a unit."""
    columns = [list(item_ids), labels.cpu().numpy(), predictions.T.tolist()]
    arrays = [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)]
    return pa.Table.from_arrays(arrays, schema=SCHEMA)


def verdicts_of(results: pa.Table) -> NDArray[np.bool_]:
    """(N, V): which items are classified correctly under which variant."""
    predictions = np.array(results.column("predictions").to_pylist(), dtype=np.int64)
    labels = np.asarray(results.column("label"), dtype=np.int64)
    verdicts: NDArray[np.bool_] = predictions == labels[:, None]
    return verdicts
