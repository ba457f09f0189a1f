"""moto's S3 server: `python -m tests.moto_server PORT`. Conditional writes come one at a time.

moto looks whether a key exists and creates it in two steps; between them another thread may do the
same, which S3 rules out.
"""

import sys
import threading
from collections.abc import Callable, Iterable
from typing import Any

from moto.server import DomainDispatcherApplication, create_backend_app
from werkzeug.serving import run_simple

App = Callable[[dict[str, Any], Any], Iterable[bytes]]


def one_at_a_time(app: App) -> App:
    """The application with a lock around writes that must create their key."""
    lock = threading.Lock()

    def locked(environ: dict[str, Any], start_response: Any) -> Iterable[bytes]:
        if "HTTP_IF_NONE_MATCH" not in environ:
            return app(environ, start_response)
        with lock:
            return list(app(environ, start_response))

    return locked


if __name__ == "__main__":
    s3 = one_at_a_time(DomainDispatcherApplication(create_backend_app))
    run_simple("127.0.0.1", int(sys.argv[1]), s3, threaded=True)
