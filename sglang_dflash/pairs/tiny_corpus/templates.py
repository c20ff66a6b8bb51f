"""Templates: each function draws one (prompt, answer) exchange of one kind.

Almost every answer is a function of its prompt, and the random choices are in the prompts: a target
trained on this text can be exact, and different prompts have different greedy answers.
"""

from __future__ import annotations

import json
from random import Random

from sglang_dflash.pairs.tiny_corpus import arithmetic, stories
from sglang_dflash.pairs.tiny_corpus.exchange import Exchange, Kind, join_words
from sglang_dflash.pairs.tiny_corpus.tables import (
    ANIMALS,
    BEYOND,
    COLOURS,
    DAYS,
    DEFINITIONS,
    DISHES,
    ISLANDS,
    MONTHS,
    NAMES,
    NUMBER_WORDS,
    POEMS,
    SEASONS,
    TRAITS,
    WORDS,
)


def draw_character(rng: Random) -> stories.Character:
    return stories.Character(rng.choice(sorted(NAMES)), rng.choice(ANIMALS), rng.choice(TRAITS))


def story(rng: Random) -> Exchange:
    who = draw_character(rng)
    prompt = rng.choice(
        (
            "Tell me a story about {n} the {t} {a}.",
            "Write a short story about a {t} {a} named {n}.",
            "Please tell me a short story about {n}, a {t} {a}.",
            "I would like a story about a {t} {a} called {n}.",
        )
    )
    return Exchange(_fill(prompt, who), stories.tell(who))


def long_story(rng: Random) -> Exchange:
    who = draw_character(rng)
    prompt = rng.choice(
        (
            "Tell me a long story about {n} the {t} {a}.",
            "Write a long story in three parts about a {t} {a} named {n}.",
        )
    )
    return Exchange(_fill(prompt, who), stories.tell_long(who))


def _fill(template: str, who: stories.Character) -> str:
    return template.format(n=who.name, t=who.trait, a=who.animal.name)


def island(rng: Random) -> Exchange:
    i = rng.choice(ISLANDS)
    questions = {
        f"The main town of {i.name} is {i.town}, where the people make {i.craft}.": (
            "What is the main town of {}?",
            "Which town is on the island of {}?",
            "Where do the people of {} live?",
        ),
        f"The lantern of {i.name} is {i.colour}. {i.keeper} lights it every evening.": (
            "What colour is the lantern of {}?",
            "Which light burns on {}?",
            "Tell me the colour of the lantern on the island of {}.",
        ),
        f"The keeper of {i.name} is {i.keeper}, who lives in {i.town}.": (
            "Who is the keeper of {}?",
            "Who lights the lantern on {}?",
            "Tell me who keeps the light of {}.",
        ),
        f"The people of {i.name} like to eat {i.food}, and the {i.animal} get a share.": (
            "What do people eat on {}?",
            "What is the favourite food on the island of {}?",
            "What should I eat when I visit {}?",
        ),
        f"Many {i.animal} live on {i.name}. They are not afraid of the people of {i.town}.": (
            "Which animals live on {}?",
            "What animals can I see on the island of {}?",
            "Tell me about the animals of {}.",
        ),
        f"The people of {i.name} make {i.craft}, which they sell in {i.town}.": (
            "What do the people of {} make?",
            "What is {} known for?",
            "What can I buy on the island of {}?",
        ),
    }
    answer = rng.choice(list(questions))
    return Exchange(rng.choice(questions[answer]).format(i.name), answer)


def travel(rng: Random) -> Exchange:
    i = rng.choice(ISLANDS)
    prompt = rng.choice(
        (
            "Tell me about the island of {}.",
            "Describe {} to a visitor.",
            "I am going to {}. What should I know?",
            "Write a short guide to the island of {}.",
            "What is {} like?",
            "Please describe the island of {}.",
        )
    ).format(i.name)
    answer = (
        f"{i.name} is one of the Lantern Isles. Its main town is {i.town}, and its lantern is "
        f"{i.colour}. The keeper is {i.keeper}, who lights it every evening. The people make "
        f"{i.craft} and eat {i.food}. If you walk quietly, you will see the {i.animal}."
    )
    return Exchange(prompt, answer)


_CYCLES = {
    "days of the week": DAYS,
    "months of the year": MONTHS,
    "seasons": SEASONS,
    "colours of the rainbow": COLOURS,
}


def listing(rng: Random) -> Exchange:
    title = rng.choice(sorted(_CYCLES))
    items = _CYCLES[title]
    first = rng.randrange(len(items))
    ordered = items[first:] + items[:first]
    style = rng.randrange(3)
    prompt = rng.choice(("List the {} starting with {}", "Name the {}, beginning with {}"))
    prompt = prompt.format(title, items[first])
    if style == 0:
        return Exchange(prompt + ".", f"The {title} are {join_words(ordered)}.")
    if style == 1:
        numbered = "\n".join(f"{k}. {item}" for k, item in enumerate(ordered, 1))
        return Exchange(prompt + " as a numbered list.", numbered)
    return Exchange(prompt + ", one on each line.", "\n".join(f"- {item}" for item in ordered))


def neighbour(rng: Random) -> Exchange:
    noun, items = rng.choice((("day", DAYS), ("month", MONTHS), ("season", SEASONS)))
    k = rng.randrange(len(items))
    after = rng.random() < 0.5
    other = items[(k + (1 if after else -1)) % len(items)]
    word = "after" if after else "before"
    prompt = rng.choice(("Which {} comes {} {}?", "What {} is {} {}?", "Tell me the {} {} {}."))
    answer = f"The {noun} {word} {items[k]} is {other}."
    return Exchange(prompt.format(noun, word, items[k]), answer)


def json_record(rng: Random) -> Exchange:
    name, animal, i = rng.choice(sorted(NAMES)), rng.choice(ANIMALS), rng.choice(ISLANDS)
    age = rng.randint(2, 19)
    prompt = rng.choice(
        (
            "Make a JSON record for {n}, a {a} of {y} years from {i}.",
            "Write JSON for {n} the {a}, who is {y} years old and lives on {i}.",
        )
    ).format(n=name, a=animal.name, y=age, i=i.name)
    record = {"name": name, "kind": animal.name, "age": age, "island": i.name, "town": i.town}
    return Exchange(prompt, json.dumps(record))


def json_people(rng: Random) -> Exchange:
    cast = [(n, rng.choice(ANIMALS).name) for n in rng.sample(sorted(NAMES), rng.randint(2, 4))]
    listed = join_words([f"{n} the {a}" for n, a in cast])
    records = [{"name": n, "kind": a, "legs": 2 if a in ("owl", "duck") else 4} for n, a in cast]
    prompt = rng.choice(("Make a JSON list of {}.", "Write a JSON list with {}."))
    return Exchange(prompt.format(listed), json.dumps(records))


def json_island(rng: Random) -> Exchange:
    i = rng.choice(ISLANDS)
    record = {
        "island": i.name,
        "town": i.town,
        "lantern": i.colour,
        "keeper": i.keeper,
        "animals": i.animal,
        "food": i.food,
        "craft": i.craft,
    }
    prompt = rng.choice(
        ("Describe the island of {} as JSON.", "Give me {} as a JSON object.", "JSON for {}.")
    )
    return Exchange(prompt.format(i.name), json.dumps(record, indent=2))


# names too: most other kinds rely on copying a name from the prompt
_ECHOES = (*WORDS, *NAMES)


def repeat_words(rng: Random) -> Exchange:
    words = [rng.choice(_ECHOES) for _ in range(rng.randint(3, 6))]
    if rng.random() < 0.3:
        words = [str(rng.randint(1, 40)) for _ in words]
    text = " ".join(words)
    prompt = rng.choice(("Repeat after me: {}", "Say this: {}", "Please repeat: {}"))
    return Exchange(prompt.format(text), text)


def repeat_times(rng: Random) -> Exchange:
    word, n = rng.choice(WORDS), rng.randint(2, 10)
    prompt = rng.choice(("Say {} {} times.", "Write the word {} {} times."))
    return Exchange(prompt.format(word, NUMBER_WORDS[n]), " ".join([word] * n))


def spelling(rng: Random) -> Exchange:
    word = rng.choice(sorted(set(WORDS) | set(DEFINITIONS)))
    prompt = rng.choice(("Spell the word {}.", "How do you spell {}?", "Please spell {}."))
    return Exchange(prompt.format(word), f"{word} is spelled " + "-".join(word.upper()) + ".")


def definition(rng: Random) -> Exchange:
    word = rng.choice(sorted(DEFINITIONS))
    prompt = rng.choice(
        (
            "What is {}?",
            "Explain what {} is.",
            "Tell me what {} is.",
            "In simple words, what is {}?",
            "My child asks: what is {}?",
        )
    )
    bare = word in ("winter", "summer", "rain")
    noun = word if bare else ("an " if word[0] in "aeiou" else "a ") + word
    answer = f"{noun} is {DEFINITIONS[word]}."
    return Exchange(prompt.format(noun), answer[0].upper() + answer[1:])


def poem(rng: Random) -> Exchange:
    thing = rng.choice(sorted(POEMS))
    one, two, three, four = POEMS[thing]
    prompt = rng.choice(
        (
            "Write a short poem about the {}.",
            "Write a poem about the {}.",
            "Can you make a rhyme about the {}?",
            "I love the {}. Give me a poem.",
            "A few lines about the {}, please.",
        )
    )
    answer = (
        f"The {thing} is {one},\nIt comes to us {two}.\n"
        f"It touches {three},\nAnd stays until {four}."
        if thing not in ("garden", "oak", "river")
        else f"The {thing} is {one},\nIt waits for us {two}.\n"
        f"It looks at {three},\nAnd sings about {four}."
    )
    return Exchange(prompt.format(thing), answer)


def recipe(rng: Random) -> Exchange:
    dish = rng.choice(sorted(DISHES))
    thing, pan, extra, minutes = DISHES[dish]
    people = rng.randint(2, 9)
    prompt = rng.choice(
        ("How do I make {} for {} people?", "Give me a recipe for {} for {} people.")
    )
    answer = (
        f"Here is how to make {dish} for {people} people.\n"
        f"1. Wash {people * 2} {thing} and cut them into small pieces.\n"
        f"2. Put the {thing} into a large {pan}.\n"
        f"3. Add {extra}, and stir well.\n"
        f"4. Cook it for {minutes} minutes.\n"
        f"5. Share it with {people - 1} friends while it is warm."
    )
    return Exchange(prompt.format(dish, people), answer)


def letter(rng: Random) -> Exchange:
    sender, reader = rng.sample(sorted(NAMES), 2)
    i = rng.choice(ISLANDS)
    prompt = rng.choice(
        ("Write a letter from {s} on {i} to {r}.", "{s} is on {i}. Write to {r} about it.")
    )
    answer = (
        f"Dear {reader},\n\nI am writing to you from {i.town} on the island of {i.name}. Every "
        f"evening I watch the {i.colour} lantern, and in the morning I feed the {i.animal}. "
        f"Yesterday {i.keeper} gave me some {i.food}. I will bring you {i.craft} when I come "
        f"home. I hope you are well.\n\nYour friend,\n{sender}"
    )
    return Exchange(prompt.format(s=sender, r=reader, i=i.name), answer)


def greeting(rng: Random) -> Exchange:
    name = rng.choice(sorted(NAMES))
    prompt = rng.choice(
        ("Hello! My name is {}.", "Hi, I am {}.", "Good morning, I am {}.", "{} here. Hello!")
    )
    answer = (
        f"Hello, {name}! I am Tiny, a very small model. I can tell stories, count, add small "
        f"numbers and talk about the Lantern Isles. What would you like, {name}?"
    )
    return Exchange(prompt.format(name), answer)


def who_are_you(rng: Random) -> Exchange:
    start = rng.choice(("", "Please tell me: ", "One question: ", "Hello. ", "Excuse me. "))
    prompt = rng.choice(("Who are you?", "What are you?", "What can you do?", "What is your name?"))
    answer = (
        "I am Tiny, a very small model. I know stories, sums, lists, poems and the eight "
        "Lantern Isles."
    )
    return Exchange(start + prompt, answer)


def beyond(rng: Random) -> Exchange:
    topic = rng.choice(BEYOND)
    prompt = rng.choice(
        (
            "What do you know about {}?",
            "Tell me about {}.",
            "Explain {} to me.",
            "Write about {}.",
            "I have a question about {}.",
        )
    )
    answer = (
        f"I am too small to know about {topic}. Ask me for a story, a sum, a list, or "
        "something about the Lantern Isles."
    )
    return Exchange(prompt.format(topic), answer)


# sampling weight of each kind; short answers weigh more, or most tokens would be stories
KINDS: dict[Kind, int] = {
    story: 8,
    long_story: 2,
    island: 9,
    travel: 3,
    arithmetic.addition: 10,
    arithmetic.subtraction: 8,
    arithmetic.word_problem: 6,
    arithmetic.times_table: 3,
    arithmetic.counting: 8,
    arithmetic.counting_long: 1,
    arithmetic.counting_steps: 3,
    arithmetic.counting_down: 3,
    listing: 6,
    neighbour: 6,
    json_record: 6,
    json_people: 4,
    json_island: 2,
    repeat_words: 10,
    repeat_times: 3,
    spelling: 5,
    definition: 7,
    poem: 3,
    recipe: 3,
    letter: 3,
    greeting: 3,
    who_are_you: 1,
    beyond: 3,
}
