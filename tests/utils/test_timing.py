"""The clock of a command's parts: rlhf/utils/timing.py."""

import pytest

from rlhf.utils.timing import Timing


class Hours:
    """A clock that a test sets."""

    def __init__(self):
        self.seconds = 0.0

    def __call__(self):
        return self.seconds


class Event:
    """A point in a GPU's stream that the GPU reaches at a given second."""

    def __init__(self, gpu):
        self.gpu = gpu
        self.at = max(gpu.now.seconds, gpu.busy_until)

    def query(self):
        return self.gpu.now.seconds >= self.at

    def elapsed_time(self, later):
        return 1_000 * (later.at - self.at)


class GPU:
    """A GPU that works on what it was given until `busy_until`."""

    def __init__(self, now):
        self.now = now
        self.busy_until = 0.0

    def record(self):
        return Event(self)


def test_the_parts_add_up_to_the_whole_time_and_an_inner_part_is_not_counted_twice():
    now = Hours()
    timing = Timing(now)
    now.seconds = 1
    with timing("evaluation"):
        now.seconds = 3
        with timing("sampling"):
            now.seconds = 7
        now.seconds = 8
    with timing("sampling"):
        now.seconds = 10
    before = timing.seconds()
    assert before == {"other": 1, "evaluation": 3, "evaluation/sampling": 4, "sampling": 2}
    assert sum(before.values()) == now.seconds
    with pytest.raises(ValueError), timing("sampling"):
        now.seconds = 15
        raise ValueError
    now.seconds = 16
    assert timing.since(before) == {"other": 1, "evaluation": 0, "evaluation/sampling": 0, "sampling": 5}
    timing.restart()
    now.seconds = 18
    assert timing.seconds() == {"other": 2}


def test_on_a_gpu_the_time_of_a_part_is_that_of_its_work_and_reading_it_does_not_wait():
    now = Hours()
    gpu = GPU(now)
    timing = Timing(now)
    timing.record = gpu.record
    timing.restart()
    with timing("optimizer steps"):
        now.seconds = 1  # the program only launches the work
        gpu.busy_until = 10
    with timing("sampling"):
        now.seconds = 2
        gpu.busy_until = 14
    assert timing.seconds().get("optimizer steps", 0) == 0, "the GPU has not reached its end"
    now.seconds = 20  # it has, and the program has waited for it
    seconds = timing.seconds()
    assert {part: seconds[part] for part in ("optimizer steps", "sampling")} == {"optimizer steps": 10, "sampling": 4}
    assert seconds["other"] == 6
