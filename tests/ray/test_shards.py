"""The sharded executor on real actors: same parts for any number; kills cost unfinished work."""

import os
import signal
import time
from collections import Counter
from pathlib import Path

import pyarrow as pa
import pytest

from components.core.errors import CasemateError
from components.core.evaluations import EVALUATIONS
from pipelines.recipe.schema.place import ClusterSection
from pipelines.runtime import shards
from pipelines.runtime.cluster import LEFT_BY_RAY_DATA, end_idle_actors
from pipelines.runtime.parts import PartStore
from pipelines.runtime.shards import ShardFailedError, Unit, release_workers, run_units

pytestmark = pytest.mark.ray


def make_square(folder):
    """Work that leaves a trace of every computation."""

    def square(number):
        trace = Path(folder) / f"{number}-{os.getpid()}-{time.time_ns()}"
        trace.write_text("")
        return pa.table({"number": [number], "square": [number**2]})

    return square


def square_after(folder, accident):
    """Squares, each after what may happen before."""

    def work(number):
        accident(number)
        return make_square(folder)(number)

    return work


def make_deadly(folder):
    """Kills its own process at one unit, the first time only."""

    def dies_once(number):
        mark = Path(folder) / f"seen-{number}"
        if number == 20 and not mark.exists():
            mark.write_text("")
            time.sleep(1)  # what was computed before is on its way to the driver
            os.kill(os.getpid(), signal.SIGKILL)

    return square_after(folder, dies_once)


def make_suicidal(folder):
    """Kills its process at one unit every time."""
    return square_after(folder, lambda number: number == 3 and os.kill(os.getpid(), signal.SIGKILL))


def failing_at(folder, place, error):
    """Squares, except at one unit."""

    def fails(number):
        if number == place:
            raise error

    return square_after(folder, fails)


def make_faulty(folder):
    return failing_at(folder, 2, ArithmeticError("item seven has no square"))


class UnsendableError(Exception):
    def __reduce__(self):
        raise TypeError("cannot be pickled")


def make_unsendable(folder):
    return failing_at(folder, 4, UnsendableError("holds an open file"))


def make_mistaken(folder):
    raise CasemateError("model", folder, "is not a model; train one")


@pytest.fixture(scope="module", autouse=True)
def _give_cpus_back(ray_session):
    yield
    release_workers()


def units(count=8):
    return [Unit(f"u{i:03d}", f"item {i}", i) for i in range(count)]


def execute(folder: Path, make, *, num_actors: int = 2, count: int = 8) -> PartStore:
    (folder / "traces").mkdir(parents=True, exist_ok=True)
    parts = stored(folder)
    run_units(
        units(count),
        make=make,
        config=str(folder / "traces"),
        parts=parts,
        cluster=ClusterSection(num_actors=num_actors),
        label=f"{make.__name__}-{folder}",
    )
    return parts


def stored(folder: Path) -> PartStore:
    return PartStore.in_folder(folder / "parts", run_id="r1")


def groups(folder: Path) -> list[Path]:
    return sorted((folder / "parts").glob("*/*.arrow"))


def traces(folder: Path) -> list[str]:
    return sorted(p.name.split("-")[0] for p in (folder / "traces").iterdir() if p.name[0] != "s")


def test_any_number_of_actors_writes_the_same_parts_and_none_twice(ray_session, tmp_path):
    contents = []
    for num_actors in (1, 2):
        folder = tmp_path / str(num_actors)
        parts = execute(folder, make_square, num_actors=num_actors)
        contents.append([table.to_pydict() for table in parts.tables(u.name for u in units())])
        assert traces(folder) == [str(i) for i in range(8)]
    assert contents[0] == contents[1] == [{"number": [i], "square": [i**2]} for i in range(8)]
    assert len(groups(tmp_path / "1")) < 8  # several units in one object
    execute(tmp_path / "1", make_square)  # a second start finds everything done
    assert len(traces(tmp_path / "1")) == 8


def test_actors_that_ray_data_leaves_can_be_ended_and_come_back(ray_session):
    import ray.data

    def left():
        found = ray.util.list_named_actors(all_namespaces=True)
        return {actor["namespace"] for actor in found} & set(LEFT_BY_RAY_DATA)

    release_workers()  # Ray Data waits for their CPUs
    for _ in range(2):
        assert len(ray.data.range(3).map(lambda row: row).take_all()) == 3
        assert left()
        end_idle_actors()
        assert not left()


def make_long(folder):
    """One unit that evaluates images until somebody has seen it."""

    def work(number):
        while not (Path(folder) / "seen").exists():
            EVALUATIONS.add(10)
            time.sleep(0.05)
        return pa.table({"number": [number]})

    return work


def test_a_long_unit_shows_its_evaluations_before_it_ends(ray_session, tmp_path, monkeypatch):
    seen = []

    def look(self, state):
        if state.evaluations and not seen:
            seen.append((state.evaluations, state.under_way))
            (tmp_path / "seen").write_text("")

    monkeypatch.setattr(shards._Desk, "look", look)
    run_units(
        [Unit("u", "item 0", 0, num_items=4, num_evaluations=10_000)],
        make=make_long,
        config=str(tmp_path),
        parts=stored(tmp_path),
        cluster=ClusterSection(num_actors=1),
        label=f"long-{tmp_path}",
    )
    ((evaluations, under_way),) = seen
    assert 0 < under_way == 4 * min(1, evaluations / 10_000)


def test_a_second_start_computes_only_what_is_missing(ray_session, tmp_path):
    execute(tmp_path, make_square)
    lost = groups(tmp_path)[-1]
    missing = sorted(set(map(str, range(8))) - _kept_without(tmp_path, lost))
    assert missing
    execute(tmp_path, make_square)
    assert traces(tmp_path) == sorted([*map(str, range(8)), *missing])


def _kept_without(folder: Path, lost: Path) -> set[str]:
    lost.unlink()
    parts = stored(folder)
    return {str(unit.payload) for unit in units() if parts.has(unit.name)}


def test_a_killed_worker_costs_its_unfinished_lease_only(ray_session, tmp_path):
    parts = execute(tmp_path, make_deadly, count=40)
    assert all(parts.has(u.name) for u in units(40))
    again = Counter(traces(tmp_path))
    assert set(again) == {str(i) for i in range(40)}
    assert again["20"] == 1
    assert sum(again.values()) <= 40 + 9  # the units of its lease before that one, of 9 at most


def test_a_unit_that_kills_its_worker_three_times_fails_and_the_rest_is_kept(ray_session, tmp_path):
    with pytest.raises(ShardFailedError, match=r"u003 \(item 3\)"):
        execute(tmp_path, make_suicidal, num_actors=1)
    parts = stored(tmp_path)
    kept = [u.name for u in units() if parts.has(u.name)]
    assert kept == [u.name for u in units() if u.name != "u003"]  # units behind it are not blamed


def test_a_failing_unit_is_named_with_its_error_and_the_rest_is_kept(ray_session, tmp_path):
    with pytest.raises(ShardFailedError, match=r"u002 \(item 2\).*item seven has no square"):
        execute(tmp_path, make_faulty)
    parts = stored(tmp_path)
    assert [u.name for u in units() if not parts.has(u.name)] == ["u002"]


def test_an_error_that_the_driver_cannot_load_keeps_its_text(ray_session, tmp_path):
    with pytest.raises(ShardFailedError, match=r"u004 \(item 4\).*holds an open file"):
        execute(tmp_path, make_unsendable)


def test_a_users_mistake_inside_a_worker_stays_one_line(ray_session, tmp_path):
    with pytest.raises(CasemateError, match="is not a model; train one") as caught:
        execute(tmp_path, make_mistaken)
    assert "\n" not in str(caught.value)
