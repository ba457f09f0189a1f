"""torch, timm and torchvision without the compiler of torch, until something is compiled.

Modules of timm and torchvision load `torch._dynamo` (and with it sympy, triton and FSDP) when they
are imported, the first step of an optimiser does, too: a second of processor time and 140 MB in
every process with a network. Here these statements are replaced by late ones. If a release changes
them, or torch was imported before, the modules load as they are.
"""

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import CodeType, ModuleType

LATE = {
    "torch._compile": (  # around functions that must not be compiled: of optimisers, DDP, timm
        "                import torch._dynamo\n",
        "                import sys\n\n"
        "                if 'torch._dynamo' not in sys.modules:\n"
        "                    return fn(*args, **kwargs)\n"
        "                import torch._dynamo\n",
    ),
    "torch.optim.optimizer": (  # around steps, which tells the compiler where a graph ends
        "        import torch._dynamo\n\n        self = cast(Optimizer, args[0])",
        "        import sys\n\n"
        "        import torch\n\n"
        "        if 'torch._dynamo' not in sys.modules:\n"
        "            with torch.set_grad_enabled(args[0].defaults['differentiable']):\n"
        "                return func(*args, **kwargs)\n"
        "        import torch._dynamo\n\n        self = cast(Optimizer, args[0])",
    ),
    "torchvision.ops.roi_align": (
        "from torch._dynamo.utils import is_compile_supported\n",
        "def is_compile_supported(device_type):\n"
        "    from torch._dynamo import utils\n\n"
        "    return utils.is_compile_supported(device_type)\n",
    ),
    "torchvision.tv_tensors": ("@torch.compiler.disable\n", "@torch._disable_dynamo\n"),
    "timm.layers.typing": (
        'getattr(getattr(torch, "compiler", None), "disable", None) or nullwrap',
        "torch._disable_dynamo",  # the same decorator, late
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
