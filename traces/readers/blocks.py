"""From hash blocks to runs: one id per block in, one run per stretch of consecutive ids out."""

from granikv.traces.readers.reading import Reading
from granikv.traces.request import Run
from granikv.traces.segments import private_segment


class BlockRule:
    """Checks the number of ids in each row against the block size.

    A file either names the partial last block of a prompt (ceil, Mooncake) or leaves it out
    (floor, Weka); one row of the wrong kind means a wrong block size, and then every prefix length
    would be wrong too.
    """

    def __init__(self, reading: Reading, block_size: int) -> None:
        self._reading = reading
        self.block_size = block_size
        reading.report.block_size = block_size
        reading.report.block_rule = "either"

    def check(self, ids: int, prompt_tokens: int) -> None:
        """Check one row.

        Raises:
            TraceFormatError: it fits neither rule, or not that of the rows before it.
        """
        full, rest = divmod(prompt_tokens, self.block_size)
        report = self._reading.report
        if not rest and ids == full:
            return
        fits = "ceil" if ids == full + 1 and rest else "floor" if ids == full else None
        if fits is not None and report.block_rule in ("either", fits):
            report.block_rule = fits
            return
        rule = "ceil or floor" if report.block_rule == "either" else report.block_rule
        raise self._reading.error(
            "hash_ids",
            f"{ids} ids for {prompt_tokens} prompt tokens fail the {rule} check of block size "
            f"{self.block_size}",
            "give the block size that this file was made with",
        )


def runs_of_blocks(
    segments: list[int], block_size: int, prompt_tokens: int, request_id: int
) -> tuple[Run, ...]:
    """The runs of one prompt.

    A stretch of consecutive numbers n, n+1, ... becomes one run of the stream n. Prompts with the
    same ids in front get the same runs in front, so nothing is lost, and a prompt of 2,000 dense
    ids costs a few runs. A partial last block counts with its real tokens; tokens behind the last
    id get a stream of their own.
    """
    covered = min(len(segments) * block_size, prompt_tokens)
    runs: list[Run] = []
    if segments:
        start = segments[0]
        expected = start
        used = 0
        for segment in segments:
            if segment != expected:
                length = (expected - start) * block_size
                runs.append(Run(start, length))
                used += length
                start = expected = segment
            expected += 1
        runs.append(Run(start, covered - used))
    if covered < prompt_tokens:
        runs.append(Run(private_segment(request_id), prompt_tokens - covered))
    return tuple(runs)
