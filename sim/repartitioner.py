"""Repartitioner: asks the RepartitionPolicy at intervals and moves the boundary between steps."""

from granikv.core.boundary import Boundary
from granikv.core.lookout import Load, Lookout
from granikv.core.policies import make_policy
from granikv.core.repartition import RepartitionPolicy, StaticPolicy
from granikv.sim.config import ServerConfig
from granikv.sim.holders import PoolHolders
from granikv.sim.pools import Pools
from granikv.sim.scheduler import Scheduler


class Repartitioner:
    """One replica's boundary: the policy decides, `Boundary` carries out."""

    def __init__(
        self, config: ServerConfig, pools: Pools, policy: RepartitionPolicy | None = None
    ) -> None:
        self.boundary = Boundary(
            pools.allocator, pools.directory, PoolHolders(pools), config.move_tokens_per_step
        )
        self.next_look_ns = int(config.policy_interval_s * 1e9)
        self._pools = pools
        self._lookout = Lookout(pools.allocator, pools.directory)
        if config.is_stock:  # it has no HOT to move
            policy = StaticPolicy()
        self._policy = make_policy(config.repartition) if policy is None else policy
        self._interval_ns = self.next_look_ns

    @property
    def is_active(self) -> bool:
        """Whether the policy ever moves: a static one need not be asked."""
        return not isinstance(self._policy, StaticPolicy)

    def advance(self, now_ns: int, scheduler: Scheduler, retractions: int) -> int:
        """Do this boundary's share of a move, or ask the policy; returns the tokens copied."""
        boundary, moves = self.boundary, self.boundary.moves
        if not boundary.is_moving:
            if not self.is_active or now_ns < self.next_look_ns:
                return 0
            # Nothing happens in an idle server: looks that fell into an idle time are left out.
            self.next_look_ns = (now_ns // self._interval_ns + 1) * self._interval_ns
            window = self._lookout.look(now_ns / 1e9, self._load(scheduler, retractions))
            boundary.steer(self._policy, window, scheduler.all_fit)
        copied = boundary.advance()
        if boundary.moves > moves:
            copied += self._pools.promote_read(now_ns / 1e9)
        return copied

    def _load(self, scheduler: Scheduler, retractions: int) -> Load:
        pools = self._pools
        segments = pools.groups.segments()
        return Load(
            cold_evictable=pools.index.evictable_tokens,
            cold_promised=scheduler.promised_tokens,
            cold_waiting_tokens=sum(state.fill_tokens for state in scheduler.waiting),
            private_tokens=pools.batch.context_tokens - pools.groups.shared_tokens,
            cold_refusals=scheduler.cold_refusals,
            retractions=retractions,
            segments=segments,
        )
