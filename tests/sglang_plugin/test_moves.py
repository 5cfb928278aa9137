"""Moves of a live server's boundary: who follows, in which order, and when a policy is asked."""

from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("sglang.srt.mem_cache.radix_cache", reason="needs sglang 0.5.17")

from sglang.srt.managers.schedule_policy import AddReqResult  # noqa: E402
from tree_support import ErasingHolders, MarkedServer, record_streams  # noqa: E402

from granikv.core.admission import SharedAdmission  # noqa: E402
from granikv.core.boundary import Boundary  # noqa: E402
from granikv.core.errors import ConfigError  # noqa: E402
from granikv.sglang_plugin import holders, repartition  # noqa: E402
from granikv.sglang_plugin.allocator import HotColdTokenAllocator  # noqa: E402
from granikv.sglang_plugin.config import LiveConfig  # noqa: E402
from granikv.sglang_plugin.holders import ServerHolders  # noqa: E402
from granikv.sglang_plugin.radix_cache import GraniRadixCache  # noqa: E402
from granikv.sglang_plugin.repartition import LiveRepartitioner  # noqa: E402

SIZE = 100
PROMPT = [5, 6, 7, 8, 9, 10, 11, 12]


def make_server(hot_tokens, admission=None):
    allocator = HotColdTokenAllocator(
        SIZE,
        torch.int64,
        "cpu",
        None,
        False,
        hot_tokens=hot_tokens,
        admission=admission or SharedAdmission(min_tokens=100),
    )
    return MarkedServer(allocator, GraniRadixCache)


def server_with_a_gap():
    """Two requests whose prefix has slots 9..16 of HOT; that of slots 1..8 has left."""
    server = make_server(20, SharedAdmission(min_tokens=4))
    for prompt in (PROMPT, [1, 2, 3, 4, 5, 6, 7, 8]):
        for last in (50, 51):
            admit(server, [*prompt, last])
        server.promote()
    assert server.allocator.core.hot_used == 16
    for req in server.running[:2]:
        server.finish(req, is_insert=False)
    [idle] = [node.id for node in server.tree.hot_nodes() if not node.lock_ref]
    server.tree.evict_hot(idle)
    return server


def admit(server, prompt=PROMPT, max_new_tokens=20):
    """A running request with what the scheduler's own has beside."""
    assert server.admit(prompt, chunk=100)
    req = server.running[-1]
    req.seqlen = len(prompt)
    req.sampling_params = SimpleNamespace(max_new_tokens=max_new_tokens)
    return req


def make_boundary(server, budget_tokens=2):
    core, directory = server.allocator.core, server.allocator.directory
    return Boundary(core, directory, ErasingHolders(server), budget_tokens)


def finish(server, boundary):
    """Move on to the end; rows and tree are right at every step."""
    while boundary.is_moving:
        boundary.advance()
        server.check_rows()
        server.check_tree()


# ---------------------------------------------------------------------- who follows


def test_a_node_that_is_split_during_a_move_is_followed_in_both_parts():
    server = make_server(0)
    assert server.admit(PROMPT, chunk=100)
    server.finish(server.running[0], is_insert=True)
    boundary = make_boundary(server)
    assert boundary.begin(8)
    boundary.advance()
    assert server.admit([*PROMPT[:5], 1], chunk=100)
    finish(server, boundary)
    assert server.allocator.core.hot_tokens == 8


def test_a_node_made_of_a_row_during_a_move_is_followed():
    server = make_server(0)
    assert server.admit(PROMPT, chunk=100)
    for token in (1, 2, 3):
        server.decode(server.running[0], token)
    boundary = make_boundary(server)
    assert boundary.begin(11)
    boundary.advance()
    server.finish(server.running[0], is_insert=True)
    assert server.tree.evictable_size() == 11
    finish(server, boundary)


def test_readers_of_a_slab_that_gives_way_follow_it():
    server = server_with_a_gap()
    core = server.allocator.core
    before = server.tree.hot_version
    boundary = make_boundary(server, budget_tokens=3)
    assert boundary.begin(8)
    finish(server, boundary)
    assert core.hot_tokens == 8
    assert boundary.moved_tokens == 8
    assert server.tree.hot_version > before
    [slab] = [server.tree.directory.slab_of(node.id) for node in server.tree.hot_nodes()]
    assert (slab.base, slab.length) == (1, 8)
    for req in server.running:
        assert server.rows.req_to_token[req.req_pool_idx, :8].tolist() == list(range(1, 9))


# ---------------------------------------------------------------------- in which order


@pytest.fixture
def events(monkeypatch):
    """What happens, in order, with the stream that it is on."""

    def install(server):
        found, noted = record_streams(server.scheduler)
        monkeypatch.setattr(
            "granikv.sglang_plugin.promotion.copy_kv",
            noted("copy", lambda *_: None),
        )
        monkeypatch.setattr(ServerHolders, "_remap_rows", noted("rows", ServerHolders._remap_rows))
        monkeypatch.setattr(holders, "remap", noted("rows", holders.remap))
        return found

    return install


def test_rows_change_behind_the_running_step_and_kv_is_copied_before_the_next(events):
    server = make_server(0)
    assert server.admit(PROMPT, chunk=100)
    found = events(server)
    boundary = make_boundary(server, budget_tokens=8)
    boundary.begin(8)
    boundary.advance()
    assert found == [
        "schedule waits for forward",
        "rows on schedule",
        "forward waits for schedule",
        "copy on forward",
    ]


def test_a_slab_is_copied_first_and_read_there_once_all_of_it_is(events):
    server = server_with_a_gap()
    found = events(server)
    boundary = make_boundary(server, budget_tokens=4)
    assert boundary.compact()
    boundary.advance()
    copies = ["forward waits for schedule", "copy on forward"]
    assert found == copies
    boundary.advance()
    assert found == [*copies, *copies, "schedule waits for forward", "rows on schedule"]


# ---------------------------------------------------------------------- when a policy is asked


class Wanting:
    """Asks for one size after the other, and keeps what it has seen."""

    def __init__(self, *sizes):
        self.sizes, self.seen = list(sizes), []

    def observe(self, window):
        self.seen.append(window)
        return self.sizes.pop(0) if self.sizes else None


@pytest.fixture
def live(monkeypatch):
    """Makes a repartitioner of a server with a policy; `now` is its clock."""

    def make(server, policy, tp_size=1, **options):
        clock = SimpleNamespace(now=100.0)
        monkeypatch.setattr(repartition.time, "monotonic", lambda: clock.now)
        monkeypatch.setattr(repartition, "make_policy", lambda name: policy)
        scheduler = server.scheduler
        scheduler.ps = SimpleNamespace(tp_size=tp_size)
        scheduler.model_config = SimpleNamespace(context_len=SIZE)
        ours = LiveRepartitioner(scheduler, LiveConfig(**options))
        server.tree.repartitioner = ours
        return ours, clock

    return make


def test_looks_come_at_intervals_and_not_while_nothing_runs(live):
    server = make_server(10)
    policy = Wanting()
    _, clock = live(server, policy, policy_interval_s=2.0)
    repartition.between_steps(server.scheduler)
    assert policy.seen == []
    admit(server)
    for now in (100.0, 101.9, 102.1, 103.0, 110.0):
        clock.now = now
        repartition.between_steps(server.scheduler)
    assert [window.now_s for window in policy.seen] == [100.0, 102.1, 110.0]


def test_a_window_says_what_happened_since_the_last_one(live):
    server = make_server(10)
    policy = Wanting()
    _, clock = live(server, policy)
    for last in (1, 2):
        admit(server, [*PROMPT, last])
    server.scheduler.waiting_queue.append(
        SimpleNamespace(origin_input_ids=list(range(30)), sampling_params=None)
    )
    # A row that has ended stays in the batch for one step more.
    gone = SimpleNamespace(req_pool_idx=None, last_node=server.running[0].last_node, seqlen=0)
    server.running.append(gone)
    adder = SimpleNamespace(tree_cache=server.tree)
    repartition._after_add_one_req(AddReqResult.NO_TOKEN, adder)
    repartition._after_add_one_req(AddReqResult.CONTINUE, adder)
    repartition._after_retract_decode(([1, 2], 0.0, []), adder)
    for _ in range(2):
        repartition.between_steps(server.scheduler)
        clock.now += 1.0
    first, second = policy.seen
    assert (first.size_tokens, first.hot_tokens, first.hot_free) == (SIZE, 10, 10)
    assert (first.cold_used, first.cold_free) == (10, 80)
    assert (first.cold_refusals, first.retractions, first.cold_waiting_tokens) == (1, 2, 30)
    assert (first.rows_per_slab, first.rows_per_cold_run) == ((), ((8, 2),))
    assert first.private_tokens == 2
    assert (second.cold_refusals, second.retractions) == (0, 0)


def test_a_move_is_spread_over_steps_and_limits_requests_from_its_begin(live):
    server = make_server(10)
    policy = Wanting(40)
    ours, _ = live(server, policy, move_tokens_per_step=4)
    admit(server)
    repartition.between_steps(server.scheduler)
    core = server.allocator.core
    assert (core.hot_tokens, ours.moved_tokens) == (10, 4)
    assert server.scheduler.max_req_len == SIZE - 40 - 2
    repartition.between_steps(server.scheduler)
    assert (core.hot_tokens, ours.moves, ours.moved_tokens, ours.steps) == (40, 1, 8, 2)
    assert server.scheduler.max_req_len == SIZE - 40 - 2
    assert ours.busy_ns > 0
    repartition.between_steps(server.scheduler)
    assert ours.steps == 2
    server.check_rows()


@pytest.mark.parametrize(("hot_tokens", "promoted"), [(7, 0), (8, 8)])
def test_what_rows_read_in_cold_fills_the_room_that_hot_got(live, hot_tokens, promoted):
    """Nobody has asked for it: where it does not fit, no miss is counted."""
    server = make_server(4, SharedAdmission(min_tokens=4))
    live(server, Wanting(hot_tokens), move_tokens_per_step=SIZE)
    for last in (50, 51):
        admit(server, [*PROMPT, last])
    server.promote()
    misses = dict(server.tree.directory.misses)
    repartition.between_steps(server.scheduler)
    assert server.allocator.core.hot_tokens == hot_tokens
    assert server.tree.promoted_tokens == server.allocator.core.hot_used == promoted
    assert server.tree.directory.misses == misses != {}
    server.check_rows()
    server.check_tree()


@pytest.mark.parametrize("is_queued", [False, True])
def test_no_move_takes_the_room_of_a_request_that_was_let_in(live, is_queued):
    server = make_server(10)
    policy = Wanting(60)
    ours, _ = live(server, policy)
    queued = SimpleNamespace(
        origin_input_ids=PROMPT,
        sampling_params=SimpleNamespace(max_new_tokens=31 if is_queued else 1),
    )
    server.scheduler.waiting_queue.append(queued)
    admit(server, max_new_tokens=1 if is_queued else 31)
    repartition.between_steps(server.scheduler)
    assert len(policy.seen) == 1
    assert (server.allocator.core.hot_tokens, ours.steps) == (10, 0)


@pytest.mark.parametrize(("to_come", "began"), [(5, True), (6, False)])
def test_no_move_takes_what_a_prompt_in_chunks_has_still_to_take(live, to_come, began):
    """SGLang checks only once, before the first chunk, that the whole prompt fits: 80 tokens are
    free, HOT wants 75.
    """
    server = make_server(20)
    policy = Wanting(95)
    ours, _ = live(server, policy)
    server.scheduler.chunked_req = SimpleNamespace(
        full_untruncated_fill_ids=[0] * (30 + to_come), extend_range=SimpleNamespace(end=30)
    )
    ours._boundary.steer(policy, ours._window(0.0), lambda cold_tokens: True)
    assert policy.seen[0].cold_promised == to_come
    assert policy.seen[0].cold_idle == 80 - to_come
    assert ours._boundary.is_moving is began


def test_a_static_split_does_nothing(monkeypatch):
    server = make_server(10)
    server.scheduler.ps = SimpleNamespace(tp_size=1)
    ours = LiveRepartitioner(server.scheduler, LiveConfig())
    admit(server)
    monkeypatch.setattr(repartition.time, "monotonic", lambda: 1 / 0)
    ours.between_steps()
    assert ours.steps == 0


def test_after_a_flush_the_boundary_is_where_it_was_set(live):
    server = make_server(10)
    policy = Wanting(40)
    _, clock = live(server, policy)
    admit(server)
    repartition.between_steps(server.scheduler)
    assert server.allocator.core.hot_tokens == 40
    server.finish(server.running[0], is_insert=False)
    server.tree.reset()
    server.allocator.clear()
    admit(server)
    clock.now += 5.0
    repartition.between_steps(server.scheduler)
    assert len(policy.seen) == 2
    assert policy.seen[1].hot_tokens == 10
    assert server.scheduler.max_req_len == SIZE - 10 - 2


def test_ranks_look_at_the_same_step_by_the_first_ones_clock(live, monkeypatch):
    server = make_server(10)
    policy = Wanting()
    server.scheduler.tp_cpu_group = "group"
    sent = []

    def broadcast(tensor, src, group):
        sent.append((float(tensor), src, group))
        tensor.fill_(7.5)

    monkeypatch.setattr(torch.distributed, "get_global_rank", lambda group, rank: 4 + rank)
    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    live(server, policy, tp_size=2)
    admit(server)
    for _ in range(35):
        repartition.between_steps(server.scheduler)
    assert sent == [(100.0, 4, "group")] * 2
    assert [window.now_s for window in policy.seen] == [7.5]


def test_a_policy_that_does_not_exist_stops_the_start():
    server = make_server(10)
    server.scheduler.ps = SimpleNamespace(tp_size=1)
    with pytest.raises(ConfigError, match="did you mean 'marginal'"):
        LiveRepartitioner(server.scheduler, LiveConfig(repartition="marginl"))
