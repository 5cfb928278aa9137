"""A plain model of cached prefixes: a dictionary of token tuples, nothing linked."""

from dataclasses import dataclass, field

from granikv.traces.request import Run

Tokens = tuple[tuple[int, int], ...]


def tokens_of(runs: tuple[Run, ...]) -> Tokens:
    """A prompt token by token: two tokens are equal when stream and place in it are."""
    return tuple((segment, place) for segment, length in runs for place in range(length))


@dataclass
class Entry:
    """A node of the model: the tokens between its parent's end and its own."""

    slots: list[int]
    is_hot: bool = False
    locks: int = 0
    used: int = 0

    @property
    def length(self) -> int:
        return len(self.slots)


@dataclass
class PrefixModel:
    """Cached prefixes by their last token's path; nothing is linked, everything is searched."""

    nodes: dict[Tokens, Entry] = field(default_factory=dict)
    clock: int = 0

    def path(self, tokens: Tokens) -> list[Tokens]:
        """Ends of the nodes along `tokens`, which is an end itself."""
        return sorted((end for end in self.nodes if tokens[: len(end)] == end), key=len)

    def cached(self, tokens: Tokens) -> int:
        """Leading tokens that are cached."""
        best = 0
        for end in self.nodes:
            common = next(
                (i for i, (a, b) in enumerate(zip(end, tokens, strict=False)) if a != b),
                min(len(end), len(tokens)),
            )
            best = max(best, common)
        return best

    def cut(self, tokens: Tokens, depth: int) -> None:
        """Make `tokens[:depth]` the end of a node; both parts have just been looked at."""
        at = tokens[:depth]
        if not depth or at in self.nodes:
            return
        below = next(
            end
            for end in sorted(self.nodes, key=len)
            if end[:depth] == at and len(end) - self.nodes[end].length < depth < len(end)
        )
        whole = self.nodes[below]
        left = whole.length - (len(below) - depth)
        whole.used = self.clock
        self.nodes[at] = Entry(whole.slots[:left], whole.is_hot, whole.locks, self.clock)
        whole.slots = whole.slots[left:]

    def match(self, tokens: Tokens) -> list[Tokens]:
        self.clock += 1
        depth = self.cached(tokens)
        self.cut(tokens, depth)
        path = self.path(tokens[:depth])
        for end in path:
            self.nodes[end].used = self.clock
        return path

    def refresh(self, tokens: Tokens) -> None:
        self.clock += 1
        for end in self.path(tokens):
            self.nodes[end].used = self.clock

    def insert(self, tokens: Tokens, start: int, slots: list[int], is_hot: bool) -> list[int]:
        """Cache `tokens[start : start + len(slots)]`; returns the COLD slots that go back."""
        end = start + len(slots)
        known = min(self.cached(tokens[:end]), end)
        freed: list[int] = []
        if known > start:
            self.cut(tokens, known)
        for at in self.path(tokens[:known]):
            if len(at) <= start:
                continue
            entry = self.nodes[at]
            ours = slots[len(at) - entry.length - start : len(at) - start]
            if not is_hot:
                freed += ours
            elif not entry.is_hot:
                freed += entry.slots
                entry.slots, entry.is_hot = ours, True
        if known < end:
            self.clock += 1
            self.nodes[tokens[:end]] = Entry(slots[known - start :], is_hot, 0, self.clock)
        return freed

    def lock(self, tokens: Tokens, by: int) -> None:
        for end in self.path(tokens):
            self.nodes[end].locks += by

    def children(self, parent: Tokens) -> list[Tokens]:
        return [
            end
            for end, entry in self.nodes.items()
            if len(end) - entry.length == len(parent) and end[: len(parent)] == parent and end
        ]

    def next_victim(self) -> Tokens | None:
        """The COLD leaf that nobody holds and that was used longest ago."""
        leaves = [
            end
            for end, entry in self.nodes.items()
            if not entry.locks and not entry.is_hot and not self.children(end)
        ]
        return min(leaves, key=lambda end: self.nodes[end].used, default=None)

    def evictable(self) -> int:
        return sum(e.length for e in self.nodes.values() if not e.locks and not e.is_hot)
