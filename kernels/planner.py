"""The work list of one decode step, made on the device from device tables by one block.

Nothing is read back: lengths, slabs, grouping and modes may change between two replays of a CUDA
graph. A step has three lists, of dense tiles, of cascade tiles (both: rows of one group over a
chunk of its segment) and of private tiles (one row over a chunk of its own or of a paged segment).
Every tile leaves one partial result for each of its rows; a row's parts are consecutive, its
segments in level order first, so that they are merged in the same order whatever finished first.
"""

import triton
import triton.language as tl

ITEM_WIDTH = tl.constexpr(8)  # int32 columns of a work item
LEVELS = tl.constexpr(4)

# What a tile costs besides its tokens, in tokens, and what one more part of a row costs. Chosen so
# that batches of 8 to 512 rows get the chunks that were fastest on an H200; no times by themselves.
_PREFIX_TILE_TOKENS = tl.constexpr(192)
_PRIVATE_TILE_TOKENS = tl.constexpr(64)
_PREFIX_PART_TOKENS = tl.constexpr(4)
_PRIVATE_PART_TOKENS = tl.constexpr(28)
_CANDIDATES = tl.constexpr(64)
_NO_LIMIT = tl.constexpr(1 << 28)
# Of an H200 at head_dim 128: ns that one SM takes for one token of a dense tile (128 rows x 1 token
# at 619 TFLOP/s / 132) and for one private token (512 bytes at 36 GB/ms, what 23 SMs reached), and
# that the whole card takes for one private token (4.1 TB/s). Only their ratios matter here.
_DENSE_TOKEN_NS = tl.constexpr(14.0)
_PRIVATE_SM_NS = tl.constexpr(14.0)
_PRIVATE_CARD_NS = tl.constexpr(0.125)
_OVERLAP_COST = tl.constexpr(1.05)


@triton.jit
def _runs_dense(mode, is_cold, tokens, with_dense, block: tl.constexpr):
    """Whether a segment is marked dense and can run so; a cascade takes it if not."""
    return (mode == 2) & (is_cold == 0) & (tokens >= block) & (with_dense != 0)


@triton.jit
def _cheapest_chunk(cost, chunk, parts, max_parts):
    """The chunk with the least cost among those whose parts fit; the longest one always does."""
    fits = parts <= max_parts
    cost = tl.where(fits, cost, float("inf"))
    best = tl.min(cost, 0)
    found = tl.min(tl.where(cost == best, chunk, 1 << 30), 0)
    return tl.where(best < float("inf"), found, 1 << 30)


@triton.jit
def _prefix_chunk(
    rows, lengths, on, row_tile: tl.constexpr, block: tl.constexpr, max_parts, fixed, workers,
    HKV: tl.constexpr,
):  # fmt: skip
    """Tokens of one prefix tile: a multiple of `block` that fills whole waves of `workers`.

    `rows`, `lengths`, `on`: `[groups]`. With `fixed` > 0 that many tokens, whatever the batch.
    """
    if fixed > 0:
        return fixed
    step = tl.arange(0, _CANDIDATES)
    chunk = tl.where(step < 63, (step + 1) * 2 * 64, _NO_LIMIT)
    chunk = (chunk + block - 1) // block * block
    chunks = tl.where(on[:, None], (lengths[:, None] + chunk[None, :] - 1) // chunk[None, :], 0)
    tiles = (rows + row_tile - 1) // row_tile
    items = tl.sum(tiles[:, None] * chunks, 0) * HKV
    parts = tl.sum(rows[:, None] * chunks, 0)
    longest = tl.max(tl.where(on, lengths, 0), 0)
    tokens = tl.minimum(chunk, longest) + _PREFIX_TILE_TOKENS
    waves = (items + workers - 1) // workers
    cost = (waves * tokens + tl.max(chunks, 0) * _PREFIX_PART_TOKENS).to(tl.float32)
    return _cheapest_chunk(cost, chunk, parts, max_parts)


@triton.jit
def _dense_blocks(dense_tokens, private_tokens, SMS: tl.constexpr, S: tl.constexpr):
    """SMs for the dense pass when the private pass runs on the others at the same time.

    The split whose slower side is fastest, where private tiles left over at the end of the dense
    pass have the whole card; all SMs if that is no slower.
    """
    blocks = tl.arange(0, S) + 1
    dense_ns = dense_tokens.to(tl.float32) * _DENSE_TOKEN_NS / blocks
    alone = tl.maximum(SMS - blocks, 0) / _PRIVATE_SM_NS
    done = tl.minimum(alone, 1 / _PRIVATE_CARD_NS) * dense_ns
    left = tl.maximum(private_tokens.to(tl.float32) - done, 0.0)
    cost = dense_ns + left * _PRIVATE_CARD_NS
    # What sharing the memory costs the dense pass is not in the model: it has to be worth it.
    cost = tl.where(blocks < SMS, cost * _OVERLAP_COST, cost)
    cost = tl.where(blocks <= SMS, cost, float("inf"))
    return tl.max(tl.where(cost == tl.min(cost, 0), blocks, 0), 0)


@triton.jit
def _private_chunk(tokens, max_parts, fixed, HKV: tl.constexpr, SLOTS: tl.constexpr):
    """Tokens of one private tile; `tokens` `[rows, levels + 1]` are the pieces to be cut."""
    if fixed > 0:
        return fixed
    step = tl.arange(0, 32)
    chunk = tl.where(step < 16, (step + 1) * 128, 2048 << tl.maximum(step - 15, 0))
    longest = tl.max(tokens)
    items = tl.zeros([32], tl.int32)
    most = tl.zeros([32], tl.int32)
    for level in tl.static_range(LEVELS + 1):
        column = tl.arange(0, 8) == level
        piece = tl.sum(tl.where(column[None, :], tokens, 0), 1)
        cuts = (piece[:, None] + chunk[None, :] - 1) // chunk[None, :]
        items += tl.sum(cuts, 0)
        most += tl.max(cuts, 0)
    # Tiles are taken from a counter, so that waves need not be whole; the last tile runs alone.
    waves = tl.maximum(items * HKV / SLOTS, 1.0)
    tile = tl.minimum(chunk, longest)
    cost = waves * (tile + _PRIVATE_TILE_TOKENS) + tile + most * _PRIVATE_PART_TOKENS
    return _cheapest_chunk(cost, chunk, items, max_parts)


@triton.jit
def _write_prefix_items(
    items, ends, base, length, group_rows, first_member, columns, count, chunk,
    row_tile: tl.constexpr, groups, BLOCK: tl.constexpr,
):  # fmt: skip
    """Fill one list: items of a group are chunk by chunk, the row tiles of a chunk side by side."""
    for start in range(0, count, BLOCK):
        item = start + tl.arange(0, BLOCK)
        live = item < count
        group = tl.zeros([BLOCK], tl.int32)
        begin = tl.zeros([BLOCK], tl.int32)
        for g in range(groups):
            end = tl.load(ends + g)
            group += (item >= end).to(tl.int32)
            begin = tl.where(item >= end, end, begin)
        rows = tl.load(group_rows + group, live, other=1)
        tokens = tl.load(length + group, live, other=1)
        tiles = (rows + row_tile - 1) // row_tile
        local = item - begin
        tile, cut = local % tiles, local // tiles
        target = items + item * ITEM_WIDTH
        tl.store(target, tl.load(first_member + group, live, other=0) + tile * row_tile, live)
        tl.store(target + 1, tl.minimum(row_tile, rows - tile * row_tile), live)
        slot = tl.load(base + group, live, other=0)
        tl.store(target + 2, tl.where(slot < 0, slot, slot + cut * chunk), live)
        tl.store(target + 3, tl.minimum(chunk, tokens - cut * chunk), live)
        tl.store(target + 4, cut * chunk, live)
        tl.store(target + 5, cut, live)
        tl.store(target + 6, tl.load(columns + group, live, other=0) + cut * chunk, live)


@triton.jit
def _write_private_items(
    items, first, row, cuts, chunk, slot, table_row, start, indirect: tl.constexpr, tokens, part,
    direct,
):  # fmt: skip
    """Append every row's pieces cut by cut, so that rows read the same chunk at the same time.

    `slot` is the first slot of a paged segment; private tokens start at `start` of row `table_row`
    of the slot table.
    """
    for cut in range(tl.max(cuts, 0)):
        live = cut < cuts
        count = live.to(tl.int32)
        target = items + (first + tl.cumsum(count, 0) - count) * ITEM_WIDTH
        tl.store(target, row, live)
        tl.store(target + 1, tl.where(indirect, -1, slot + cut * chunk), live)
        tl.store(target + 2, start + cut * chunk, live)
        tl.store(target + 3, tl.maximum(tl.minimum(chunk, tokens - cut * chunk), 0), live)
        tl.store(target + 4, part + cut, live)
        tl.store(target + 5, direct, live)
        tl.store(target + 6, table_row, live)
        first += tl.sum(count, 0)
    return first


# One kernel for all batches of up to R rows: what varies from batch to batch is not compiled in.
@triton.jit(
    do_not_specialize=[
        "rows", "groups", "max_parts", "fixed_dense_chunk", "fixed_cascade_chunk",
        "fixed_private_chunk", "split", "with_dense",
    ]
)  # fmt: skip
def plan_step(
    segment_base, segment_length, segment_group, group_mode, private_row, private_start,
    private_length, counts, dense_items, cascade_items, private_items, members, entry_part,
    row_part, row_parts, group_scratch,
    rows, groups, max_parts, fixed_dense_chunk, fixed_cascade_chunk, fixed_private_chunk, split,
    with_dense,
    HKV: tl.constexpr, DENSE_ROWS: tl.constexpr, DENSE_BLOCK: tl.constexpr,
    CASCADE_ROWS: tl.constexpr, CASCADE_BLOCK: tl.constexpr, SMS: tl.constexpr,
    SLOTS: tl.constexpr, R: tl.constexpr, G: tl.constexpr, S: tl.constexpr,
    ITEM_BLOCK: tl.constexpr,
):  # fmt: skip
    """Plan one step; grid of one block.

    Inputs are the tables of `DecodeTables`. Outputs, all int32: `counts [4]` (dense, cascade,
    private items, and blocks of the dense pass), the three lists `[capacity, 8]`, `members` and
    `entry_part` `[rows * 4]`, `row_part` and `row_parts` `[rows]`. `group_scratch [7, G]` is
    private to this kernel.
    """
    group_rows, length, base = group_scratch, group_scratch + G, group_scratch + 2 * G
    first_member, dense_ends = group_scratch + 3 * G, group_scratch + 4 * G
    cascade_ends, columns = group_scratch + 5 * G, group_scratch + 6 * G
    g = tl.arange(0, G)
    tl.store(group_rows + g, tl.zeros([G], tl.int32))
    tl.store(length + g, tl.zeros([G], tl.int32))
    tl.debug_barrier()

    row = tl.arange(0, R)
    level = tl.arange(0, 8)
    live_row = row < rows
    entry = row[:, None] * LEVELS + level[None, :]
    in_table = live_row[:, None] & (level < LEVELS)[None, :]
    tokens = tl.load(segment_length + entry, in_table, other=0)
    held = tokens > 0
    group = tl.load(segment_group + entry, held, other=0)
    slot = tl.load(segment_base + entry, held, other=0)
    rank = tl.atomic_add(group_rows + group, 1, mask=held)
    tl.store(length + group, tokens, held)
    tl.store(base + group, slot, held)
    tl.store(columns + group, tl.cumsum(tl.where(held, tokens, 0), 1) - tokens, held)
    tl.debug_barrier()

    of_group = tl.load(group_rows + g)
    tokens_of_group = tl.load(length + g)
    mode = tl.load(group_mode + g, g < groups, other=0)
    used = of_group > 0
    is_cold = tl.load(base + g) < 0
    dense = used & _runs_dense(mode, is_cold, tokens_of_group, with_dense, DENSE_BLOCK)
    cascade = used & ((mode != 0) | is_cold) & (dense == 0)
    own = tl.load(private_length + row, live_row, other=0)
    dense_tokens = tl.sum(
        tl.where(dense, (of_group + DENSE_ROWS - 1) // DENSE_ROWS * tokens_of_group, 0), 0
    )
    by_rows = used & (dense == 0) & (cascade == 0)
    row_tokens = tl.sum(own, 0) + tl.sum(tl.where(by_rows, tokens_of_group, 0), 0)
    blocks = SMS
    if (split != 0) & (dense_tokens > 0):
        blocks = _dense_blocks(dense_tokens * HKV, row_tokens * HKV, SMS, S)
    dense_chunk = _prefix_chunk(
        of_group, tokens_of_group, dense, DENSE_ROWS, DENSE_BLOCK, max_parts, fixed_dense_chunk,
        blocks, HKV,
    )  # fmt: skip
    cascade_chunk = _prefix_chunk(
        of_group, tokens_of_group, cascade, CASCADE_ROWS, CASCADE_BLOCK, max_parts,
        fixed_cascade_chunk, SLOTS // 2, HKV,
    )  # fmt: skip
    tl.store(first_member + g, tl.cumsum(of_group, 0) - of_group)
    chunks = (tokens_of_group + dense_chunk - 1) // dense_chunk
    items = tl.where(dense, (of_group + DENSE_ROWS - 1) // DENSE_ROWS * chunks, 0)
    dense_count = tl.sum(items, 0)
    tl.store(dense_ends + g, tl.cumsum(items, 0))
    chunks = (tokens_of_group + cascade_chunk - 1) // cascade_chunk
    items = tl.where(cascade, (of_group + CASCADE_ROWS - 1) // CASCADE_ROWS * chunks, 0)
    cascade_count = tl.sum(items, 0)
    tl.store(cascade_ends + g, tl.cumsum(items, 0))
    tl.debug_barrier()

    _write_prefix_items(
        dense_items, dense_ends, base, length, group_rows, first_member, columns, dense_count,
        dense_chunk, DENSE_ROWS, groups, ITEM_BLOCK,
    )  # fmt: skip
    _write_prefix_items(
        cascade_items, cascade_ends, base, length, group_rows, first_member, columns,
        cascade_count, cascade_chunk, CASCADE_ROWS, groups, ITEM_BLOCK,
    )  # fmt: skip
    tl.store(members + tl.load(first_member + group, held, other=0) + rank, entry, held)

    entry_mode = tl.load(group_mode + group, held, other=0)
    paged = held & (entry_mode == 0) & (slot >= 0)
    pieces = tl.where(paged, tokens, tl.where((level == LEVELS)[None, :], own[:, None], 0))
    private_chunk = _private_chunk(pieces, max_parts, fixed_private_chunk, HKV, SLOTS)
    entry_dense = held & _runs_dense(entry_mode, slot < 0, tokens, with_dense, DENSE_BLOCK)
    entry_chunk = tl.where(entry_dense, dense_chunk, cascade_chunk)
    entry_chunk = tl.where(paged, private_chunk, entry_chunk)
    cuts = tl.where(held, (tokens + entry_chunk - 1) // entry_chunk, 0)
    of_row = tl.sum(cuts, 1)
    own_cuts = (own + private_chunk - 1) // private_chunk
    # A row without a token still gets one tile, which writes O = 0 and LSE = -inf.
    own_cuts = tl.where(live_row & (of_row == 0), tl.maximum(own_cuts, 1), own_cuts)
    parts = of_row + own_cuts
    first_part = tl.cumsum(parts, 0) - parts
    entry_first = first_part[:, None] + tl.cumsum(cuts, 1) - cuts
    # A single private part is the result: its tile writes it and nothing is left to merge.
    shared_cuts = tl.sum(tl.where(paged, 0, cuts), 1)
    direct = (parts == 1) & (shared_cuts == 0)
    tl.store(entry_part + entry, entry_first, held)
    tl.store(row_part + row, first_part, live_row)
    tl.store(row_parts + row, tl.where(direct, 0, parts), live_row)

    count = 0
    for column in tl.static_range(LEVELS):
        pick = (level == column)[None, :]
        count = _write_private_items(
            private_items, count, row, tl.sum(tl.where(pick & paged, cuts, 0), 1), private_chunk,
            tl.sum(tl.where(pick, slot, 0), 1), row, 0, False, tl.sum(tl.where(pick, tokens, 0), 1),
            tl.sum(tl.where(pick, entry_first, 0), 1), direct,
        )  # fmt: skip
    count = _write_private_items(
        private_items, count, row, own_cuts, private_chunk, row,
        tl.load(private_row + row, live_row, other=0),
        tl.load(private_start + row, live_row, other=0), True, own, first_part + of_row, direct,
    )  # fmt: skip
    tl.store(counts, dense_count)
    tl.store(counts + 1, cascade_count)
    tl.store(counts + 2, count)
    tl.store(counts + 3, blocks)
