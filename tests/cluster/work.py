"""A driver of its own: squares numbers on a cluster. Run as `-m tests.cluster.work ADDRESS FOLDER`.

Every computation leaves a trace `<number>-<node>` in the folder.
"""

import argparse
import time
from pathlib import Path

import pyarrow as pa

from components.core.units import Unit
from pipelines.recipe.schema.place import ClusterSection
from pipelines.runtime.cluster import ray_cluster
from pipelines.runtime.parts import PartStore
from pipelines.runtime.shards import run_units


def make_square(config):
    """Squares; on nodes whose id is in the file `broken` every unit raises."""
    import ray

    folder, seconds = Path(config["folder"]), config["seconds"]
    node = ray.get_runtime_context().get_node_id()

    def square(number):
        broken = folder / "broken"
        if broken.exists() and node in broken.read_text():
            (folder / f"failed-{number}-{node}").write_text("")
            raise ArithmeticError("CUDA error: an illegal memory access was encountered")
        time.sleep(seconds)
        (folder / f"{number}-{node}").write_text("")
        return pa.table({"square": [number**2]})

    return square


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("address")
    options.add_argument("folder", type=Path)
    options.add_argument("--units", type=int, default=20)
    options.add_argument("--actors", type=int, default=None)
    options.add_argument("--seconds", type=float, default=0.3)
    options.add_argument("--max-wait", type=float, default=300)
    asked = options.parse_args()
    cluster = ClusterSection(
        address=asked.address, num_actors=asked.actors, max_wait=asked.max_wait
    )
    with ray_cluster(cluster):
        run_units(
            [Unit(f"u{i:04d}", f"item {i}", i) for i in range(asked.units)],
            make=make_square,
            config={"folder": str(asked.folder), "seconds": asked.seconds},
            parts=PartStore.in_folder(asked.folder / "parts", run_id="r"),
            cluster=cluster,
            label="squares",
        )


if __name__ == "__main__":
    main()
