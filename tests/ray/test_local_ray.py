"""A local Ray has the processes that it needs, and none for clusters and dashboards."""

import psutil
import pytest
import ray

pytestmark = pytest.mark.ray


def test_a_local_ray_starts_without_monitors_and_api_server(ray_session):
    """They are left out by methods of Ray's own node: this fails when Ray no longer asks them."""
    session = ray._private.worker._global_node.get_session_dir_path()
    found = [process.info["cmdline"] or [] for process in psutil.process_iter(["cmdline"])]
    ours = [" ".join(words) for words in found if session in " ".join(words)]
    assert any("raylet/raylet" in words for words in ours)
    unused = ("/monitor.py", "/log_monitor.py", "/dashboard/dashboard.py")
    assert not [words for words in ours if any(name in words[:400] for name in unused)]
    assert ray.get(ray.remote(lambda: 7).remote()) == 7
