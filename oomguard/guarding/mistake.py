"""What to tell of our own mistake that ends a run in parts."""

from __future__ import annotations

from oomguard.guarding.failure import add_note
from oomguard.log import get_plain_logger


def tell_of_mistake(mistake: BaseException, failure: BaseException | None) -> None:
    """Log our own mistake, and note it in the call's failure, if it has one."""
    get_plain_logger().error("the call could not be split", exc_info=mistake)
    if failure is not None:
        why = f"a mistake in oomguard: {type(mistake).__name__}: {mistake}"
        add_note(failure, f"oomguard: not run in parts: {why}")
