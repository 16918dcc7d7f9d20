"""A call of ``generate`` as it is put into a trace: whether it can be, and which of its arguments hold rows there."""

from __future__ import annotations

from typing import TYPE_CHECKING

from oomguard.engines.transformers.began import EARLY_EXIT
from oomguard.engines.transformers.generate_rows import ROW_LISTS, UNSPLITTABLE, is_overridden
from oomguard.engines.transformers.media import Media
from oomguard.engines.transformers.taken_rows import why_unlisted
from oomguard.engines.transformers.tensors import is_tensor
from oomguard.engines.transformers.traced_call import TracedCall
from oomguard.engines.transformers.whole_view import NAMES

if TYPE_CHECKING:
    from oomguard.engines.transformers.generate import GenerateCall


def may_be_followed(call: GenerateCall) -> bool:
    """Return whether the length of a call and all that it is given can be put into a trace."""
    if call.max_new_tokens is None or not hasattr(call.model, "parameters"):
        return False
    if any(isinstance(call.kwargs.get(name), (list, tuple)) for name in ROW_LISTS) or call.option(EARLY_EXIT):
        return False  # it would have to be cut for each number of rows; how far a draft goes is told by values
    if call.chunk_tokens is not None or call.media() != Media({}):
        return False  # media differ in size
    # What a method of the model's own keeps of each step is its own; of several for an input it is of other rows.
    return not (call.gives_record and (is_overridden(call.model) or call.several))


def followed_generate(call: GenerateCall) -> TracedCall:
    """Return a call that may be followed, to be asked what other numbers of rows need."""
    arguments = call.given()
    cut = {n: v for n, v in arguments.items() if is_tensor(v) and call.is_cut(n)}
    others = {n: v for n, v in arguments.items() if n not in cut and n not in UNSPLITTABLE and n not in NAMES}
    return TracedCall(
        call.model,
        cut,
        others,
        max(1, call.max_new_tokens or 0),
        record_rows=call.rows if call.gives_record else None,
        around=call.changed,
        refuse_again=call.view.refuse,
        unlisted=why_unlisted(call.taken),
    )
