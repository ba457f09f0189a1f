"""moto's S3 server, with writes one at a time: run as a file, with the options of `moto_server`.

moto looks whether a key exists and stores it in two steps; of several threads that create one key,
two may win.
"""

import threading

from moto.s3.responses import S3Response
from moto.server import main

_writing = threading.Lock()
_put_object = S3Response.put_object


def put_object(self):
    """Create or replace an object while no other request does."""
    with _writing:
        return _put_object(self)


S3Response.put_object = put_object

if __name__ == "__main__":
    main()
