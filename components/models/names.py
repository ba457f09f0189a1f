"""Names of networks without importing timm, which takes seconds."""

import re
from collections.abc import Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

OWN = ("tiny_vit", "tiny_xcit", "preact_resnet18", "wrn_28_10", "tiny_unet", "unet")
# Names that timm lacks, as an architecture of timm and options.
VARIANTS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "cait_s12_224": ("cait_s24_224", {"depth": 12, "init_values": 1.0}),
    "resnet50_gelu": ("resnet50", {"act_layer": "gelu"}),
    "vit_tiny_patch32_224": ("vit_tiny_patch16_224", {"patch_size": 32}),
    "xcit_medium_12_p16_224": ("xcit_small_12_p16_224", {"embed_dim": 512}),
    "xcit_medium_12_p8_224": ("xcit_small_12_p8_224", {"embed_dim": 512}),
    "xcit_large_12_p16_224": ("xcit_small_12_p16_224", {"embed_dim": 768, "num_heads": 16}),
    "xcit_large_12_p8_224": ("xcit_small_12_p8_224", {"embed_dim": 768, "num_heads": 16}),
}
_REGISTERED = re.compile(r"^@register_model\s*\ndef (\w+)\(", re.MULTILINE)
# Names with the tag of their weights, as the tables of weights have them.
_TAGGED = re.compile(r"""^    ['"](\w+\.\w+)['"]: _cfg\(""", re.MULTILINE)


@cache
def _names() -> frozenset[str]:
    spec = find_spec("timm")  # find_spec of a top-level package does not import it
    folders = spec.submodule_search_locations if spec else None
    files = [path for folder in folders or () for path in Path(folder, "models").glob("*.py")]
    texts = [path.read_text(encoding="utf-8") for path in files]
    found = {name for text in texts for name in _REGISTERED.findall(text)}
    tagged = {name for text in texts for name in _TAGGED.findall(text)}
    return frozenset(found | {name for name in tagged if name.partition(".")[0] in found})


def is_registered(architecture: str) -> bool:
    """Whether a network of that name exists; if False, `zoo.check_known` decides."""
    return architecture in OWN or architecture in VARIANTS or architecture in _names()
