"""Which buffered group is sampled next.

A selector holds keys (uids) and hands them out one at a time, without replacement, each with the probability of that
draw. Every operation is O(log n). Inserting a key twice or deleting an unknown one is a programming error (`KeyError`),
and so is drawing from an empty selector (`IndexError`). Selectors have no lock: the buffer's lock covers them.
"""

from __future__ import annotations

import random
from typing import Literal, Protocol

from sortedcontainers import SortedList

SelectorKind = Literal["fifo", "freshest", "uniform", "prioritized"]


class Selector(Protocol):
    """The seam between the buffer and its sampling order."""

    def insert(self, key: str, *, order: int, version: int, priority: float) -> None:
        """Add a key: `order` is its rank of completion, `version` its oldest token version, `priority` >= 0."""

    def delete(self, key: str) -> None:
        """Forget a key."""

    def pop(self) -> tuple[str, float]:
        """Draw a key, forget it, and return it with the probability of this draw."""

    def __len__(self) -> int: ...

    def __contains__(self, key: object) -> bool: ...


class OrderedSelector:
    """Deterministic: the smallest rank first.

    `freshest=False` is FIFO: in order of completion. `freshest=True` takes the newest versions first, ties in order of
    completion. A key that comes back (a second epoch, a rollback) takes its old place again: its rank is the same.
    """

    def __init__(self, *, freshest: bool) -> None:
        self._freshest = freshest
        self._queue: SortedList[tuple[int, int, str]] = SortedList()
        self._ranks: dict[str, tuple[int, int, str]] = {}

    def insert(self, key: str, *, order: int, version: int, priority: float) -> None:
        if key in self._ranks:
            raise KeyError(f"selector key ({key}) is already held")
        rank = (-version if self._freshest else 0, order, key)
        self._ranks[key] = rank
        self._queue.add(rank)

    def delete(self, key: str) -> None:
        self._queue.remove(self._ranks.pop(key))

    def pop(self) -> tuple[str, float]:
        key: str = self._queue.pop(0)[2]
        del self._ranks[key]
        return key, 1.0

    def __len__(self) -> int:
        return len(self._ranks)

    def __contains__(self, key: object) -> bool:
        return key in self._ranks


class UniformSelector:
    """Every held key is equally likely."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng
        self._keys: list[str] = []
        self._slots: dict[str, int] = {}

    def insert(self, key: str, *, order: int, version: int, priority: float) -> None:
        if key in self._slots:
            raise KeyError(f"selector key ({key}) is already held")
        self._slots[key] = len(self._keys)
        self._keys.append(key)

    def delete(self, key: str) -> None:
        slot = self._slots.pop(key)
        last = self._keys.pop()
        if last != key:
            self._keys[slot] = last
            self._slots[last] = slot

    def pop(self) -> tuple[str, float]:
        if not self._keys:
            raise IndexError("pop from an empty selector")
        probability = 1.0 / len(self._keys)
        key = self._keys[self._rng.randrange(len(self._keys))]
        self.delete(key)
        return key, probability

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._slots


class PrioritizedSelector:
    """Prioritized experience replay (Schaul et al. 2016): P(i) = priority_i ** exponent / sum_j priority_j ** exponent.

    Priority 0 means probability 0, whatever the exponent; if all held priorities are 0, all keys are equally likely.
    The weights are the leaves of a sum tree in an array: node i has the children 2i and 2i + 1. A parent is recomputed
    from its children and never corrected by a difference, so rounding errors do not pile up.
    """

    def __init__(self, rng: random.Random, *, exponent: float) -> None:
        self._rng = rng
        self._exponent = exponent
        self._capacity = 1
        self._tree = [0.0, 0.0]
        self._keys: list[str] = []
        self._slots: dict[str, int] = {}

    def insert(self, key: str, *, order: int, version: int, priority: float) -> None:
        if key in self._slots:
            raise KeyError(f"selector key ({key}) is already held")
        if not 0.0 <= priority < float("inf"):
            raise ValueError(f"priority ({priority}) of {key} must be finite and >= 0")
        if len(self._keys) == self._capacity:
            self._grow()
        slot = len(self._keys)
        self._slots[key] = slot
        self._keys.append(key)
        self._set(slot, priority**self._exponent if priority > 0.0 else 0.0)

    def delete(self, key: str) -> None:
        slot = self._slots.pop(key)
        last = len(self._keys) - 1
        moved = self._keys.pop()
        if slot != last:
            self._keys[slot] = moved
            self._slots[moved] = slot
            self._set(slot, self._tree[self._capacity + last])
        self._set(last, 0.0)

    def pop(self) -> tuple[str, float]:
        if not self._keys:
            raise IndexError("pop from an empty selector")
        total = self._tree[1]
        if total > 0.0:
            slot = self._find(self._rng.random() * total)
            probability = self._tree[self._capacity + slot] / total
        else:
            slot = self._rng.randrange(len(self._keys))
            probability = 1.0 / len(self._keys)
        key = self._keys[slot]
        self.delete(key)
        return key, probability

    def _find(self, mass: float) -> int:
        node = 1
        while node < self._capacity:
            node *= 2
            # The right child may be empty: then rounding must not lead into it.
            if mass >= self._tree[node] and self._tree[node + 1] > 0.0:
                mass -= self._tree[node]
                node += 1
        return node - self._capacity

    def _set(self, slot: int, weight: float) -> None:
        node = self._capacity + slot
        self._tree[node] = weight
        while node > 1:
            node //= 2
            self._tree[node] = self._tree[2 * node] + self._tree[2 * node + 1]

    def _grow(self) -> None:
        weights = self._tree[self._capacity :]
        self._capacity *= 2
        self._tree = [0.0] * self._capacity + weights + [0.0] * (self._capacity - len(weights))
        for node in range(self._capacity - 1, 0, -1):
            self._tree[node] = self._tree[2 * node] + self._tree[2 * node + 1]

    def __len__(self) -> int:
        return len(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._slots


def make_selector(kind: SelectorKind, *, rng: random.Random, priority_exponent: float) -> Selector:
    """The selector of that name; `rng` is used by the random ones only."""
    if kind == "uniform":
        return UniformSelector(rng)
    if kind == "prioritized":
        return PrioritizedSelector(rng, exponent=priority_exponent)
    return OrderedSelector(freshest=kind == "freshest")
