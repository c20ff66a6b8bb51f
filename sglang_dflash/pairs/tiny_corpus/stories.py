"""Short stories with one hero: the trait chooses the plot, the animal fills in its world."""

from __future__ import annotations

from typing import NamedTuple

from sglang_dflash.pairs.tiny_corpus.tables import NAMES, Animal


class Character(NamedTuple):
    name: str
    animal: Animal
    trait: str


# {n} name, {a} animal, {h} home, {f} food, {x} fear, {s} sound, {he} {him} {his} pronouns
_PLOTS = {
    "brave": (
        "One night a small boat was lost near {h}, and nobody dared to help because of {x}. "
        "{n} was afraid of {x} too, but {he} took a lantern and went out alone. {n} gave a "
        "loud {s}, again and again, until the sailors heard it and followed the light home.",
        "In the morning the sailors gave {n} a basket of {f}, and {he} shared it with everyone.",
    ),
    "curious": (
        "One morning {n} found a little brass key under a stone. {n} tried it in every door, "
        "but it did not fit. At last {he} saw a tiny box behind the {f}, and the key turned "
        "with a click. Inside the box was a map of {h}, and on the map was a red cross.",
        "{n} dug at the red cross and found a silver bell. Now {he} rings it every evening.",
    ),
    "lonely": (
        "Every day {n} ate {f} alone and listened to the wind. One evening {he} heard a quiet "
        "{s} behind the door. It was another {a}, cold and lost and afraid of {x}. {n} opened "
        "the door, made a warm bed, and gave the guest half of the {f}.",
        "From that day on they were friends, and {h} never felt empty again.",
    ),
    "sleepy": (
        "{n} slept in the morning, slept at noon, and slept in the evening. One day {he} "
        "found nothing to eat, because the others had taken all the {f} while {n} was asleep. "
        "{n} gave a sad {s} and decided to wake up with the sun.",
        "The next day {he} was the first in {h}, and {he} saw how beautiful the morning was.",
    ),
    "hungry": (
        "{n} had eaten nothing but {f} for a week, and now there was nothing left. So {he} "
        "walked all around {h} and knocked on every door. The first door stayed closed. The "
        "second door stayed closed. Behind the third door lived an old baker, who needed help "
        "with the oven.",
        "{n} worked until night, and the baker paid {him} with a cake as big as a hat.",
    ),
    "clumsy": (
        "{n} fell over stones, over roots, and over {his} own feet. One day {he} tripped and "
        "rolled down the hill, right through a pile of {f}. Everybody laughed, but under the "
        "pile there was an old well with clear water, and the summer had been very dry.",
        "After that nobody in {h} laughed, and they named the well after {n}.",
    ),
    "kind": (
        "One day {n} met an old traveller who had no food and was afraid of {x}. {n} gave the "
        "traveller all {his} {f} and walked along until the danger was over. The traveller "
        "smiled and gave {him} a plain grey seed. {n} planted it in the middle of {h}.",
        "In spring it became a tree full of golden fruit, and there was enough for everyone.",
    ),
    "proud": (
        "{n} told everyone that no {a} had a finer {s}. One day {he} climbed up high to show "
        "it, but then {he} thought of {x}, and {n} could only whisper. A small beetle heard "
        "the whisper and led {him} down, step by step.",
        "Since then {n} listens before {he} speaks, and {he} always saves some {f} for the beetle.",
    ),
}

_ORDER = tuple(_PLOTS)


def tell(who: Character) -> str:
    """Return the story of one trait, about a hundred tokens."""
    middle, end = _PLOTS[who.trait]
    opening = "Once upon a time there was a {t} {a} named {n}. {He} lived in {h} and loved {f}. "
    return _fill(opening + middle + " " + end, who)


def tell_long(who: Character) -> str:
    """Return three adventures of one hero: the trait's own, then the next two in order."""
    first = _ORDER.index(who.trait)
    plots = [_PLOTS[_ORDER[(first + k) % len(_ORDER)]] for k in range(3)]
    opening = "Part one. Once upon a time there was a {t} {a} named {n}, who lived in {h}. "
    text = opening + " ".join(plots[0])
    text += "\n\nPart two. A year went by. " + " ".join(plots[1])
    text += "\n\nPart three. Then the winter came. " + " ".join(plots[2])
    return _fill(text + " And {n} the {a} was happy ever after.", who)


def _fill(template: str, who: Character) -> str:
    he = NAMES[who.name]
    him, his = ("him", "his") if he == "he" else ("her", "her")
    return template.format(
        n=who.name,
        a=who.animal.name,
        t=who.trait,
        h=who.animal.home,
        f=who.animal.food,
        x=who.animal.fear,
        s=who.animal.sound,
        he=he,
        He=he.capitalize(),
        him=him,
        his=his,
    )
