"""Random changes of training images; the randomness belongs to items, never to batch or worker.

`Augmentation` changes images one by one, `Mixing` blends neighbours of a batch and their labels,
`repeats` orders several copies of each item.
"""

from components.data.augment.augmentation import Augmentation
from components.data.augment.mixing import Mixing

__all__ = ["Augmentation", "Mixing"]
