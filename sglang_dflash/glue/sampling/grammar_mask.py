"""The grammar mask of every row of a block.

Row k allows only the tokens that the grammar allows after drafts 1..k. The matcher advances along
the drafts while they are legal, then is rolled back: SGLang advances it by committed tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_dflash.glue import compat

# backends whose matchers can be rolled back
BACKENDS = ("xgrammar", "llguidance")


def mask_rows(
    reqs: Sequence[Any], blocks: Sequence[Sequence[int]], *, vocab_size: int, device: Any
) -> Any:
    """Return the mask of all rows, ready to apply; rows without a grammar allow everything.

    `blocks` are the blocks' tokens, anchor first. Rows after a draft that the grammar forbids stay
    unmasked: acceptance cannot reach them.
    """
    grammar = next(req.grammar for req in reqs if req.grammar is not None)
    width = len(blocks[0])
    mask = grammar.allocate_vocab_mask(
        vocab_size=vocab_size, batch_size=len(reqs) * width, device=device
    )
    for i, (req, block) in enumerate(zip(reqs, blocks, strict=True)):
        if req.grammar is not None and not req.grammar.finished:
            _fill(req.grammar, block, mask, first_row=i * width)
    return compat.GrammarMask(grammar, grammar.move_vocab_mask(mask, device))


def _fill(grammar: Any, block: Sequence[int], mask: Any, *, first_row: int) -> None:
    accepted = 0
    try:
        for row, draft in enumerate([*block[1:], None]):
            if grammar.is_terminated():
                break
            grammar.fill_vocab_mask(mask, first_row + row)
            if draft is None or not _accepts(grammar, draft):
                break
            accepted += 1
    finally:
        if accepted:
            grammar.rollback(accepted)


def _accepts(grammar: Any, token: int) -> bool:
    try:
        grammar.accept_token(token)
    except ValueError:
        return False
    return True
