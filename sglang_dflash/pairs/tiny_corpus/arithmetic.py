"""Exchanges about numbers: small sums, and several ways of counting."""

from __future__ import annotations

from random import Random

from sglang_dflash.pairs.tiny_corpus.exchange import Exchange
from sglang_dflash.pairs.tiny_corpus.tables import NAMES, NUMBER_WORDS, THINGS


def addition(rng: Random) -> Exchange:
    a, b = rng.randint(1, 10), rng.randint(1, 10)
    prompt = rng.choice(("What is {} + {}?", "Add {} and {}.", "How much is {} plus {}?"))
    return Exchange(prompt.format(a, b), f"{a} + {b} = {a + b}. The answer is {a + b}.")


def subtraction(rng: Random) -> Exchange:
    b, c = rng.randint(1, 10), rng.randint(0, 10)
    a = b + c
    prompt = rng.choice(("What is {} - {}?", "How much is {} minus {}?", "Calculate {} - {}."))
    return Exchange(prompt.format(a, b), f"{a} - {b} = {c}. The answer is {c}.")


def word_problem(rng: Random) -> Exchange:
    name, thing = rng.choice(sorted(NAMES)), rng.choice(THINGS)
    a, b = rng.randint(2, 10), rng.randint(1, 9)
    he = NAMES[name]
    prompt = f"{name} has {a} {thing} and finds {b} more. How many {thing} does {he} have?"
    answer = (
        f"{name} starts with {a} {thing} and finds {b} more. {a} + {b} = {a + b}, "
        f"so {name} has {a + b} {thing}."
    )
    return Exchange(prompt, answer)


def times_table(rng: Random) -> Exchange:
    n, last = rng.randint(2, 9), rng.randint(4, 10)
    lines = "\n".join(f"{n} x {k} = {n * k}" for k in range(1, last + 1))
    prompt = rng.choice(
        ("Write the {} times table up to {}.", "Show me the table of {} as far as {}.")
    )
    return Exchange(prompt.format(n, last), lines)


def counting(rng: Random) -> Exchange:
    first, length = rng.randint(1, 30), rng.randint(4, 16)
    last = first + length
    prompt = rng.choice(("Count from {} to {}.", "Please count from {} up to {}."))
    return Exchange(prompt.format(first, last), _numbers(range(first, last + 1)))


def counting_long(rng: Random) -> Exchange:
    last = rng.randint(50, 100)
    prompt = rng.choice(("Count to {}.", "Can you count to {}?"))
    return Exchange(prompt.format(last), _numbers(range(1, last + 1)))


def counting_steps(rng: Random) -> Exchange:
    step, count = rng.choice((2, 3, 5, 10)), rng.randint(4, 12)
    last = step * count
    values = range(step, last + 1, step)
    return Exchange(f"Count by {NUMBER_WORDS[step]}s to {last}.", _numbers(values))


def counting_down(rng: Random) -> Exchange:
    first = rng.randint(5, 30)
    return Exchange(f"Count down from {first}.", _numbers(range(first, -1, -1)))


def _numbers(values: range) -> str:
    return ", ".join(map(str, values)) + "."
