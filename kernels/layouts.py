"""Where the KV of a measured batch lies: windows of a page pool and the page tables over them.

Works on NumPy arrays and on torch tensors alike: only slices, reshapes and sums are used.
"""

from typing import Any, NamedTuple

from granikv.kernels.shapes import Decode


class Windows(NamedTuple):
    """A pool cut into equal windows of consecutive pages, one for each call that is timed."""

    number: int
    pages: int

    def first_page(self, call: int) -> int:
        """First page of a call's window, behind the padding page 0; calls share after `number`."""
        return 1 + (call % self.number) * self.pages


def cut_windows(pool_pages: int, needed_pages: int, calls: int) -> Windows:
    """As many windows as calls, or as many as the pool has room for.

    Raises:
        ValueError: not even one window fits.
    """
    if needed_pages >= pool_pages:
        raise ValueError(f"needed_pages must be below {pool_pages}, got {needed_pages}")
    number = max(1, min(calls, (pool_pages - 1) // needed_pages))
    return Windows(number, (pool_pages - 1) // number)


def fill_page_table(table: Any, shape: Decode, ramp: Any, order: Any, first_page: int) -> None:
    """Write the pages of every row of `shape` into `table`.

    Args:
        table: `[rows, width]` int32, `width >= prefix_pages + private_pages`; written in place.
        ramp: 0, 1, 2, ... as int32, at least as long as all shared pages.
        order: a random permutation of the window's pages behind the shared ones, counted from the
            window's first page; a scattered prefix takes its first entries.
        first_page: first page of the window.
    """
    shared = shape.prefixes * shape.prefix_pages
    taken = 0 if shape.contiguous else shared
    source = ramp if shape.contiguous else order
    for prefix in range(shape.prefixes):
        pages = source[prefix * shape.prefix_pages : (prefix + 1) * shape.prefix_pages]
        table[prefix :: shape.prefixes, : shape.prefix_pages] = pages + first_page
    private = order[taken : taken + shape.rows * shape.private_pages]
    last = shape.prefix_pages + shape.private_pages
    table[:, shape.prefix_pages : last] = (
        private.reshape(shape.rows, shape.private_pages) + first_page
    )
