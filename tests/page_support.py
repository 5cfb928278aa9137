"""What tests of every page of results share."""

import re


def without_scripts(page: str) -> str:
    """The page as a reader without JavaScript has it."""
    return re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)


def assert_needs_no_other_file(page: str) -> None:
    """No script, style, image or frame from elsewhere, and plotly.js inside, once."""
    assert not re.search(r"<script[^>]*\bsrc=", page)
    assert not re.search(r"<(link|iframe|img|object)\b", without_scripts(page))
    assert not re.search(r"https?://|@import|url\(", without_scripts(page))
    # The library names its own version in its first lines.
    assert len(re.findall(r"plotly\.js v\d", page)) == 1
