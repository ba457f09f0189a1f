"""The outbox: order, idempotence, kills and the end of patience, with a real file and threads."""

import json
import threading
import time

import pytest

from pipelines.runtime import outbox as module
from pipelines.runtime.outbox import Connection, OutageError, Outbox, UnavailableError


class Server:
    """Keeps messages by number, as MLflow keeps a metric by step: repeating one changes nothing."""

    def __init__(self) -> None:
        self.is_up, self.loses_answers, self.received, self.refused = True, False, [], set()

    def deliver(self, message):
        if not self.is_up:
            raise UnavailableError("Connection refused")
        if message["number"] in self.refused:
            raise ValueError(f"{message['number']} is not welcome")
        if message["number"] not in self.received:
            self.received.append(message["number"])
        if self.loses_answers:
            raise UnavailableError("reset by peer")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(module, "RETRY_SECONDS", 0.02)


@pytest.fixture
def server():
    return Server()


def numbered(number: int, kind: str = "metrics") -> dict:
    return {"kind": kind, "number": number}


def make(tmp_path, server, *, max_outage: float = 60):
    said: list[str] = []
    connection = Connection("http://host", max_outage=max_outage, say=said.append)
    return Outbox(tmp_path / "unfinished" / "outbox.jsonl", server.deliver, connection), said


def test_without_an_outage_nothing_is_written(tmp_path, server):
    box, said = make(tmp_path, server)
    for number in range(3):
        box.put(numbered(number))
    box.drain()
    assert server.received == [0, 1, 2]
    assert not box.path.parent.exists()
    assert said == []


def test_messages_of_an_outage_wait_on_disk_and_are_sent_in_order(tmp_path, server):
    box, said = make(tmp_path, server)
    box.put(numbered(0))
    server.is_up = False
    for number in range(1, 6):
        box.put(numbered(number))
    kept = [json.loads(line)["number"] for line in box.path.read_text().splitlines()]
    assert kept == [1, 2, 3, 4, 5]
    assert len(said) == 1, "one line per outage"
    assert "Connection refused" in said[0]
    server.is_up = True
    box.drain()
    assert server.received == [0, 1, 2, 3, 4, 5]
    assert not box.path.exists()
    assert len(said) == 2
    assert "answers again" in said[1]


def test_an_answer_that_is_lost_has_the_effect_of_one_message(tmp_path, server):
    box, _ = make(tmp_path, server)
    server.loses_answers = True
    box.put(numbered(0))
    box.put(numbered(1))
    server.loses_answers = False
    box.drain()
    assert server.received == [0, 1]


def test_a_killed_process_leaves_its_messages_to_the_next(tmp_path, server):
    box, _ = make(tmp_path, server)
    server.is_up = False
    for number in range(3):
        box.put(numbered(number))
    box.put(numbered(9, kind="finish"))  # the killed run ended, the resumed one has not
    with box.path.open("a") as file:
        file.write('{"kind": "metr')  # cut off by the kill
    box.connection.waiting.clear()  # its threads die with it
    later = Server()
    again, _ = make(tmp_path, later)
    again.restore()
    again.put(numbered(3))
    again.drain()
    assert later.received == [0, 1, 2, 3]


def test_a_refused_message_is_an_error_and_does_not_hold_up_the_others(tmp_path, server):
    box, _ = make(tmp_path, server)
    server.refused = {1}
    with pytest.raises(ValueError, match="1 is not welcome"):
        box.put(numbered(1))
    server.is_up = False
    box.put(numbered(0))
    box.put(numbered(1))
    box.put(numbered(2))
    server.is_up = True
    with pytest.raises(ValueError, match="1 is not welcome"):
        box.drain()
    box.drain()
    assert server.received == [0, 2]


def test_patience_ends_with_one_line_and_the_messages_stay(tmp_path, server):
    box, _ = make(tmp_path, server, max_outage=0.2)
    server.is_up = False
    box.put(numbered(0))
    with pytest.raises(
        OutageError, match=r"http://host has not answered for .* \(tracking.max_outage: 0\)"
    ):
        box.drain()
    assert json.loads(box.path.read_text())["number"] == 0


def test_a_call_that_is_needed_now_waits_for_the_server(tmp_path, server):
    box, said = make(tmp_path, server)
    tries = iter([UnavailableError("down"), UnavailableError("down"), None])

    def call() -> str:
        if error := next(tries):
            raise error
        return "run-1"

    assert box.connection.wait_for(call) == "run-1"
    assert len(said) == 2


def test_threads_that_write_at_the_same_time_lose_nothing(tmp_path, server):
    box, _ = make(tmp_path, server)

    def write(start: int) -> None:
        for number in range(start, start + 50):
            server.is_up = number % 7 != 0
            box.put(numbered(number))

    threads = [threading.Thread(target=write, args=(start,)) for start in (0, 100, 200)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    server.is_up = True
    box.drain()
    assert sorted(server.received) == [*range(50), *range(100, 150), *range(200, 250)]
    for start in (0, 100, 200):  # the order of each writer
        own = [n for n in server.received if start <= n < start + 100]
        assert own == sorted(own)
    deadline = time.monotonic() + 10
    while box.connection.thread is not None:
        assert time.monotonic() < deadline, "the thread ends with the outage"
        time.sleep(0.02)
