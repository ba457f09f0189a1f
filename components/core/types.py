"""Type names of the tensors that components exchange."""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

Images = Tensor  # (B, C, H, W) float32 in [0, 1], before any normalisation
Labels = Tensor  # (B,) int64
Logits = Tensor  # (B, K)
LogitsFn = Callable[[Images], Logits]
Json = dict[str, Any]
Array = NDArray[Any]
FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
