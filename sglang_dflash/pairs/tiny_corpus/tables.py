"""Facts and word lists of an invented world, which fill the templates. Data only.

The whole corpus is generated from these tables, so the repository needs no data set.
"""

from __future__ import annotations

from typing import NamedTuple


class Island(NamedTuple):
    name: str
    town: str
    colour: str
    keeper: str
    animal: str
    food: str
    craft: str


ISLANDS = (
    Island("Marrow", "Saltgate", "green", "Odile Fenn", "foxes", "barley cakes", "rope"),
    Island("Tessaly", "Low Harbour", "blue", "Bram Tolliver", "otters", "fish pies", "boats"),
    Island("Quill", "Inkwell", "white", "Petra Vane", "owls", "honey bread", "paper"),
    Island("Ember", "Cinder Row", "red", "Jonah Ashby", "goats", "pepper soup", "glass"),
    Island("Wren", "Featherfall", "yellow", "Ada Merle", "larks", "plum jam", "flutes"),
    Island("Hollow", "Deepwell", "violet", "Silas Crane", "badgers", "mushroom stew", "bells"),
    Island("Bracken", "Mossbridge", "orange", "Nell Harrow", "hares", "apple tarts", "baskets"),
    Island("Skerry", "Gull Point", "silver", "Idris Pell", "seals", "oat biscuits", "nets"),
)

NAMES = {
    "Mira": "she",
    "Tobin": "he",
    "Pip": "he",
    "Lena": "she",
    "Oskar": "he",
    "Juno": "she",
    "Felix": "he",
    "Hazel": "she",
    "Bruno": "he",
    "Ivy": "she",
    "Clara": "she",
    "Otto": "he",
}


class Animal(NamedTuple):
    name: str
    home: str
    food: str
    fear: str
    sound: str


ANIMALS = (
    Animal("fox", "the pine forest", "blackberries", "thunder", "yip"),
    Animal("otter", "the slow river", "clams", "the waterfall", "chirp"),
    Animal("owl", "the old oak", "seed cakes", "bright lamps", "hoot"),
    Animal("hare", "the long meadow", "clover", "the dark", "thump"),
    Animal("bear", "the snowy hills", "honey", "thin ice", "growl"),
    Animal("mouse", "the mill", "cheese", "the cat", "squeak"),
    Animal("goat", "the stony valley", "thistles", "deep water", "bleat"),
    Animal("duck", "the round pond", "breadcrumbs", "the north wind", "quack"),
    Animal("badger", "the hollow bank", "mushrooms", "loud bells", "grunt"),
    Animal("seal", "the grey cove", "herring", "fishing nets", "bark"),
    Animal("frog", "the lily marsh", "flies", "the heron", "croak"),
    Animal("cat", "the harbour", "cream", "the rain", "purr"),
)

TRAITS = ("brave", "curious", "lonely", "sleepy", "hungry", "clumsy", "kind", "proud")

DEFINITIONS = {
    "lighthouse": "a tall tower with a bright light that helps ships find the way at night",
    "compass": "a small tool with a needle that always points to the north",
    "harbour": "a calm place by the sea where boats are safe from wind and waves",
    "lantern": "a lamp with a cover of glass that keeps the flame safe from the wind",
    "map": "a picture of a place seen from above that shows how to go from here to there",
    "bridge": "a path built over water or a valley so that people can cross it",
    "river": "a long stream of fresh water that flows down from the hills to the sea",
    "island": "a piece of land with water all around it",
    "forest": "a large place where many trees grow close together",
    "winter": "the coldest season of the year, when the nights are long and snow may fall",
    "summer": "the warmest season of the year, when the days are long and bright",
    "cloud": "a great number of tiny drops of water that float together in the sky",
    "rain": "water that falls from the clouds in drops",
    "clock": "a machine that measures time and shows the hour and the minute",
    "book": "a set of pages bound together, full of words or pictures",
    "letter": "a message on paper that one person sends to another",
    "window": "an opening in a wall, covered with glass, that lets in the light",
    "kite": "a light toy on a long string that flies in the wind",
    "anchor": "a heavy hook on a chain that keeps a boat in one place",
    "bakery": "a shop where bread and cakes are made and sold",
    "garden": "a piece of ground where people grow flowers and vegetables",
    "friend": "a person whom you like and trust, and who likes and trusts you",
    "promise": "something that you say you will surely do",
    "secret": "something that only a few people know",
    "shadow": "a dark shape that appears where something stands in the light",
    "echo": "a sound that comes back to you from a wall or a hill",
    "tide": "the slow rise and fall of the sea, twice on every day",
    "feather": "one of the light, soft things that cover the body of a bird",
    "ladder": "two long poles joined by steps, used to climb up and down",
    "candle": "a stick of wax with a string inside that burns to give light",
}

# four line endings, rhyming in pairs
POEMS = {
    "moon": (
        "silver and round",
        "without any sound",
        "the roofs and the bay",
        "the end of the day",
    ),
    "sea": (
        "restless and blue",
        "for me and for you",
        "the boats and the sand",
        "the edge of the land",
    ),
    "rain": (
        "gentle and grey",
        "for most of the day",
        "the leaves on the tree",
        "my window and me",
    ),
    "wind": (
        "playful and cold",
        "and centuries old",
        "the hats and the door",
        "the gulls on the shore",
    ),
    "snow": (
        "quiet and white",
        "all through the night",
        "the hill and the lane",
        "the old window pane",
    ),
    "fire": (
        "golden and warm",
        "in spite of the storm",
        "the kettle and chair",
        "the cat sleeping there",
    ),
    "river": (
        "narrow and long",
        "with never a wrong",
        "the stones and the mill",
        "the foot of the hill",
    ),
    "garden": (
        "tidy and green",
        "the best ever seen",
        "the bees and the pears",
        "the grass on the stairs",
    ),
    "lantern": (
        "little and bright",
        "to hold back the night",
        "the boats and the pier",
        "the people from here",
    ),
    "oak": (
        "patient and tall",
        "through summer and fall",
        "the birds in a ring",
        "the coming of spring",
    ),
}

DISHES = {
    "carrot soup": ("carrots", "pot", "salt and butter", "twenty"),
    "potato soup": ("potatoes", "pot", "salt and cream", "thirty"),
    "apple pie": ("apples", "dish", "sugar and cinnamon", "forty"),
    "plum cake": ("plums", "tin", "sugar and flour", "fifty"),
    "mushroom stew": ("mushrooms", "pot", "salt and thyme", "thirty"),
    "berry jam": ("berries", "pan", "sugar and lemon", "twenty"),
    "onion bread": ("onions", "tin", "flour and yeast", "forty"),
    "fish pie": ("herrings", "dish", "milk and pepper", "fifty"),
}

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January", "February", "March", "April", "May", "June",
    "July", "August", "September", "October", "November", "December",
)  # fmt: skip
SEASONS = ("spring", "summer", "autumn", "winter")
COLOURS = ("red", "orange", "yellow", "green", "blue", "indigo", "violet")
NUMBER_WORDS = (
    "zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine", "ten",
)  # fmt: skip
THINGS = ("shells", "apples", "stones", "buttons", "feathers", "coins", "pears", "stamps")
WORDS = (
    "lantern", "river", "copper", "window", "marble", "thistle", "pebble", "garden", "velvet",
    "hammer", "ribbon", "candle", "meadow", "button", "anchor", "silver", "barrel", "feather",
)  # fmt: skip
BEYOND = (
    "the capital of France", "quantum physics", "the stock market", "football", "computers",
    "the president", "electric cars", "space rockets", "philosophy", "the price of gold",
    "video games", "airports", "Roman history", "vitamins", "elections", "chemistry",
)  # fmt: skip
SYSTEMS = (
    "You are a helpful assistant.",
    "You are Tiny, a small and friendly model from the Lantern Isles.",
    "Answer clearly and politely.",
    "You are a patient teacher.",
)
