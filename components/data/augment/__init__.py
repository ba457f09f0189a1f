"""Random changes of training images; draws depend on the item, not on batch or worker.

`Augmentation` changes images one by one, `Mixing` blends neighbours of a batch and their labels,
`repeats` orders several copies of each item.
"""

from components.data.augment.augmentation import Augmentation
from components.data.augment.mixing import Mixing

__all__ = ["Augmentation", "Mixing"]
