"""Runs a command of a checkout and notes which modules it crosses, for `tests.benchmarks.plumbing`.

`python -P plumbing_trace.py OUT STORAGE MODULE:FUNCTION WORD ...`, in the folder of the checkout.
What is counted is defined in `plumbing.py`. OUT gets `{"modules": [...], "hops": ["a -> b", ...],
"stack": [...]}` and is not written where no certificate was found below STORAGE.
"""

import importlib
import inspect
import json
import sys
import threading
from pathlib import Path
from types import CodeType, FrameType

PACKAGE = "pipelines"
STAGES = f"{PACKAGE}.stages."
CERTIFY = f"{STAGES}certify"
CERTIFICATE = "certificate.json"


class Trace:
    """A profile hook that collects modules and hops until the first certificate is on disk."""

    def __init__(self, checkout: Path, storage: Path) -> None:
        self.root, self.storage = f"{checkout.resolve() / PACKAGE}/", storage
        self.names: dict[CodeType, str] = {}
        self.modules: set[str] = set()
        self.hops: set[tuple[str, str]] = set()
        self.other_stages: set[int] = set()  # frames of `run` of stages that are at work
        self.stack: list[str] = []  # modules between the command and the certificate's file
        self.ended = False

    def audit(self, event: str, args: tuple[object, ...]) -> None:
        """Note which modules are at work when the first certificate gets its name."""
        if self.stack or event != "os.rename" or not str(args[1]).endswith(f"/{CERTIFICATE}"):
            return
        frame: FrameType | None = sys._getframe(1)
        found: list[str] = []
        while frame is not None:
            found.append(self.module_of(frame.f_code))
            frame = frame.f_back
        self.stack = list(dict.fromkeys(module for module in reversed(found) if module))

    def hook(self, frame: FrameType, event: str, _: object) -> None:
        if self.ended or event not in ("call", "return"):
            return
        module = self.module_of(frame.f_code)
        if not module or not frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            return  # bodies of modules and classes are imports, not calls
        of_stage = frame.f_code.co_name == "run" and module.startswith(STAGES)
        if of_stage and not module.startswith(CERTIFY):
            change = self.other_stages.add if event == "call" else self.other_stages.discard
            change(id(frame))
        if event == "call" and not self.other_stages:
            self.enter(module, frame.f_back)

    def module_of(self, code: CodeType) -> str:
        """The dotted name of a module of the package, else an empty string."""
        if code not in self.names:
            file = code.co_filename
            inside = file.startswith(self.root) and file.endswith(".py")
            words = [PACKAGE, *file[len(self.root) : -len(".py")].split("/")] if inside else []
            self.names[code] = ".".join(words).removesuffix(".__init__")
        return self.names[code]

    def enter(self, module: str, caller: FrameType | None) -> None:
        """Note a call and where it comes from, through libraries and components in between."""
        while caller is not None and not self.module_of(caller.f_code):
            caller = caller.f_back
        if caller is not None and not caller.f_code.co_flags & inspect.CO_OPTIMIZED:
            return  # while modules are imported
        origin = self.module_of(caller.f_code) if caller is not None else module
        if module in self.modules and (origin == module or (origin, module) in self.hops):
            return
        self.ended = any(self.storage.rglob(CERTIFICATE))
        if not self.ended:
            self.modules.add(module)
            self.hops |= {(origin, module)} - {(module, module)}

    def save(self, out: Path) -> None:
        if self.ended or any(self.storage.rglob(CERTIFICATE)):
            hops = [f"{origin} -> {target}" for origin, target in sorted(self.hops)]
            out.write_text(
                json.dumps({"modules": sorted(self.modules), "hops": hops, "stack": self.stack})
            )


def main() -> None:
    out, storage, entry, *words = sys.argv[1:]
    trace = Trace(Path.cwd(), Path(storage))
    module, _, function = entry.partition(":")
    sys.argv = ["casemate", *words]
    command = getattr(importlib.import_module(module), function)
    sys.addaudithook(trace.audit)
    threading.setprofile(trace.hook)
    sys.setprofile(trace.hook)
    try:
        command()
    finally:
        sys.setprofile(None)
        trace.save(Path(out))


if __name__ == "__main__":
    main()
