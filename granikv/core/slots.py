"""Bookkeeping of free slots: address-ordered runs for slabs, a LIFO stack for single tokens."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from granikv.core.errors import IntegrityError

Slots = NDArray[np.int32]
Fit = Literal["first", "best"]

_FREE = np.int32(-1)
_HELD = np.int32(0)
_FIRST_CAPACITY = 256


@dataclass(frozen=True, slots=True)
class Slab:
    """`length` HOT slots in a row: `[base, base + length)`."""

    base: int
    length: int

    @property
    def end(self) -> int:
        """First slot after the slab."""
        return self.base + self.length

    def slots(self) -> Slots:
        """The slab's slots in order, int32 `[length]`."""
        return np.arange(self.base, self.end, dtype=np.int32)


class FreeRuns:
    """Disjoint free intervals inside `[lo, hi)`, kept in address order and never adjacent.

    A new object has nothing free: `give` what it may hand out. Two int64 arrays hold bases and
    lengths, so that a search over a thousand runs is one vector operation.
    """

    def __init__(self, lo: int, hi: int) -> None:
        self.lo = lo
        self.hi = hi
        self.total = 0
        self.count = 0
        self._bases = np.zeros(_FIRST_CAPACITY, np.int64)
        self._lengths = np.zeros(_FIRST_CAPACITY, np.int64)
        self._largest: int | None = 0

    @property
    def largest(self) -> int:
        """Length of the longest run, 0 when nothing is free."""
        if self._largest is None:
            self._largest = int(self._lengths[: self.count].max()) if self.count else 0
        return self._largest

    def __iter__(self) -> Iterator[tuple[int, int]]:
        """Yield `(base, length)` in address order."""
        yield from zip(
            self._bases[: self.count].tolist(), self._lengths[: self.count].tolist(), strict=True
        )

    def take(self, n: int, fit: Fit = "first", below: int | None = None) -> int | None:
        """Cut `n` slots from the low end of a run; return their base, None when no run fits.

        `first` picks the lowest run that fits, `best` the shortest (the lowest of equals). With
        `below`, the slots must all lie below that address.
        """
        count = self.count
        if below is not None:
            count = int(self._bases[:count].searchsorted(below - n, side="right"))
        index = self._find(n, fit, count)
        if index is None:
            return None
        base = int(self._bases[index])
        self._cut_low_end(index, n)
        return base

    def take_at(self, base: int, n: int) -> None:
        """Cut exactly `[base, base + n)`.

        Raises:
            ValueError: a part of it is not free, or `n` is not positive.
        """
        index = int(self._bases[: self.count].searchsorted(base, side="right")) - 1
        run_base = int(self._bases[index]) if index >= 0 else self.hi
        run_end = run_base + int(self._lengths[index])
        if n < 1 or base < run_base or base + n > run_end:
            raise ValueError(f"[base, base + n) must be free, got base {base} and n {n}")
        if base == run_base:
            self._cut_low_end(index, n)
            return
        self._largest = None
        self.total -= n
        self._lengths[index] = base - run_base
        if base + n < run_end:
            self._insert(index + 1, base + n, run_end - base - n)

    def take_range(self, lo: int, hi: int) -> list[tuple[int, int]]:
        """Cut everything free inside `[lo, hi)`; return it as `(base, length)` by address."""
        inside = [(max(base, lo), min(base + n, hi)) for base, n in self]
        pieces = [(start, end - start) for start, end in inside if start < end]
        for start, length in pieces:
            self.take_at(start, length)
        return pieces

    def give(self, base: int, n: int) -> None:
        """Make `[base, base + n)` free and join it with its neighbours.

        Raises:
            ValueError: a part is free already or lies outside `[lo, hi)`, or `n` is not positive.
        """
        if n < 1 or base < self.lo or base + n > self.hi:
            raise ValueError(
                f"[base, base + n) must lie in [{self.lo}, {self.hi}), got base {base} and n {n}"
            )
        bases, lengths, count = self._bases, self._lengths, self.count
        index = int(bases[:count].searchsorted(base))
        before_end = int(bases[index - 1]) + int(lengths[index - 1]) if index else self.lo - 1
        after_base = int(bases[index]) if index < count else self.hi + 1
        if before_end > base or base + n > after_base:
            raise ValueError(f"[base, base + n) must not be free, got base {base} and n {n}")
        self._largest = None
        self.total += n
        joins_after = base + n == after_base
        if before_end == base:
            lengths[index - 1] += n
            if joins_after:
                lengths[index - 1] += lengths[index]
                self._delete(index)
        elif joins_after:
            bases[index] = base
            lengths[index] += n
        else:
            self._insert(index, base, n)

    def gaps(self, bases: ArrayLike, ends: ArrayLike) -> tuple[list[int], list[int]]:
        """Free slots directly before each of `bases` and directly after each of `ends`."""
        starts, stops = np.asarray(bases, np.int64), np.asarray(ends, np.int64)
        if not self.count:
            return [0] * len(starts), [0] * len(stops)
        run_bases, run_lengths = self._bases[: self.count], self._lengths[: self.count]
        left = np.maximum(run_bases.searchsorted(starts) - 1, 0)
        before = np.where(run_bases[left] + run_lengths[left] == starts, run_lengths[left], 0)
        right = np.minimum(run_bases.searchsorted(stops), self.count - 1)
        after = np.where(run_bases[right] == stops, run_lengths[right], 0)
        return before.tolist(), after.tolist()

    def check_integrity(self) -> None:
        """Check order, gaps and totals.

        Raises:
            IntegrityError: the invariant that does not hold.
        """
        end, total = self.lo - 1, 0
        for base, length in self:
            if base <= end or length < 1 or base + length > self.hi:
                raise IntegrityError(
                    f"free runs must be positive, inside [{self.lo}, {self.hi}) and apart,"
                    f" got [{base}, {base + length}) after {end}"
                )
            end, total = base + length, total + length
        if total != self.total:
            raise IntegrityError(f"sum of free runs ({total}) == total ({self.total}) must hold")
        if self.largest != max((length for _, length in self), default=0):
            raise IntegrityError(f"largest ({self.largest}) must be the longest free run")

    def _find(self, n: int, fit: Fit, count: int) -> int | None:
        if n < 1:
            raise ValueError(f"n must be positive, got {n}")
        if not count:
            return None
        lengths = self._lengths[:count]
        fits = lengths >= n
        index = int(fits.argmax())
        if not fits[index]:
            return None
        if fit == "first":
            return index
        return int(np.where(fits, lengths, self.hi).argmin())

    def _cut_low_end(self, index: int, n: int) -> None:
        self._largest = None
        self.total -= n
        if self._lengths[index] == n:
            self._delete(index)
            return
        self._bases[index] += n
        self._lengths[index] -= n

    def _insert(self, index: int, base: int, length: int) -> None:
        count = self.count
        if count == len(self._bases):
            self._bases = np.concatenate((self._bases, np.zeros_like(self._bases)))
            self._lengths = np.concatenate((self._lengths, np.zeros_like(self._lengths)))
        for array, value in ((self._bases, base), (self._lengths, length)):
            array[index + 1 : count + 1] = array[index:count]
            array[index] = value
        self.count = count + 1

    def _delete(self, index: int) -> None:
        count = self.count
        for array in (self._bases, self._lengths):
            array[index : count - 1] = array[index + 1 : count]
        self.count = count - 1


class ColdPool:
    """LIFO stack of the free slots in `[lo, hi)`: `alloc` pops the top, `free` pushes in order.

    So `alloc(a + b)` gives exactly `alloc(a)` then `alloc(b)`, and freeing a concatenation equals
    freeing its parts. A new pool hands out the lowest slots first. One int32 stamp per slot tells
    free (-1) from held (0 or more) and finds duplicates inside one call.
    """

    def __init__(self, lo: int, hi: int) -> None:
        self.lo = lo
        self.hi = hi
        self.used = 0
        self._top = hi - lo
        self._stack = np.empty(hi, np.int32)
        self._stack[: self._top] = np.arange(hi - 1, lo - 1, -1, dtype=np.int32)
        self._stamp = np.full(hi, _FREE, np.int32)

    @property
    def available(self) -> int:
        """Slots that `alloc` can give now."""
        return self._top

    def alloc(self, n: int) -> Slots | None:
        """Pop `n` slots, int32 `[n]`; None when fewer are free.

        Raises:
            ValueError: `n` is negative.
        """
        if n < 0:
            raise ValueError(f"n must not be negative, got {n}")
        top = self._top
        if n > top:
            return None
        slots = self._stack[top - n : top][::-1].copy()
        self._stamp[slots] = _HELD
        self._top = top - n
        self.used += n
        return slots

    def free(self, slots: ArrayLike) -> None:
        """Push held slots; the last one is the next that `alloc` gives.

        Raises:
            ValueError: a slot is not held (freed twice, outside the pool, never allocated) or comes
                twice in this call; nothing has changed then.
        """
        self.push(self.release(slots))

    def release(self, slots: ArrayLike) -> Slots:
        """Stop holding slots without making them free; return them as int32 `[n]`.

        Raises:
            ValueError: as in `free`.
        """
        held = _as_slots(slots)
        n = len(held)
        if n == 0:
            return held
        stamp = self._stamp
        # Read as unsigned, a negative slot is out of range too: one gather checks all bounds.
        index = held.view(np.uint32).astype(np.intp)
        try:
            lowest = np.minimum.reduce(stamp.take(index))
        except IndexError:
            raise ValueError(f"slots must lie in [{self.lo}, {self.hi}), got {slots!r}") from None
        if lowest < 0:
            slot = int(held[int(stamp[index].argmin())])
            raise ValueError(f"slots must be held COLD slots, got {slot} which is not")
        order = np.arange(n, dtype=np.int32)
        stamp[index] = order
        if np.logical_or.reduce(stamp.take(index) != order):
            stamp[index] = _HELD
            raise ValueError(f"slots must be distinct, got {n} with duplicates")
        stamp[index] = _FREE
        self.used -= n
        return held

    def push(self, slots: Slots) -> None:
        """Put slots that nobody holds (released, withdrawn or new) on the free stack, in order."""
        top = self._top + len(slots)
        self._stack[self._top : top] = slots
        self._top = top

    def withdraw(self, slots: Slots) -> None:
        """Take these free slots off the stack; the order of the rest stays."""
        marked = np.zeros(self.hi, np.bool_)
        marked[slots] = True
        stack = self._stack[: self._top]
        rest = stack[~marked[stack]]
        if len(rest) + len(slots) != self._top:
            raise ValueError(
                f"slots must be distinct and free, got {len(slots)} of which some are not"
            )
        self._stack[: len(rest)] = rest
        self._top = len(rest)

    def transfer(self, src: Slots, dst: Slots) -> None:
        """Hold `dst` (withdrawn before) in place of `src`, which ends neither held nor free."""
        self._stamp[src] = _FREE
        self._stamp[dst] = _HELD

    def held_slots(self, lo: int, hi: int) -> Slots:
        """Held slots inside `[lo, hi)`, ascending int32."""
        return (np.flatnonzero(self._stamp[lo:hi] >= 0) + lo).astype(np.int32)

    def free_slots(self, lo: int, hi: int) -> Slots:
        """Slots on the free stack inside `[lo, hi)`, ascending int32."""
        stack = self._stack[: self._top]
        return np.sort(stack[(stack >= lo) & (stack < hi)])

    def is_held(self, slots: Slots) -> NDArray[np.bool_]:
        """Which of these slots are held, bool `[n]`."""
        return self._stamp[slots] >= 0

    def check_integrity(self) -> None:
        """Check that the stack holds distinct slots of the pool and `used` counts the held ones.

        Raises:
            IntegrityError: the invariant that does not hold.
        """
        stack = self._stack[: self._top]
        if len(np.unique(stack)) != self._top:
            raise IntegrityError("slots on the COLD stack must be distinct")
        if self._top and (int(stack.min()) < self.lo or int(stack.max()) >= self.hi):
            raise IntegrityError(f"slots on the COLD stack must lie in [{self.lo}, {self.hi})")
        if bool((self._stamp[stack] >= 0).any()):
            raise IntegrityError("a slot on the COLD stack must not be held")
        held = np.flatnonzero(self._stamp >= 0)
        if len(held) != self.used:
            raise IntegrityError(f"held COLD slots ({len(held)}) == used ({self.used}) must hold")
        if len(held) and int(held[0]) < self.lo:
            raise IntegrityError(f"held COLD slots must be at least {self.lo}, got {held[0]}")


def _as_slots(slots: ArrayLike) -> Slots:
    array = np.asarray(slots)
    if array.dtype == np.int32 and array.ndim == 1:
        return array
    if array.size == 0:
        return np.empty(0, np.int32)
    if array.ndim != 1 or array.dtype.kind not in "iu":
        raise ValueError(f"slots must be a 1-D integer array, got {array.ndim}-D {array.dtype}")
    if int(array.min()) < 1 or int(array.max()) > np.iinfo(np.int32).max:
        raise ValueError(f"slots must be positive int32, got {array.min()} to {array.max()}")
    return array.astype(np.int32)
