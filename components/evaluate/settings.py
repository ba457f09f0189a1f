"""Settings of the measurements."""

from collections.abc import Iterator
from typing import Annotated, Literal

from annotated_types import MinLen

from components.core.hints import did_you_mean
from components.core.settings import Problem, Settings, settings
from components.data.corruptions.settings import CORRUPTIONS, SMALL_SIDE, Fidelity, Severity
from components.data.sources.names import BENCHMARK_CORRUPTIONS, SEVERITIES


@settings
class CorruptionSuiteSettings(Settings):
    """Accuracy on corrupted test images, generated or read from a published dataset."""

    kind: Literal["corruptions"] = "corruptions"
    names: Literal["all", "benchmark"] | Annotated[tuple[str, ...], MinLen(1)] = "all"
    """Names of corruptions, `benchmark` (15) or `all` (19)."""
    severities: Annotated[tuple[Severity, ...], MinLen(1)] = SEVERITIES
    source: Literal["generate", "imagenet_c", "cifar10_c", "cifar100_c"] = "generate"
    path: str | None = None
    """Folder of the published dataset."""
    fidelity: Fidelity | None = None
    """`released` adds the JPEG files of ImageNet-C. None: released from 64 pixels on, else raw."""
    textures: str | None = None
    """Folder with the photographs frost1 to frost5; None: procedural textures, marked as such."""

    def chosen_names(self) -> tuple[str, ...]:
        """Names of the corruptions in the order of the benchmark."""
        if isinstance(self.names, str):
            return tuple(CORRUPTIONS) if self.names == "all" else BENCHMARK_CORRUPTIONS
        return tuple(name for name in CORRUPTIONS if name in self.names)

    def variants(self) -> tuple[tuple[str, int], ...]:
        """(corruption, severity) in the order of the benchmark."""
        levels = sorted(set(self.severities))
        return tuple((name, level) for name in self.chosen_names() for level in levels)

    def fidelity_at(self, height: int, width: int) -> Fidelity:
        """The fidelity for images of this size; CIFAR-10-C was published without compression."""
        return self.fidelity or ("raw" if min(height, width) < SMALL_SIDE else "released")

    def problems(self) -> Iterator[Problem]:
        for name in () if isinstance(self.names, str) else self.names:
            if name not in CORRUPTIONS:
                yield Problem("names", repr(name), did_you_mean(name, CORRUPTIONS))
        if self.source == "generate":
            if self.path is not None:
                yield Problem("path", self.path, "would be ignored: source is generate; remove it")
            return
        if self.path is None:
            yield Problem("path", "", f"is missing: set the folder of {self.source}")
        for field in ("fidelity", "textures"):
            if (value := getattr(self, field)) is not None:
                remedy = f"would be ignored: {self.source} is read, not generated; remove it"
                yield Problem(field, value, remedy)
