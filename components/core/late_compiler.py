"""timm and torchvision without the compiler of torch, until something is compiled.

Two of their modules load `torch._dynamo` (and with it sympy, triton and FSDP) when they are
imported: a second of processor time and 140 MB in every process with a network. Here the two
statements are replaced by late ones. If a release changes them, the modules load as they are.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

LATE = {
    "torchvision.ops.roi_align": (
        "from torch._dynamo.utils import is_compile_supported\n",
        "def is_compile_supported(device_type):\n"
        "    from torch._dynamo import utils\n\n"
        "    return utils.is_compile_supported(device_type)\n",
    ),
    "timm.layers.typing": (
        'getattr(getattr(torch, "compiler", None), "disable", None) or nullwrap',
        "torch._disable_dynamo",  # the same decorator, which loads the compiler at the first call
    ),
}


class _Loader(SourceFileLoader):
    def get_code(self, fullname: str) -> CodeType:
        early, late = LATE[fullname]
        source = self.get_data(self.path).decode().replace(early, late)
        return compile(source, self.path, "exec", dont_inherit=True)


class _Finder:
    @staticmethod
    def find_spec(
        name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """One of the modules with its late statement; None for all others."""
        spec = PathFinder.find_spec(name, path) if name in LATE else None
        if spec is not None and spec.origin is not None:
            spec.loader = _Loader(name, spec.origin)
        return spec


def install() -> None:
    """Load the compiler late in this process."""
    if _Finder not in sys.meta_path:
        sys.meta_path.insert(0, _Finder)
