"""The largest remainder and its repair, against brute force."""

from __future__ import annotations

from itertools import accumulate, combinations, pairwise
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from sealring.coordinator.planning.apportion import apportion, largest_remainder, nearest


def test_equal_memory_gets_equal_layers() -> None:
    assert largest_remainder(9, [100, 100, 100]) == [3, 3, 3]
    assert largest_remainder(10, [100, 100, 100]) == [4, 3, 3]


def test_layers_follow_memory() -> None:
    assert largest_remainder(32, [192, 64]) == [24, 8]
    assert largest_remainder(32, [128, 64, 64]) == [16, 8, 8]


def test_everyone_gets_a_layer_and_no_weight_means_equal() -> None:
    assert largest_remainder(4, [1000, 1, 1]) == [2, 1, 1]
    assert largest_remainder(4, [0, 0]) == [2, 2]
    assert largest_remainder(40, [0, 10, -90]) == [1, 38, 1]


@given(st.lists(st.integers(0, 1000), min_size=1, max_size=8), st.integers(0, 40))
def test_shares_add_up(weights: list[int], more: int) -> None:
    shares = largest_remainder(len(weights) + more, weights)
    assert sum(shares) == len(weights) + more
    assert min(shares) >= 1


def test_a_heavy_embedding_moves_the_boundary() -> None:
    assert apportion([10] * 6, [30, 0], [55, 65]) == [2, 4]


def test_more_ranks_than_layers_is_nothing() -> None:
    assert apportion([1], [0, 0], [10, 10]) is None


cases = st.integers(1, 4).flatmap(
    lambda ranks: st.tuples(
        st.lists(st.integers(1, 12), min_size=ranks, max_size=9),
        st.lists(st.integers(0, 6), min_size=ranks, max_size=ranks),
        st.lists(st.integers(0, 40), min_size=ranks, max_size=ranks),
    )
)


def fitting(layers: list[int], extras: list[int], capacities: list[int], head: int = 1) -> list[list[int]]:
    found = []
    for cuts in combinations(range(1, len(layers)), len(extras) - 1):
        bounds = [0, *cuts, len(layers)]
        loads = [sum(layers[a:b]) + extra for (a, b), extra in zip(pairwise(bounds), extras, strict=True)]
        if bounds[1] >= head and all(
            load <= capacity for load, capacity in zip(loads, capacities, strict=True)
        ):
            found.append([b - a for a, b in pairwise(bounds)])
    return found


@given(cases, st.integers(1, 4))
def test_it_fits_exactly_when_brute_force_finds_something(
    case: tuple[list[int], list[int], list[int]], head: int
) -> None:
    layers, extras, capacities = case
    shares = apportion(layers, extras, capacities, head=head)
    options = fitting(layers, extras, capacities, head)
    assert (shares in options) if options else (shares is None)


@given(cases)
def test_the_fair_share_is_kept_where_it_fits(case: tuple[list[int], list[int], list[int]]) -> None:
    layers, extras, capacities = case
    room = [capacity - extra for capacity, extra in zip(capacities, extras, strict=True)]
    fair = largest_remainder(len(layers), room)
    if fair in fitting(layers, extras, capacities):
        assert apportion(layers, extras, capacities) == fair


@given(cases)
def test_what_does_not_fit_is_moved_as_little_as_possible(
    case: tuple[list[int], list[int], list[int]],
) -> None:
    layers, extras, capacities = case
    room = [capacity - extra for capacity, extra in zip(capacities, extras, strict=True)]
    fair = list(accumulate(largest_remainder(len(layers), room)))

    def moved(shares: list[int]) -> int:
        return sum(abs(end - wanted) for end, wanted in zip(accumulate(shares), fair, strict=True))

    shares = apportion(layers, extras, capacities)
    if shares is not None:
        assert moved(shares) == min(map(moved, fitting(layers, extras, capacities)))


def test_work_grows_with_ranks_times_layers_and_no_faster() -> None:
    class Counted(list[int]):
        looks = 0

        def __getitem__(self, at: Any) -> Any:
            self.looks += 1
            return super().__getitem__(at)

    count, ranks = 1000, 32
    prefix = Counted(range(count + 1))
    ends = nearest(prefix, [*[600] * (ranks - 1), 1], [(rank + 1) * count // ranks for rank in range(ranks)])
    assert ends is not None
    assert prefix.looks <= 8 * ranks * count
