"""Results made ahead: the same ones in order, errors where they are due, the thread used or not."""

import threading
import time

import pytest

from components.core.prefetch import made_ahead


@pytest.mark.parametrize("in_thread", [True, False])
@pytest.mark.parametrize("count", [0, 1, 2, 9])
def test_results_come_in_order(in_thread, count):
    assert list(made_ahead(lambda n: n * n, range(count), in_thread=in_thread)) == [
        n * n for n in range(count)
    ]


def test_the_next_is_made_while_one_is_used_and_no_further():
    begun, seen = [], []
    for value in made_ahead(lambda n: begun.append(n) or n, range(5), in_thread=True):
        deadline = time.monotonic() + 10
        while len(begun) < min(value + 2, 5) and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(len(begun))
    assert seen == [2, 3, 4, 5, 5]


@pytest.mark.parametrize("in_thread", [True, False])
def test_an_error_is_raised_where_its_result_is_due(in_thread):
    def inverse(n):
        return 1 / n

    results = made_ahead(inverse, [2, 1, 0, 5], in_thread=in_thread)
    assert [next(results), next(results)] == [0.5, 1]
    with pytest.raises(ZeroDivisionError):
        next(results)


def test_only_a_thread_of_its_own_works_ahead():
    here = threading.current_thread()

    def whose(_):
        return threading.current_thread()

    assert set(made_ahead(whose, range(3), in_thread=False)) == {here}
    (other,) = set(made_ahead(whose, range(3), in_thread=True))
    assert other is not here
