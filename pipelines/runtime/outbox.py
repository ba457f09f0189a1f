"""Messages to a server that may be away for a while: sent in order, kept in a file until then.

The order of one outbox is the order in which its messages were put in. Delivery is repeated after
an outage or a kill, so a message that arrives twice must have the effect of one.
"""

import json
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from components.core import files
from components.core.errors import first_line

RETRY_SECONDS = 2.0
Message = dict[str, Any]  # JSON values


class UnavailableError(Exception):
    """The server cannot be reached now, or cannot work."""


class OutageError(RuntimeError):
    """The server was away for longer than a flow waits."""


class Connection:
    """Whether one server answers, and since when it does not; tries again in the background."""

    def __init__(self, name: str, *, max_outage: float, say: Callable[[str], None]) -> None:
        self.name, self.max_outage, self.say = name, max_outage, say
        self.lost_at: float | None = None
        self.reason = ""
        self.lock = threading.Lock()
        self.waiting: list[Outbox] = []
        self.thread: threading.Thread | None = None

    def lost(self, error: Exception) -> None:
        """Note that the server did not answer; said once per outage."""
        with self.lock:
            is_new, self.reason = self.lost_at is None, first_line(error)
            if is_new:
                self.lost_at = time.monotonic()
        if is_new:
            self.say(
                f"casemate: MLflow at {self.name} does not answer ({self.reason}); work goes on, "
                f"what it should get is kept and sent later (at most {self.max_outage:.0f} s)"
            )

    def found(self) -> None:
        """Note that the server answered."""
        with self.lock:
            since, self.lost_at = self.lost_at, None
        if since is not None:
            seconds = time.monotonic() - since
            self.say(f"casemate: MLflow at {self.name} answers again after {seconds:.0f} s")

    def check_patience(self) -> None:
        """Raise if the server has been away for too long."""
        with self.lock:
            away = 0.0 if self.lost_at is None else time.monotonic() - self.lost_at
        if self.lost_at is not None and away >= self.max_outage:
            raise OutageError(
                f"MLflow at {self.name} has not answered for {away:.0f} s "
                f"(tracking.max_outage: {self.max_outage:.0f}): {self.reason}; "
                "finished work is kept, the same command continues when it is back"
            )

    def wait_for(self, action: Callable[[], Any]) -> Any:
        """The result of a call that the flow cannot go on without; tried until it succeeds."""
        while True:
            try:
                result = action()
            except UnavailableError as error:
                self.lost(error)
                self.check_patience()
                time.sleep(min(RETRY_SECONDS, max(self.max_outage, 0.05)))
            else:
                self.found()
                return result

    def retry_later(self, outbox: "Outbox") -> None:
        """Send the messages of an outbox as soon as the server answers."""
        with self.lock:
            if outbox not in self.waiting:
                self.waiting.append(outbox)
            if self.thread is None:
                self.thread = threading.Thread(target=self._retry, name="outbox", daemon=True)
                self.thread.start()

    def _retry(self) -> None:
        while True:
            time.sleep(RETRY_SECONDS)
            with self.lock:
                boxes = list(self.waiting)
            for box in boxes:
                box.flush()
            with self.lock:
                self.waiting = [box for box in self.waiting if box.queue or box.is_busy]
                if not self.waiting:
                    self.thread = None
                    return


class Outbox:
    """Messages of one run. `deliver` sends one, or raises `UnavailableError`."""

    def __init__(
        self, path: Path, deliver: Callable[[Message], None], connection: Connection
    ) -> None:
        self.path, self.deliver, self.connection = path, deliver, connection
        self.queue: deque[Message] = deque()
        self.is_busy = False
        self.error: Exception | None = None  # of a message that was sent in the background
        self.changed = threading.Condition()

    def restore(self) -> None:
        """Send what an earlier process could not; the end of its run is not the end of this one."""
        if self.path.exists():
            lines = self.path.read_text(encoding="utf-8").splitlines()
            kept = [message for line in lines if (message := _read(line))]
            with self.changed:
                self.queue.extendleft(m for m in reversed(kept) if m["kind"] != "finish")
        self.flush()

    def put(self, message: Message) -> None:
        """Send a message, or keep it if the server is away or others come before it."""
        with self.changed:
            self._raise_earlier()
            self.queue.append(message)
            if self.is_busy or len(self.queue) > 1 or self.connection.lost_at is not None:
                self._keep(message)
                self.connection.retry_later(self)
                return
        self.flush()
        with self.changed:
            self._raise_earlier()

    def drain(self) -> None:
        """Wait until all is sent; raises `OutageError` if the server stays away."""
        while True:
            with self.changed:
                self._raise_earlier()
                if not self.queue and not self.is_busy:
                    return
                self.changed.wait(0.2)
            self.connection.check_patience()

    def flush(self) -> bool:
        """Send messages until none is left; False if the server is away or another thread sends."""
        with self.changed:
            if self.is_busy:
                return False
            self.is_busy = True
        try:
            while message := self._first():
                with self._sending(message):
                    self._try(message)
                self.connection.found()
        except UnavailableError as error:
            self.connection.lost(error)
            return False
        except Exception as error:
            with self.changed:
                self.error = error
        finally:
            self._settle()
        return not self.queue

    def _try(self, message: Message) -> None:
        """Send; twice before the server counts as away: an idle connection may have been closed."""
        try:
            self.deliver(message)
        except UnavailableError:
            if self.connection.lost_at is not None:
                raise
            self.deliver(message)

    def _first(self) -> Message | None:
        with self.changed:
            return self.queue[0] if self.queue else None

    @contextmanager
    def _sending(self, message: Message) -> Iterator[None]:
        """Take a message off the queue, unless the server was away."""
        try:
            yield
        except UnavailableError:
            raise
        except BaseException:
            with self.changed:
                self.queue.popleft()  # refused: it would be refused again
            raise
        with self.changed:
            self.queue.popleft()

    def _settle(self) -> None:
        """Make the file equal to the queue."""
        with self.changed:
            self.is_busy = False
            if self.queue:
                self.path.parent.mkdir(parents=True, exist_ok=True)
                files.write_text(self.path, "".join(map(_line, self.queue)))
                self.connection.retry_later(self)
            else:
                self.path.unlink(missing_ok=True)
            self.changed.notify_all()

    def _keep(self, message: Message) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8") as file:
            file.write(_line(message))
            file.flush()
            os.fsync(file.fileno())

    def _raise_earlier(self) -> None:
        if self.error is not None:
            error, self.error = self.error, None
            raise error


def _line(message: Message) -> str:
    return json.dumps(message) + "\n"


def _read(line: str) -> Message | None:
    """A message; None of a line that a kill cut off."""
    try:
        message: Message = json.loads(line)
    except json.JSONDecodeError:
        return None
    return message
