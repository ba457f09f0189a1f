"""Architectures of the papers: names, papers that use them and supported features.

Counts are written as a paper prints them, so that their precision is known. Papers truncate or
round, and some count a different head: Bhojanapalli et al. print counts for ViT-L and for the BiT
ResNets that these networks do not have (307M for 304M, 207M for 217M), so those are left out.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from typing import Any

import timm
from torch import nn

from components.core.errors import CasemateError
from components.models.attention.discover import attention_of
from components.models.costs import costs_of_shapes, network_of_shapes
from components.models.names import VARIANTS
from components.models.tokens import check_droppable
from components.models.zoo import OWN, is_known

RECIPE, SCALING, SMOOTHED, DENOISED, UNDERSTANDING = (
    "light-recipe",
    "attention-scaling",
    "smoothed-vit",
    "denoised-smoothing",
    "understanding",
)
PAPERS: Mapping[str, str] = {
    RECIPE: "A Light Recipe to Train Robust Vision Transformers",
    SCALING: "Towards Understanding and Improving Adversarial Robustness of Vision Transformers",
    SMOOTHED: "Certified Patch Robustness via Smoothed Vision Transformers",
    DENOISED: "(Certified!!) Adversarial Robustness for Free!",
    UNDERSTANDING: "Understanding Robustness of Transformers for Image Classification",
}


@dataclass(frozen=True, slots=True)
class Architecture:
    """One architecture, its image size and the counts that papers print."""

    name: str
    family: str  # timm's module, for a network outside the catalogue
    papers: tuple[str, ...] = ()  # keys of PAPERS
    printed_params: str | None = None  # millions
    printed_gflops: str | None = None
    image_size: int = 224
    num_classes: int = 1000


_ENTRIES: Iterable[Architecture] = (
    Architecture("tiny_vit", "vit", image_size=32, num_classes=10),
    Architecture("tiny_xcit", "xcit", image_size=32, num_classes=10),
    Architecture("deit_tiny_patch16_224", "vit", (SMOOTHED,), "5"),
    Architecture("deit_small_patch16_224", "vit", (RECIPE, SMOOTHED), "22.05", "4.61"),
    Architecture("deit_base_patch16_224", "vit", (SMOOTHED,), "86"),
    Architecture("vit_tiny_patch16_224", "vit", (SMOOTHED,), "5"),
    Architecture("vit_tiny_patch32_224", "vit"),
    Architecture("vit_small_patch16_224", "vit", (SMOOTHED,), "22"),
    Architecture("vit_small_patch32_224", "vit"),
    Architecture("vit_base_patch16_224", "vit", (SCALING, SMOOTHED, DENOISED, UNDERSTANDING), "86"),
    Architecture("vit_base_patch32_224", "vit", (UNDERSTANDING,)),
    Architecture("vit_large_patch16_224", "vit", (UNDERSTANDING,)),
    Architecture("vit_large_patch32_224", "vit", (UNDERSTANDING,)),
    Architecture("vit_huge_patch14_224", "vit", (UNDERSTANDING,), "632"),
    Architecture("beit_large_patch16_224", "beit", (RECIPE,)),
    Architecture("beit_large_patch16_512", "beit", (DENOISED,), "305", image_size=512),
    Architecture("cait_s12_224", "cait", (RECIPE,), "25.61", "4.76"),
    Architecture("xcit_nano_12_p16_224", "xcit", (RECIPE,)),
    Architecture("xcit_small_12_p16_224", "xcit", (RECIPE, SCALING), "26.25", "4.82"),
    Architecture("xcit_medium_12_p16_224", "xcit", (RECIPE,), "46", "8.54"),
    Architecture("xcit_large_12_p16_224", "xcit", (RECIPE,), "104", "18.97"),
    Architecture("xcit_nano_12_p8_224", "xcit"),
    Architecture("xcit_small_12_p8_224", "xcit"),
    Architecture("xcit_medium_12_p8_224", "xcit"),
    Architecture("xcit_large_12_p8_224", "xcit"),
    Architecture("swin_tiny_patch4_window7_224", "swin", (SCALING,)),
    Architecture("levit_128s", "levit", (SCALING,)),
    Architecture("levit_128", "levit", (SCALING,)),
    Architecture("levit_192", "levit", (SCALING,)),
    Architecture("levit_256", "levit", (SCALING,)),
    Architecture("levit_384", "levit", (SCALING,)),
    Architecture("resnet18", "resnet", (SMOOTHED,), "12"),
    Architecture("resnet50", "resnet", (RECIPE, SMOOTHED), "26"),
    Architecture("resnet101", "resnet"),
    Architecture("resnet50_gelu", "resnet", (RECIPE,), "25", "4.11"),
    Architecture("wide_resnet50_2", "resnet", (RECIPE,), "68", "11.47"),
    Architecture("wide_resnet101_2", "resnet", (SMOOTHED,), "126"),
    Architecture("resnetv2_50x1_bit", "resnet", (UNDERSTANDING,)),
    Architecture("resnetv2_101x1_bit", "resnet", (UNDERSTANDING,)),
    Architecture("wrn_28_10", "resnet", (DENOISED, SCALING), "36", image_size=32, num_classes=10),
    Architecture("preact_resnet18", "resnet", image_size=32, num_classes=10),
    Architecture("convnext_tiny", "convnext", (RECIPE,)),
)
FAMILIES = {"vision_transformer": "vit", "deit": "vit", "resnetv2": "resnet"}  # timm's modules
CATALOG: Mapping[str, Architecture] = {entry.name: entry for entry in _ENTRIES}


def find(pattern: str) -> list[Architecture]:
    """Entries whose name matches a glob; if there are none, matching names of timm."""
    if found := [entry for entry in CATALOG.values() if fnmatchcase(entry.name, pattern)]:
        return found
    if is_known(pattern):  # also names with a tag of weights, which timm does not list
        return [_outside(pattern)]
    return find_everywhere(pattern)


def find_everywhere(pattern: str) -> list[Architecture]:
    """All networks whose name matches a glob: the catalogue's, then the rest of timm's."""
    if not (names := _names(pattern)):
        raise CasemateError("models", pattern, "matches no name, here or in timm")
    return [CATALOG.get(name) or _outside(name) for name in names]


def num_everywhere(pattern: str) -> int:
    """Number of networks that `find_everywhere` returns."""
    return len(_names(pattern))


def _names(pattern: str) -> list[str]:
    known = dict.fromkeys([*CATALOG, *OWN, *VARIANTS, *timm.list_models()])
    return [name for name in known if fnmatchcase(name, pattern)]


def describe(entry: Architecture) -> dict[str, Any]:
    """Plain values of an entry: costs at its size and supported features."""
    size = entry.image_size
    net = network_of_shapes(entry.name, image_size=size, num_classes=entry.num_classes)
    return {
        "name": entry.name,
        "family": entry.family,
        **asdict(costs_of_shapes(net, image_size=size)),
        "image_size": entry.image_size,
        "num_classes": entry.num_classes,
        "papers": list(entry.papers),
        "drops_tokens": _allows(check_droppable, net),  # `token_policy: drop` works
        "scales_attention": _allows(attention_of, net),  # its logits, before their softmax
    }


def family_of(architecture: str) -> str | None:
    """The family whose models share a line of a figure; None for networks of the user's."""
    base = architecture.partition(".")[0]  # without the tag of weights
    if base in CATALOG:
        return CATALOG[base].family
    if not timm.is_model(base):
        return None
    module: str = timm.model_entrypoint(base).__module__.rpartition(".")[2]
    return FAMILIES.get(module, module)


def _allows(check: Callable[[nn.Module], object], net: nn.Module) -> bool:
    try:
        check(net)
    except CasemateError:
        return False
    return True


def _outside(name: str) -> Architecture:
    """A network outside the catalogue, at the image size of timm's weights."""
    module = timm.model_entrypoint(name).__module__.rpartition(".")[2]
    return Architecture(name, module, image_size=timm.get_pretrained_cfg(name).input_size[-1])
