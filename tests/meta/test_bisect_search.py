"""The search of a bisection against brute force: right, as narrow as can be, as short as promised."""

from collections.abc import Callable, Collection, Sequence
from math import ceil, log2

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ci.bisect.search import Answer, Search, line

Parents = tuple[tuple[int, ...], ...]


def ancestors(parents: Sequence[Sequence[int]], item: int) -> set[int]:
    """The item and all before it."""
    found, waiting = set(), [item]
    while waiting:
        item = waiting.pop()
        if item not in found:
            found.add(item)
            waiting += parents[item]
    return found


def searched(
    parents: Parents, answer: Callable[[int], Answer], known_old: int = 1
) -> tuple[Search, dict[int, Answer]]:
    """A search to its end, and what was answered."""
    search, answers = Search(parents, known_old), {}
    while (item := search.next()) is not None:
        assert item not in answers
        answers[item] = answer(item)
        search.tell(item, answers[item])
    return search, answers


def truth(parents: Parents, culprit: int, skips: Collection[int] = ()) -> Callable[[int], Answer]:
    """What is answered if everything from the culprit on is new."""

    def answer(item: int) -> Answer:
        if item in skips:
            return "skip"
        return "new" if culprit in ancestors(parents, item) else "old"

    return answer


def possible(parents: Parents, answers: dict[int, Answer], known_old: int) -> set[int]:
    """By brute force: every culprit that explains all answers and the two ends."""
    last = len(parents) - 1
    found = set()
    for culprit in range(known_old, last + 1):
        told = truth(parents, culprit)
        explains = all(answer in ("skip", told(item)) for item, answer in answers.items())
        if explains and told(last) == "new":
            found.add(culprit)
    return found


@st.composite
def histories(draw: st.DrawFn) -> tuple[Parents, int]:
    """2 to 24 items with one head and 1 to 3 known old ones; shrinks to a list of two."""
    count = draw(st.integers(2, 24))
    known_old = draw(st.integers(1, min(3, count - 1)))
    parents: list[tuple[int, ...]] = [()] * known_old
    for item in range(known_old, count):
        merged = draw(st.sets(st.integers(0, item - 1), max_size=2))
        parents.append(tuple(sorted(merged or {item - 1})))
    # One head: the last item descends from all that nothing else descends from.
    loose = set(range(known_old, count - 1)) - {p for entry in parents[:-1] for p in entry}
    parents[-1] = tuple(sorted({*parents[-1], *loose}))
    return tuple(parents), known_old


@given(histories(), st.data())
def test_the_culprit_is_reported_and_nothing_that_could_be_ruled_out(
    history: tuple[Parents, int], data: st.DataObject
) -> None:
    parents, known_old = history
    culprit = data.draw(st.integers(known_old, len(parents) - 1), label="culprit")
    skips = data.draw(st.sets(st.integers(known_old, len(parents) - 1)), label="skips")
    search, answers = searched(parents, truth(parents, culprit, skips), known_old)
    assert culprit in search.candidates
    assert set(search.candidates) == possible(parents, answers, known_old)
    # Nothing is left that an answer would tell something about: all but the last could not tell.
    assert set(search.candidates[:-1]) <= skips
    boundary = {p for item in search.candidates for p in parents[item]} - set(search.candidates)
    assert set(search.boundary()) == boundary
    assert all(truth(parents, culprit)(item) == "old" for item in boundary)


@given(st.integers(2, 400), st.data())
@example(257, None)
def test_a_list_takes_no_more_steps_than_promised(count: int, data: st.DataObject | None) -> None:
    if data is None:
        culprit, skips = 128, set(range(120, 137))
    else:
        culprit = data.draw(st.integers(1, count - 1), label="culprit")
        start = data.draw(st.integers(1, count - 1), label="start")
        skips = set(range(start, start + data.draw(st.integers(0, 60), label="length")))
        skips |= data.draw(st.sets(st.integers(1, count - 1), max_size=8), label="more skips")
    search, answers = searched(line(count), truth(line(count), culprit, skips))
    skipped = [item for item, answer in answers.items() if answer == "skip"]
    assert len(answers) <= ceil(log2(count - 1)) + len(skipped)
    assert culprit in search.candidates
    if not skips & {culprit, culprit - 1}:
        assert search.candidates == (culprit,)
    else:
        first, last = search.candidates[0], search.candidates[-1]
        assert search.candidates == tuple(range(first, last + 1))
        assert set(range(first, last)) <= skips


def test_a_broken_range_is_left_in_jumps() -> None:
    """By going to the nearest neighbour each time, one would judge all of its 150 items."""
    count, skips = 1200, set(range(520, 670))
    _, answers = searched(line(count), truth(line(count), 900, skips))
    assert sum(answer == "skip" for answer in answers.values()) < 30
    assert len(answers) <= ceil(log2(count - 1)) + 30


def test_what_is_known_beforehand_counts() -> None:
    search = Search(line(9))
    search.tell(2, "old")
    search.tell(4, "new")
    assert (search.next(), search.steps, search.candidates) == (3, 1, (3, 4))
    assert not search.is_open(2)
    with pytest.raises(ValueError, match="item 2 is not open"):
        search.tell(2, "new")


def test_histories_that_are_none() -> None:
    for known_old in (0, 2):
        with pytest.raises(ValueError, match="needs old items and a new one"):
            Search(line(2), known_old)
    with pytest.raises(ValueError, match="does not come before"):
        Search(((), (2,), (1,)))


def test_a_long_history_is_searched_at_once() -> None:
    """As many revisions as vLLM has between two releases, merges among them."""
    count = 3000
    parents = tuple(
        () if item == 0 else (item - 1, item - 3) if item % 7 == 0 and item > 7 else (item - 1,)
        for item in range(count)
    )
    search, answers = searched(parents, truth(parents, 1234))
    assert search.candidates == (1234,)
    assert len(answers) <= 14
