"""Which group comes next, and with which probability."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from buffers.selectors import (
    OrderedSelector,
    PrioritizedSelector,
    Selector,
    SelectorKind,
    UniformSelector,
    make_selector,
)

KINDS: list[SelectorKind] = ["fifo", "freshest", "uniform", "prioritized"]


def selector_of(kind: SelectorKind) -> Selector:
    return make_selector(kind, rng=random.Random(0), priority_exponent=1.0)


def put(selector: Selector, key: str, *, order: int = 0, version: int = 0, priority: float = 1.0) -> None:
    selector.insert(key, order=order, version=version, priority=priority)


@pytest.mark.parametrize("kind", KINDS)
def test_every_key_comes_out_exactly_once(kind: SelectorKind) -> None:
    selector = selector_of(kind)
    keys = [f"uid-{i}" for i in range(500)]
    for i, key in enumerate(keys):
        put(selector, key, order=i, version=i % 7, priority=float(i % 5))
    assert sorted(selector.pop()[0] for _ in keys) == sorted(keys)
    assert len(selector) == 0


@pytest.mark.parametrize("kind", KINDS)
def test_deleted_keys_never_come_out(kind: SelectorKind) -> None:
    selector = selector_of(kind)
    for i in range(100):
        put(selector, f"uid-{i}", order=i, version=i % 7, priority=float(i))
    for i in range(0, 100, 2):
        selector.delete(f"uid-{i}")
    assert "uid-2" not in selector and "uid-3" in selector
    assert {selector.pop()[0] for _ in range(50)} == {f"uid-{i}" for i in range(1, 100, 2)}


@pytest.mark.parametrize("kind", KINDS)
def test_a_second_insert_of_a_key_an_unknown_delete_and_an_empty_pop_are_errors(kind: SelectorKind) -> None:
    selector = selector_of(kind)
    put(selector, "a")
    with pytest.raises(KeyError):
        put(selector, "a")
    with pytest.raises(KeyError):
        selector.delete("b")
    selector.pop()
    with pytest.raises(IndexError):
        selector.pop()


def test_fifo_is_the_order_of_completion_whatever_the_order_of_insertion() -> None:
    selector = OrderedSelector(freshest=False)
    for order in (3, 1, 2):
        put(selector, f"uid-{order}", order=order)
    assert [selector.pop() for _ in range(3)] == [("uid-1", 1.0), ("uid-2", 1.0), ("uid-3", 1.0)]


def test_a_key_that_comes_back_takes_its_old_place() -> None:
    selector = OrderedSelector(freshest=False)
    for order in (1, 2, 3):
        put(selector, f"uid-{order}", order=order)
    key, _ = selector.pop()
    put(selector, key, order=1)
    assert selector.pop()[0] == "uid-1"


def test_freshest_takes_the_newest_versions_and_breaks_ties_by_order_of_completion() -> None:
    selector = OrderedSelector(freshest=True)
    for order, version in enumerate([4, 6, 5, 6]):
        put(selector, f"uid-{order}", order=order, version=version)
    assert [selector.pop()[0] for _ in range(4)] == ["uid-1", "uid-3", "uid-2", "uid-0"]


def test_uniform_draws_every_key_equally_often_and_says_so() -> None:
    selector = UniformSelector(random.Random(1))
    for i in range(8):
        put(selector, str(i))
    counts: Counter[str] = Counter()
    for _ in range(8000):
        key, probability = selector.pop()
        assert probability == 1 / 8
        counts[key] += 1
        put(selector, key)
    assert all(abs(count - 1000) < 150 for count in counts.values())  # 5 standard deviations


@pytest.mark.parametrize("exponent", [0.0, 0.5, 1.0, 2.0])
def test_prioritized_draws_match_the_probabilities_it_returns(exponent: float) -> None:
    priorities = {"a": 1.0, "b": 2.0, "c": 4.0, "d": 0.5, "e": 3.0}
    total = sum(p**exponent for p in priorities.values())
    selector = PrioritizedSelector(random.Random(2), exponent=exponent)
    for key, priority in priorities.items():
        put(selector, key, priority=priority)
    counts: Counter[str] = Counter()
    for _ in range(20_000):
        key, probability = selector.pop()
        assert probability == pytest.approx(priorities[key] ** exponent / total)
        counts[key] += 1
        put(selector, key, priority=priorities[key])
    for key, priority in priorities.items():
        expected = 20_000 * priority**exponent / total
        assert abs(counts[key] - expected) < 5 * expected**0.5


@pytest.mark.parametrize("exponent", [0.0, 1.0])
def test_priority_zero_is_never_drawn_while_anything_else_is_held(exponent: float) -> None:
    selector = PrioritizedSelector(random.Random(3), exponent=exponent)
    for i in range(20):
        put(selector, f"zero-{i}", priority=0.0)
    put(selector, "one", priority=1e-9)
    assert selector.pop() == ("one", 1.0)


def test_keys_that_all_have_priority_zero_are_equally_likely() -> None:
    selector = PrioritizedSelector(random.Random(4), exponent=1.0)
    for i in range(4):
        put(selector, str(i), priority=0.0)
    key, probability = selector.pop()
    assert probability == 0.25
    assert selector.pop()[1] == pytest.approx(1 / 3)


@pytest.mark.parametrize("priority", [-1.0, float("nan"), float("inf")])
def test_a_priority_that_is_not_finite_or_negative_is_refused_by_name(priority: float) -> None:
    selector = PrioritizedSelector(random.Random(5), exponent=1.0)
    with pytest.raises(ValueError, match="priority .* of uid-7 must be finite and >= 0"):
        put(selector, "uid-7", priority=priority)


def test_rounding_errors_do_not_pile_up_in_the_sum_tree() -> None:
    rng = random.Random(6)
    selector = PrioritizedSelector(rng, exponent=1.0)
    held = {}
    for i in range(20_000):
        key = f"uid-{i}"
        held[key] = rng.choice([1e-8, 1.0, 1e8]) * rng.random()
        put(selector, key, priority=held[key])
        if len(held) > 50:
            victim = rng.choice(list(held))
            selector.delete(victim)
            del held[victim]
    key, probability = selector.pop()
    assert probability == pytest.approx(held[key] / sum(held.values()), rel=1e-12)


def test_the_probability_of_each_draw_is_over_what_is_still_held() -> None:
    selector = PrioritizedSelector(random.Random(7), exponent=1.0)
    priorities = {"a": 1.0, "b": 2.0, "c": 5.0}
    for key, priority in priorities.items():
        put(selector, key, priority=priority)
    while priorities:
        key, probability = selector.pop()
        assert probability == pytest.approx(priorities[key] / sum(priorities.values()))
        del priorities[key]
