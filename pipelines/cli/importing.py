"""`casemate import-weights`: converts weights of other projects to a model folder."""

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from components.core.errors import CasemateError
from components.core.settings import default_of
from components.models.settings import ModelSettings
from pipelines.cli.options import Flag, JsonOpt, flag, numbers, with_flags

if TYPE_CHECKING:
    from components.models.importing.match import DoesNotFit, ImportReport
    from components.models.pixels import PixelModel

commands = typer.Typer()
SHOWN_KEYS = 10  # of weights that do not fit
DENOISER = "unet"  # architecture of imported denoisers
OF_CLASSIFIERS = {
    "classes": Flag(int, "Number of classes; default: that of the file's head.", min=1),
    "upsample": Flag(int, "Side of the network's input, if not the native one.", min=1),
    "mean": Flag(str, "Comma-separated, per channel."),
    "std": Flag(str, "Comma-separated, per channel."),
    "option": Flag(list[str], "Of the architecture, e.g. stem_patch=4.", metavar="K=V"),
    "allow_missing": Flag(list[str], "Tensors that may start fresh: 'head.*'.", metavar="GLOB"),
    "allow_unused": Flag(list[str], "Tensors of the file to leave out.", metavar="GLOB"),
}
OF_DENOISERS = {
    "schedule": Flag(str, "Schedule of a denoiser: linear, cosine or scaled-linear."),
    "timesteps": Flag(int, "Timesteps of a denoiser; default: 1000.", min=1),
    "rescaled_time": Flag(bool, "Denoiser: times are 0..1000 for any number of timesteps."),
    "head_width": Flag(int, "Channels of a denoiser's attention head; default 64.", min=1),
    "num_heads": Flag(int, "Heads of a denoiser's attention, not their width.", min=1),
    "attention_order": Flag(str, "legacy, or new: use_new_attention_order of the denoiser."),
}


@commands.command(
    "import-weights",
    epilog="Example: casemate import-weights deit_small.pth --architecture deit_small_patch16_224 "
    "--mean 0.485,0.456,0.406 --std 0.229,0.224,0.225 --out models/deit-s",
)
@with_flags(OF_CLASSIFIERS | OF_DENOISERS)
def import_weights(
    file: Annotated[Path, typer.Argument(metavar="FILE", help=".safetensors, .pth, .pt or .tar.")],
    architecture: Annotated[
        str, typer.Option(help="Architecture of the weights: a timm name, or unet.")
    ],
    out: Annotated[Path, typer.Option(metavar="DIR", help="Model folder to write.")],
    layout: Annotated[
        str, typer.Option(help="auto, timm, deit, xcit, robustbench, smoothed-vit or hf-vit.")
    ] = "auto",
    entry: Annotated[
        str | None, typer.Option(help="Entry of the file to take, e.g. model_ema.")
    ] = None,
    image_size: Annotated[
        int | None, typer.Option(min=1, help="Native image side; default: the architecture's.")
    ] = None,
    channels: Annotated[int, typer.Option(min=1)] = 3,
    upsample_mode: Annotated[str, typer.Option(help="nearest, bilinear or bicubic.")] = default_of(
        ModelSettings, "upsample_mode"
    ),
    token_policy: Annotated[
        str, typer.Option(help="drop or mask: what ablations do to hidden tokens.")
    ] = default_of(ModelSettings, "token_policy"),
    kernel: Annotated[
        str, typer.Option(help="Resampling of the patch embedding: bilinear, pi or sum.")
    ] = "bilinear",
    as_json: JsonOpt = False,
    **given: Any,
) -> None:
    """Import weights of timm, DeiT, XCiT, RobustBench, smoothed-vit or Hugging Face ViT.

    With --architecture unet: a denoiser of guided-diffusion or improved-diffusion.
    """
    from components.models.adapt import KERNEL_METHODS
    from components.models.importing import weights
    from components.models.importing.match import DoesNotFit
    from components.models.spec import TOKEN_POLICIES, UPSAMPLE_MODES

    _check_choice("--kernel", kernel, KERNEL_METHODS)
    _check_choice("--token-policy", token_policy, TOKEN_POLICIES)
    _check_choice("--upsample-mode", upsample_mode, UPSAMPLE_MODES)
    _check_out(out)
    of_classifiers = {name: given[name] for name in OF_CLASSIFIERS}
    of_denoisers = {name: given[name] for name in OF_DENOISERS}
    if architecture == DENOISER:
        remedy = "is not used for a denoiser: its file and schedule define it"
        _refuse_options(remedy, layout=None if layout == "auto" else layout, **of_classifiers)
        timesteps = of_denoisers.pop("timesteps")
        wanted = {"image_size": image_size, "num_timesteps": timesteps, **of_denoisers}
        _import_denoiser(file, out, wanted, entry=entry, as_json=as_json)
        return
    _refuse_options(f"is for denoisers only, --architecture {DENOISER}", **of_denoisers)
    target = weights.Target(
        architecture=architecture,
        num_classes=given["classes"],
        image_size=image_size,
        channels=channels,
        upsample=given["upsample"],
        upsample_mode=upsample_mode,
        mean=numbers("--mean", given["mean"]),
        std=numbers("--std", given["std"]),
        token_policy=token_policy,
        options=_options(given["option"] or []),
    )
    try:
        imported = weights.import_weights(
            file,
            target,
            layout=layout,
            entry=entry,
            allow_missing=given["allow_missing"] or [],
            allow_unused=given["allow_unused"] or [],
            kernel_method=kernel,
        )
    except DoesNotFit as error:
        raise _refused(error, as_json) from error
    origin = {"file": str(file), "layout": imported.layout, "entry": imported.entry}
    _show(imported.report, {**_save(out, imported.model), **origin}, as_json)


def _import_denoiser(
    file: Path, out: Path, target: Mapping[str, Any], *, entry: str | None, as_json: bool
) -> None:
    """A UNet of guided- or improved-diffusion, as `denoiser: model:OUT` can name it."""
    from components.denoising.importing import DenoiserTarget, attention_heads, import_denoiser
    from components.models.importing.match import DoesNotFit

    given = {key: value for key, value in target.items() if value is not None}
    try:
        model, report = import_denoiser(file, DenoiserTarget(**given), entry=entry)
    except DoesNotFit as error:
        raise _refused(error, as_json) from error
    heads = [
        {"channels": width, "num_heads": number, "head_width": width // number}
        for width, number in attention_heads(model).items()
    ]
    given_heads = bool({"head_width", "num_heads"} & given.keys())
    origin = {"file": str(file), "layout": "guided-diffusion", "entry": entry}
    attention = {"attention": heads, "attention_assumed": not given_heads}
    _show(report, {**_save(out, model), **origin, **attention}, as_json)


def _refused(error: "DoesNotFit", as_json: bool) -> Exception:
    """The error to raise: as it is with JSON, else after its reason and a few keys are printed."""
    if as_json:
        _show(error.report, {"folder": None}, as_json)
        return error
    print(f"casemate: {error}", file=sys.stderr)
    for line in error.report.refused(SHOWN_KEYS):
        print(line, file=sys.stderr)
    return typer.Exit(2)


def _save(out: Path, model: "PixelModel") -> dict[str, Any]:
    from components.models.checkpoint import save_model

    try:
        digest = save_model(out, model, recipe_digest="")
    except OSError as error:
        raise CasemateError("--out", out, f"cannot be written ({error.strerror})") from error
    return {"folder": str(out), "digest": digest, "spec": model.spec.to_dict()}


def _refuse_options(remedy: str, **options: Any) -> None:
    """Refuse options that would be ignored."""
    for name, value in options.items():
        if value is not None:
            shown = ",".join(value) if isinstance(value, list) else value
            raise CasemateError(flag(name), shown, remedy)


def _check_out(out: Path) -> None:
    """Refuse a path where no folder can be created, before the import starts; creates nothing."""
    if (out / "model.json").exists():
        raise CasemateError("--out", out, "holds a model already; choose another folder")
    there = next(place for place in (out, *out.absolute().parents) if place.exists())
    if not there.is_dir():
        raise CasemateError("--out", out, f"cannot be a folder: {there} is a file")


def _show(report: "ImportReport", head: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps({**head, "report": report.to_dict()}, indent=2))
        return
    for line in report.lines():
        print(line)
    if head["folder"]:
        print(
            f"layout     {head['layout']}" + (f", entry {head['entry']}" if head["entry"] else "")
        )
        if "attention" in head:
            print(_heads_line(head["attention"], assumed=head["attention_assumed"]))
        print(f"model: {head['folder']}")


def _heads_line(attention: list[dict[str, int]], *, assumed: bool) -> str:
    """Attention heads as text: the file does not contain them, and wrong ones give wrong images."""
    listed = "; ".join(
        f"{a['num_heads']} x {a['head_width']} at {a['channels']} channels" for a in attention
    )
    note = " (assumed; if trained otherwise, set --head-width or --num-heads)"
    return f"attention  heads x width: {listed}{note if assumed else ''}"


def _check_choice(key: str, value: str, choices: tuple[str, ...]) -> None:
    if value not in choices:
        raise CasemateError(key, value, f"is not one of {', '.join(choices)}")


def _options(pairs: list[str]) -> dict[str, Any]:
    """`K=V` pairs; values are JSON if they can be parsed, else text."""
    options: dict[str, Any] = {}
    for pair in pairs:
        key, equals, text = pair.partition("=")
        if not equals:
            raise CasemateError("--option", pair, "is not key=value, e.g. --option stem_patch=4")
        try:
            options[key] = json.loads(text)
        except json.JSONDecodeError:
            options[key] = text
    return options
