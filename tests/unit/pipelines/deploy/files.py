"""Checks of files for clusters: schemas, pods, the operator's rules.

Beside our own schemas, which list the fields that we use, the full ones of KubeRay are used where a
folder `shared/schemas` lies beside the checkout.
"""

import json
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import jsonschema
import kubernetes_validate
import ray
import yaml

from pipelines.deploy import rules
from tests.unit.infra.misspelt import misspellings

ROOT = Path(__file__).resolve().parents[4]
FULL = ROOT.parent / "shared" / "schemas"
KUBERNETES = "1.37"
Document = dict[str, Any]
Validator = jsonschema.Draft202012Validator


class InvalidFileError(AssertionError):
    """A file that a cluster would refuse, or whose keys it would ignore."""


def check(document: Document) -> None:
    """Raise `InvalidFileError` if a document has a wrong key or value, or breaks a rule."""
    kind = document.get("kind", _kind_without_one(document))
    pods = []
    try:
        for validator in _validators(kind, document.get("apiVersion", "")):
            if error := next(validator.iter_errors(document), None):
                raise InvalidFileError(f"{error.json_path}: {error.message}")
        pods = list(pods_of(document))
        found = rules.problems([document])
    except (LookupError, kubernetes_validate.SchemaNotFoundError) as error:
        raise InvalidFileError(f"lacks {error}") from error
    if found:
        raise InvalidFileError(found)
    for inner in (*pods, *_inner(document)):
        check(inner)


def is_refused(document: Document) -> bool:
    """Whether `check` refuses a document."""
    with suppress(InvalidFileError):
        check(document)
        return False
    return True


def pods_of(document: Document) -> Iterator[Document]:
    """The pods of a RayJob or RayCluster, as Pods."""
    if document.get("kind") not in ("RayJob", "RayCluster"):
        return
    spec = document["spec"]
    cluster = spec.get("rayClusterSpec", spec)
    templates = [group["template"] for group in cluster["workerGroupSpecs"]]
    templates.append(cluster["headGroupSpec"]["template"])
    if "submitterPodTemplate" in spec:
        templates.append(spec["submitterPodTemplate"])
    for template in templates:
        yield {"apiVersion": "v1", "kind": "Pod", **template}


def _inner(document: Document) -> Iterator[Document]:
    """Resources that a workflow creates."""
    if document.get("kind") == "WorkflowTemplate":
        for step in document["spec"]["templates"]:
            yield from yaml.safe_load_all(step["resource"]["manifest"])


def _kind_without_one(document: Document) -> str:
    """Files without a kind are not of Kubernetes."""
    return "ray-up" if "cluster_name" in document else "SkyPilot"


@cache
def _validators(kind: str, api: str) -> list[Validator]:
    """The validators of a kind; made once, since Kubernetes' schemas are large."""
    own = _own_schemas()
    if kind not in own:
        return [_of_kubernetes(kind, api)]
    found = [Validator({"$ref": f"#/$defs/{kind}", "$defs": own})]
    if (full := FULL / f"{kind.lower()}-v1.json").is_file():
        found.append(Validator(json.loads(full.read_text())))
    if kind == "ray-up":
        place = Path(ray.__file__).parent / "autoscaler" / "ray-schema.json"
        found.append(Validator(json.loads(place.read_text())))
    return found


def _of_kubernetes(kind: str, api: str) -> Validator:
    """The strict validator that `kubernetes_validate.validate` makes anew for every document."""
    with mock.patch.object(jsonschema.validators, "Draft202012Validator") as made:
        kubernetes_validate.validate({"apiVersion": api, "kind": kind}, KUBERNETES, strict=True)
    ((schema,), options) = made.call_args
    return Validator(schema, **options)


@cache
def _own_schemas() -> dict[str, Any]:
    text = Path(__file__).with_name("schemas.yaml").read_text()
    return {kind: _closed(schema) for kind, schema in yaml.safe_load(text).items()}


def _closed(schema: Any) -> Any:
    """A schema in which every mapping with properties has no others."""
    if not isinstance(schema, dict):
        return schema
    inner = {key: _closed(value) for key, value in schema.items()}
    if isinstance(schema.get("properties"), dict):
        listed = {key: _closed(value) for key, value in schema["properties"].items()}
        inner |= {"type": "object", "properties": listed, "additionalProperties": False}
    return inner


# Misspelt keys --------------------------------------------------------------------------------

# Mappings whose keys are values: names of variables, labels, files, amounts.
FREE = {
    *("labels", "matchLabels", "annotations", "nodeSelector", "data", "envs", "secrets"),
    *("file_mounts", "available_node_types", "accelerators"),
}


def misspelt(document: Document) -> Iterator[tuple[str, Document]]:
    """The document with one key changed, for each of its keys."""
    return misspellings(document, free=FREE)
