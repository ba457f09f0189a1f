"""Names of classes and corruptions that are not in the files."""

import importlib.util
from functools import lru_cache
from pathlib import Path


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


DIGITS = tuple(str(digit) for digit in range(10))
FASHION_MNIST = (
    "T-shirt/top",
    "Trouser",
    "Pullover",
    "Dress",
    "Coat",
    "Sandal",
    "Shirt",
    "Sneaker",
    "Bag",
    "Ankle boot",
)
CIFAR10 = _words("airplane automobile bird cat deer dog frog horse ship truck")
CIFAR100 = _words(
    """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
    butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach couch
    crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster house kangaroo
    keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree motorcycle mountain mouse
    mushroom oak_tree orange orchid otter palm_tree pear pickup_truck pine_tree plain plate poppy
    porcupine possum rabbit raccoon ray road rocket rose sea seal shark shrew skunk skyscraper
    snail snake spider squirrel streetcar sunflower sweet_pepper table tank telephone television
    tiger tractor train trout tulip turtle wardrobe whale willow_tree wolf woman worm
    """
)

# Hendrycks & Dietterich 2019: the 15 of the benchmark, then the 4 extra ones.
BENCHMARK_CORRUPTIONS = _words(
    """
    gaussian_noise shot_noise impulse_noise defocus_blur glass_blur motion_blur zoom_blur
    snow frost fog brightness contrast elastic_transform pixelate jpeg_compression
    """
)
EXTRA_CORRUPTIONS = ("speckle_noise", "gaussian_blur", "spatter", "saturate")
CORRUPTIONS = BENCHMARK_CORRUPTIONS + EXTRA_CORRUPTIONS
SEVERITIES = (1, 2, 3, 4, 5)

# ImageNet-100 of Debenedetti et al. 2023: 100 positions in the sorted list of the 1000 synsets.
# Their code drew them with JAX's generator of that time, key 0; newer JAX draws others.
_IMAGENET100 = _words(
    """
    2 12 21 29 33 43 45 47 61 68 69 79 87 101 108 128 129 165 169 173 180 204 214 227 233 242 252
    265 268 284 292 301 311 316 323 339 343 366 372 385 392 408 410 414 448 481 486 495 501 510
    515 544 549 553 577 586 613 616 623 624 644 661 677 681 682 688 698 720 725 729 737 750 752
    758 763 769 776 777 789 798 802 809 812 822 823 826 831 869 880 888 908 909 911 912 926 931
    937 938 947 961
    """
)


def imagenet_synsets() -> tuple[str, ...]:
    """The 1000 WordNet ids of ILSVRC-2012 in sorted order, which is the order of the labels."""
    return _timm_list("imagenet_synsets.txt")


def imagenet_r_synsets() -> tuple[str, ...]:
    """The 200 classes of ImageNet-R."""
    return _timm_list("imagenet_r_synsets.txt")


def imagenet_a_synsets() -> tuple[str, ...]:
    """The 200 classes of ImageNet-A."""
    return _timm_list("imagenet_a_synsets.txt")


def imagenet100_synsets() -> tuple[str, ...]:
    """The classes of ImageNet-100; a label is a position in this list."""
    every = imagenet_synsets()
    return tuple(every[int(index)] for index in _IMAGENET100)


@lru_cache
def _timm_list(file: str) -> tuple[str, ...]:
    """A list that timm ships; read as a file, because importing timm imports torch."""
    spec = importlib.util.find_spec("timm")
    if spec is None or spec.origin is None:
        raise ValueError("timm is not installed")
    path = Path(spec.origin).parent / "data" / "_info" / file
    return tuple(path.read_text(encoding="utf-8").split())
