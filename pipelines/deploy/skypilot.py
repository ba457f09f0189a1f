"""A SkyPilot task: equal machines of some cloud, Ray on all of them, the flow on the first.

SkyPilot runs a Ray of its own (ports 6380 and 8266): ours has another port and is joined by its
address, never by `auto`.
"""

from importlib.metadata import version

from components.core.errors import CasemateError
from pipelines.deploy.flow import RECIPE_FILE, Flow
from pipelines.deploy.text import Document, note
from pipelines.runtime.worker_env import FIXED_ENV

PORT = 6379
TOKEN = "RAY_AUTH_TOKEN"
ACCELERATOR = "A100"
END = "END_OF_RECIPE"


def documents(flow: Flow) -> list[Document]:
    """The one document of the file."""
    groups = flow.groups  # one kind of machines does the work of all
    gpus = max(group.gpus for group in groups)
    resources: Document = {
        "image_id": f"docker:{flow.image}",
        "cpus": f"{max(group.cpus for group in groups)}+",
        "memory": f"{max(group.memory for group in groups)}+",
    }
    if gpus:
        resources |= note("any accelerator that sky show-gpus lists")
        resources["accelerators"] = {ACCELERATOR: gpus}
    if flow.settings.spot:
        resources["use_spot"] = True
    return [
        {
            "name": flow.name,
            **note("all machines work, the first one too"),
            "num_nodes": max(group.max_nodes for group in groups),
            "resources": resources,
            "envs": {"RAY_AUTH_MODE": "token", **FIXED_ENV},
            **note("values come from your shell: see the first lines"),
            "secrets": dict.fromkeys((TOKEN, *flow.settings.env)),
            "run": _script(flow),
        }
    ]


def header(flow: Flow) -> list[str]:
    """How the file is used."""
    secrets = " ".join(f"--secret {name}" for name in (TOKEN, *flow.settings.env))
    lost = " Spot machines may be lost, the first one too." if flow.settings.spot else ""
    return [
        f"needs:  the image with ray {version('ray')}",
        "once:   export RAY_AUTH_TOKEN=\"$(python3 -c 'import secrets; "
        "print(secrets.token_hex(32))')\"",
        f"start:  sky launch -c {flow.name} --down {secrets} FILE",
        f"The flow is ended after {flow.settings.deadline:g} h; the same file continues it.{lost}",
    ]


def _script(flow: Flow) -> str:
    """The commands of every machine; those of the first one end the task."""
    seconds = round(flow.settings.deadline * 3600)
    recipe, command = "", flow.command
    if flow.file is not None:
        if END in flow.file:
            raise CasemateError("recipe", flow.recipe.source, f"holds the line {END}; remove it")
        recipe = f"cat > ~/{RECIPE_FILE} <<'{END}'\n{flow.file.rstrip()}\n{END}\n"
        command = f"casemate run ~/{RECIPE_FILE}"
    return f"""set -e
head=$(echo "$SKYPILOT_NODE_IPS" | head -n1)
if [ "$SKYPILOT_NODE_RANK" != 0 ]; then
  until ray health-check --address="$head:{PORT}"; do sleep 2; done
  ray start --address="$head:{PORT}"
  sleep 5
  exit 0
fi
ray start --head --node-ip-address="$head" --port={PORT} --dashboard-host=127.0.0.1
{recipe}timeout {seconds} {command} --address "$head:{PORT}"
"""
