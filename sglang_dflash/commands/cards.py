"""`python -m sglang_dflash cards`: what fits each size of card, as the table in docs/serving.md."""

from __future__ import annotations

from sglang_dflash.commands.card_names import BY_SIZE, CARDS
from sglang_dflash.commands.card_plan import Offer, offers

HEAD = """| card | target | weights | KV cache | context | KV tokens |
|---|---|---|---|---|---|
"""
MOST_PER_CARD = 3


def run_cards() -> int:
    """Print the table."""
    print(table(), end="")
    return 0


def table() -> str:
    """Return the first pairs that fit each size of card."""
    rows = []
    for size, name in BY_SIZE.items():
        card = CARDS[name]
        for number, offer in enumerate(offers(card.gib, card.capability)[:MOST_PER_CARD]):
            label = f"{size} GB ({card.title})" if number == 0 else ""
            rows.append(f"| {label} | {' | '.join(cells(offer))} |\n")
    return HEAD + "".join(rows)


def cells(offer: Offer) -> list[str]:
    # to thousands, as launch scripts leave some memory unused
    tokens = f"{offer.tokens // 1000 * 1000:,}"
    return [f"`{offer.form.target}`", offer.form.kind, offer.kv_name, f"{offer.context:,}", tokens]
