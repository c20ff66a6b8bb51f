"""The synthetic corpus of the tiny pair: chats written from templates and small tables."""
