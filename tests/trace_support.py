"""Helpers of the trace tests, written apart from the code they check."""


def shared_tokens(left, right):
    """Tokens that two prompts have in common from the start, counted run by run."""
    total = 0
    for a, b in zip(left, right, strict=False):
        if a.segment != b.segment:
            break
        total += min(a.length, b.length)
        if a.length != b.length:
            break
    return total
