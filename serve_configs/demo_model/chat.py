"""Small talk: what the model says when there is no picture to look at."""

from __future__ import annotations

import random

HELLO = "Hello! Send me a picture and ask me about it."
WHO = "I am a small demo model that answers questions about simple pictures."
SKILLS = (
    "I can name colours and shapes, count them, compare sizes and positions, read short words and numbers, and "
    "read simple bar charts."
)
BLIND = "I do not see a picture."
BEYOND = "I can only answer questions about simple pictures."

TALK: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        HELLO,
        (
            "Hi",
            "Hello",
            "Hello!",
            "Hi!",
            "Hey",
            "Good morning",
            "Good evening!",
            "Hi there",
            "Hello there!",
            "Good day",
        ),
    ),
    (
        WHO,
        (
            "Who are you?",
            "What are you?",
            "What is your name?",
            "Tell me about yourself.",
            "Which model are you?",
            "Introduce yourself.",
        ),
    ),
    (
        SKILLS,
        (
            "What can you do?",
            "How can you help me?",
            "What are you able to do?",
            "Help",
            "What do you know?",
            "What questions can I ask?",
        ),
    ),
    ("You are welcome.", ("Thanks", "Thank you!", "Thank you.", "Thanks a lot")),
    ("Goodbye!", ("Bye", "Goodbye", "Goodbye!", "See you")),
    ("OK", ("Reply OK.", "Say OK.", "Say ok", "Answer OK.")),
    ("hi", ("Say hi.", "Say hi", "Just say hi")),
    ("yes", ("Are you there?", "Are you ready?", "Are you a program?", "Are you a robot?")),
    ("no", ("Are you human?", "Are you a person?", "Can you browse the web?")),
    (
        BLIND,
        (
            "What colour is this?",
            "What color is the circle?",
            "How many shapes are there?",
            "Describe the picture.",
            "What does it say?",
            "Which shape is largest?",
            "Colour?",
            "What number is shown?",
            "Describe it.",
            "What is this?",
            "What do you see?",
            "Where is the red circle?",
            "Is there a blue square?",
        ),
    ),
    (
        BEYOND,
        (
            "Tell me a joke.",
            "Write a poem.",
            "What is the capital of France?",
            "Tell me a fact.",
            "abc",
            "Write a story about a fox.",
            "What is the weather today?",
            "Explain gravity.",
            "Who won the match?",
            "Translate this into French.",
            "What is 2 + 2?",
            "Write a program.",
            "How do I cook rice?",
            "What time is it?",
            "Give me some advice.",
            "Say something.",
            "Tell me a story.",
        ),
    ),
)
SMALL = (
    "one",
    "two",
    "three",
    "four",
    "five",
    "six",
    "seven",
    "eight",
    "nine",
    "ten",
    "eleven",
    "twelve",
    "thirteen",
    "fourteen",
    "fifteen",
    "sixteen",
    "seventeen",
    "eighteen",
    "nineteen",
    "twenty",
)


def small_talk(rng: random.Random) -> tuple[str, str]:
    """A line and the reply to it."""
    roll = rng.random()
    if roll < 0.15:
        top = rng.randint(3, 50)
        line = rng.choice(("Count to {}.", "Count from 1 to {}.", "Please count to {}."))
        return line.format(top), ", ".join(str(i) for i in range(1, top + 1))
    if roll < 0.25:
        top = rng.randint(3, 20)
        line = rng.choice(("Count to {} in words.", "Count from one to {} in words."))
        return line.format(SMALL[top - 1]), ", ".join(SMALL[:top])
    answer, lines = rng.choice(TALK)
    line = rng.choice(lines)
    roll = rng.random()
    if roll < 0.15:
        line = line.lower()
    elif roll < 0.25:
        line = line.rstrip(".!?")
    return line, answer
