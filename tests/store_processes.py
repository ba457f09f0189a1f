"""What the processes of store tests do; run from a fork server that has never used obstore."""

import multiprocessing as mp
import os
import pickle
import signal
import time
from pathlib import Path

from pipelines.runtime.locks import Lock, LockedError
from pipelines.runtime.store import Store

CONTEXT = mp.get_context("forkserver")
CONTEXT.set_forkserver_preload(["tests.store_processes"])


def together(function, *arguments, number):
    """The results of a function that several processes run at once, as `function(i, ...)`."""
    results, gate = CONTEXT.Queue(), CONTEXT.Barrier(number)
    env = {k: v for k, v in os.environ.items() if k.startswith(("AWS_", "CASEMATE_"))}
    processes = [
        CONTEXT.Process(target=_run, args=(env, gate, results, function, i, *arguments))
        for i in range(number)
    ]
    for process in processes:
        process.start()
    found = [results.get(timeout=120) for _ in processes]
    for process in processes:
        process.join()
    return found


def killed(function, *arguments):
    """Start a process that kills itself; returns when it is dead."""
    env = {k: v for k, v in os.environ.items() if k.startswith(("AWS_", "CASEMATE_"))}
    process = CONTEXT.Process(target=_run, args=(env, None, None, function, 0, *arguments))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def _run(env, gate, results, function, number, *arguments):
    os.environ.update(env)
    if gate is None:
        function(number, *arguments)
        return
    results.put(function(number, gate, *arguments))


def create(number, gate, root, rounds):
    """Per round: whether this process was first, and what the key holds then."""
    store, seen = Store(root), []
    for index in range(rounds):
        mine = f"{number}".encode() * 1000
        gate.wait()
        first = store.put_new(f"race/{index}", mine)
        seen.append((first, store.get(f"race/{index}")))
    return seen


def lock(number, gate, root, rounds):
    """Per round: the fencing number of the lock, 0 if it was refused."""
    store, seen = Store(root), []
    for index in range(rounds):
        mine = Lock(store, f"flow-{index}", ttl=60)
        gate.wait()
        try:
            seen.append(mine.acquire().fence)
        except LockedError:
            seen.append(0)
    gate.wait()
    return seen


def count_under_lock(number, gate, root, counter, rounds):
    """Add 1 to the number in a file while the lock is held: none is lost."""
    store, fences = Store(root), []
    gate.wait()
    for _ in range(rounds):
        with Lock(store, "counter", ttl=60, wait=100) as held:
            value = int(Path(counter).read_text())
            time.sleep(0.002)
            Path(counter).write_text(str(value + 1))
            fences.append(held.fence)
    return fences


def read_local(number, gate, root, ref):
    """Path and content of a file."""
    store = pickle.loads(pickle.dumps(Store(root)))
    gate.wait()
    path = store.local(ref)
    return path, path.read_bytes()


def die_in_fill(number, root, ref):
    """Die after the first piece of a download."""
    store = Store(root)

    def chunks(key):
        yield store.get_range(key, 0, 1000)
        os.kill(os.getpid(), signal.SIGKILL)

    store.cache.path(ref, chunks, where="")


def die_with_lock(number, root, name):
    Lock(Store(root), name, ttl=1000).acquire()
    os.kill(os.getpid(), signal.SIGKILL)


def die_in_put(number, root, key):
    """Die between writing the content and giving it its name."""
    os.link = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
    Store(root).put_new(key, b"never published")
