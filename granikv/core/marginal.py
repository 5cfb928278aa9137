"""x marginal: tokens move to the side whose next token is worth more."""

import os
from dataclasses import dataclass, field

from granikv.core.repartition import Hold, Window


@dataclass(slots=True)
class MarginalPolicy:
    """Compares both sides in one unit: KV token reads that a decode step saves for one token.

    HOT: a prefix that missed and that `rows` rows read in COLD would be read once: `rows - 1`.

    COLD: 0 unless it is short. Then the rows are as many as COLD holds, and from throughput =
    rows / (fixed_reads + reads) a further token, which holds 1 / private of all rows and is read
    as well, is worth `(fixed_reads + reads) / private - 1`. Here private is what rows read alone,
    and reads is private + what is shared, each run once. Runs that lie in COLD count once too: a
    prefix that HOT takes in gives its COLD tokens back, so COLD has to be worth more than it would
    be afterwards.

    HOT grows by what the best prefix lacks, and gives what no two rows read in common, less the
    best prefix's length while that is worth keeping. Neither undoes the other.

    Attributes:
        fixed_reads: what a step costs beside KV reads, in token reads: the weights' bytes over a
            token's KV bytes. Llama-3.1-8B in bf16: 16.06e9 / 131,072.
        advantage: how many times the other side's value makes a move (the dead band).
        largest: longest move, as a share of all tokens.
        idle_share: share of all tokens that stays idle in COLD when HOT grows.
        memory: windows after a miss in which a prefix in COLD still counts as wanted in HOT: where
            nothing is admitted, nothing can miss.
        hold: windows between two moves; a reversal doubles the wait.
        longest_hold: longest wait, in windows.
    """

    fixed_reads: float = 122_500.0
    prefill_tokens_per_s: float = 40_000.0
    shortest: int = 256
    longest_cost_s: float = 60.0
    _cost_s: float = 0.0
    _wants: bool = False
    _is_short: bool = False
    _short_s: float = 0.0
    _spare: int | None = None
    _backoff: float = 1.0
    _gave: bool = False
    _gain_s: float = 0.0
    _loss_s: float = 0.0
    _last_s: float = 0.0

    def observe(self, window: Window) -> int | None:
        dt, self._last_s = window.now_s - self._last_s, window.now_s
        self._is_short = window.cold_is_short or (self._is_short and window.cold_waiting_tokens > 0)
        shared = sum(length for length, _ in (*window.rows_per_slab, *window.rows_per_cold_run))
        cold = (self.fixed_reads + shared)/max(1,window.private_tokens) if self._is_short else 0
        runs = [l for l, _ in window.rows_per_cold_run if l >= self.shortest]
        self._wants = bool(window.hot_miss_tokens) or (self._wants and bool(runs))
        wanted = sum(runs) if self._wants else 0
        missed = sum(window.hot_misses.values())
        if missed and cold < float(os.environ.get('CM','1')): wanted = max(wanted, window.hot_miss_tokens // missed)
        spare = window.hot_free + window.hot_idle - wanted
        if self._gave:
            if spare < 0 or missed: self._loss_s += dt
            elif not self._loss_s: self._gain_s += dt
        if spare < 0:
            self._short_s, self._spare = 0.0, None
            return min(window.hot_tokens - spare, window.size_tokens - 1)
        if not self._is_short or not spare:
            self._short_s, self._spare = 0.0, None
            return None
        self._short_s += dt
        self._spare = spare if self._spare is None else min(self._spare, spare)
        spare = self._spare
        shared = sum(length for length, _ in (*window.rows_per_slab, *window.rows_per_cold_run))
        gain = (self.fixed_reads + shared) / (self.fixed_reads + shared + window.private_tokens)
        evicted = max(0, spare - window.hot_free)
        payback = evicted / self.prefill_tokens_per_s / (gain * spare / max(1, window.private_tokens)) if spare else 0
        if self._gave and self._loss_s:
            wrong = self._loss_s > self._gain_s
            self._backoff = min(self._backoff*2, 16.0) if wrong else max(1.0, self._backoff/2)
            self._gave = False
        if not spare or self._short_s <= max(payback, dt, 15.0)*self._backoff: return None
        self._short_s, self._spare = 0.0, None
        self._gave, self._gain_s, self._loss_s = True, 0.0, 0.0
        return window.hot_tokens - spare
