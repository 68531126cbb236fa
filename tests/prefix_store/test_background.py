import os
import sys
import threading
import time

import pytest

from worker.prefix_store.background import Pace, lower_priority


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere a thread has no niceness of its own")
def test_only_the_calling_thread_gets_a_lower_priority() -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    within = list[int]()

    def run() -> None:
        lower_priority()
        within.append(os.getpriority(os.PRIO_PROCESS, threading.get_native_id()))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert os.getpriority(os.PRIO_PROCESS, 0) == before
    assert within[0] > before or before == 19


def test_work_takes_at_least_as_long_as_its_rate_demands() -> None:
    pace = Pace(10_000_000, threading.Event())
    began = time.monotonic()
    for _ in range(50):
        pace(10_000)
    assert time.monotonic() - began >= 0.045


def test_a_pause_before_does_not_allow_a_burst() -> None:
    pace = Pace(10_000_000, threading.Event())
    pace(10_000)
    time.sleep(0.1)
    began = time.monotonic()
    for _ in range(50):
        pace(10_000)
    assert time.monotonic() - began >= 0.045


def test_there_are_no_pauses_in_a_hurry() -> None:
    unlimited = threading.Event()
    unlimited.set()
    pace = Pace(1, unlimited)
    began = time.monotonic()
    for _ in range(50):
        pace(10_000)
    assert time.monotonic() - began < 60


def test_work_goes_on_slowly_while_there_is_other_work() -> None:
    no_other_work = threading.Event()
    pace = Pace(1e12, threading.Event(), no_other_work)
    began = time.monotonic()
    for _ in range(3):
        pace(1 << 20)
    assert time.monotonic() - began >= 0.1
    no_other_work.set()
    for _ in range(1000):
        pace(1 << 20)
    assert time.monotonic() - began < 30  # 0.035 s each if it still gave way


def test_what_was_done_in_a_hurry_is_not_paid_for_afterwards() -> None:
    unlimited = threading.Event()
    unlimited.set()
    pace = Pace(1e6, unlimited)
    for _ in range(100):
        pace(1 << 20)
    unlimited.clear()
    began = time.monotonic()
    pace(10_000)
    assert time.monotonic() - began < 50  # of the 105 s that the work before takes at this rate
