"""A local Ray without the processes that only clusters and dashboards need."""

from collections.abc import Iterator
from contextlib import contextmanager

from ray._private import node


class LocalNode(node.Node):  # type: ignore[misc]  # Ray has no types
    """Ray's node with three processes fewer; Ray has no option for it.

    The monitor asks an autoscaler for nodes, the log monitor sends logs to a driver that prints
    them, the API server without a dashboard collects usage statistics: a local Ray does neither.
    """

    def start_monitor(self) -> None:
        """No autoscaler."""

    def start_log_monitor(self) -> None:
        """Logs stay in the session's folder."""

    def start_api_server(self, **_: object) -> None:
        """No dashboard."""


@contextmanager
def local_nodes() -> Iterator[None]:
    """Inside, `ray.init` starts a `LocalNode`."""
    before, node.Node = node.Node, LocalNode
    try:
        yield
    finally:
        node.Node = before
