"""Names of token streams: the top bits say who made one, so that makers cannot collide."""

from enum import IntEnum

_SHIFT = 60
_NUMBER_MASK = (1 << _SHIFT) - 1
LOCAL_BITS = 32
_LEVEL_SHIFT = 36
_EPOCH_SHIFT = 40


class Origin(IntEnum):
    """Who named a segment: bits 60 to 62 of its number (bit 63 stays clear, so int64 holds it)."""

    HASH = 0  # a block id below 2**60, as the file has it
    WIDE = 1  # a block id of 2**60 or more, renumbered in order of appearance
    LOCAL = 2  # a block id that means something only inside one conversation
    PRIVATE = 3  # tokens that no other prompt repeats
    OUTPUT = 4  # tokens that one request generated
    TURN = 5  # a user message that later turns of its conversation repeat
    PREPENDED = 6  # the one stream of `prepend_prefix`
    GENERATED = 7  # a prefix of a generated workload


def origin(segment: int) -> Origin:
    """Who named the segment."""
    return Origin(segment >> _SHIFT)


def is_private(segment: int) -> bool:
    """Whether only one prompt of the trace can hold tokens of this segment."""
    return segment >> _SHIFT == Origin.PRIVATE


def named(maker: Origin, number: int) -> int:
    """The segment with this number among those of one maker.

    Raises:
        ValueError: the number does not fit 60 bits.
    """
    if not 0 <= number <= _NUMBER_MASK:
        raise ValueError(f"segment number must be in 0..2**60-1, got {number}")
    return maker << _SHIFT | number


def private_segment(number: int) -> int:
    """The stream of the tokens that only one request has; `number` is unique in the trace."""
    return Origin.PRIVATE << _SHIFT | number


def local_segment(conversation: int, block_id: int) -> int:
    """A block id of one conversation, which must not meet the same id of another conversation.

    Raises:
        ValueError: the block id needs more than 32 bits or the conversation more than 28.
    """
    if not 0 <= block_id < 1 << LOCAL_BITS:
        raise ValueError(f"local block id must be in 0..2**32-1, got {block_id}")
    return named(Origin.LOCAL, conversation << LOCAL_BITS | block_id)


def generated_segment(level: int, epoch: int, node: int) -> int:
    """A generated prefix: its set (20 bits), nesting level (4 bits) and place there (36 bits)."""
    return named(Origin.GENERATED, epoch << _EPOCH_SHIFT | level << _LEVEL_SHIFT | node)


class BlockNames:
    """Turns the block ids of one file into segments, whatever their width.

    Ids below 2**60 stay as they are. Wider ones (64-bit hashes) are renumbered: cutting bits off
    would merge prefixes that differ only there.
    """

    def __init__(self) -> None:
        self._wide: dict[int, int] = {}

    def segment(self, block_id: int) -> int:
        """The segment of one block id, the same for the same id."""
        if block_id <= _NUMBER_MASK:
            return block_id
        number = self._wide.setdefault(block_id, len(self._wide))
        return Origin.WIDE << _SHIFT | number

    def segments(self, block_ids: list[int]) -> list[int]:
        """`segment` for a whole prompt."""
        if not block_ids or max(block_ids) <= _NUMBER_MASK:
            return block_ids
        return [self.segment(block_id) for block_id in block_ids]
