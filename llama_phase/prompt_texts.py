"""Real English for prompts: the demo and the tests never feed random tokens.

The text is the first eleven chapters of Jane Austen's *Persuasion* (1818, public domain), one paragraph a line.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from importlib.resources import files

# Openings that a pretrained model without chat template can go on with.
PROMPT_TEXTS: dict[str, str] = {
    "lighthouse": "The lighthouse keeper climbed the last of the two hundred steps, set down his lantern, and saw",
    "recipe": (
        "Onion soup. Cut six large onions into thin slices and let them brown slowly in butter, stirring often. "
        "When they are dark and sweet, add a spoonful of flour, a glass of white wine and a litre of good stock. Then"
    ),
    "letter": (
        "Dear Margaret,\n\nThank you for your letter, which took eleven days to reach us. The roads are bad since the "
        "rain, and the post comes when it can. You ask how the harvest went this year. I am glad to say that"
    ),
    "lecture": (
        "A lever is the simplest of machines. Rest a long bar on a stone, put one end under a weight and press down on "
        "the other, and a child can lift what a strong man cannot. What is gained in force is paid for in distance: "
        "the hand travels far so that the load may travel a little. The same bargain is struck by the pulley,"
    ),
    "marriage": (
        "It is a truth universally acknowledged, that a single man in possession of a good fortune, must be in want of "
        "a wife. However little known the feelings or views of such a man may be on his first entering a neighbourhood,"
    ),
    "times": (
        "It was the best of times, it was the worst of times, it was the age of wisdom, it was the age of foolishness, "
        "it was the epoch of belief, it was the epoch of incredulity, it was the season of Light,"
    ),
}


def long_text(n_words: int, first_chapter: int = 1) -> str:
    """Exactly ``n_words`` words of prose (about 1.3 tokens each), beginning with a chapter (1 to 11).

    Texts that begin with different chapters differ from the first line on. Beyond the 32,780 words of the source the
    chapters come again under new numbers and in another order. Raises ValueError for ``n_words`` < 1 or a chapter that
    is not there.
    """
    if n_words < 1:
        raise ValueError(f"n_words is {n_words}, must be at least 1")
    if not 1 <= first_chapter <= len(_chapters()):
        raise ValueError(f"first_chapter is {first_chapter}, must be in 1..{len(_chapters())}")
    taken: list[str] = []
    left = n_words
    for paragraph in _paragraphs(first_chapter - 1):
        words = paragraph.split()
        taken.append(" ".join(words[:left]))
        left -= len(words)
        if left <= 0:
            break
    return "\n\n".join(taken)


def _paragraphs(start: int) -> Iterator[str]:
    """Endless: round k visits every (k+1)-th chapter, an order of its own as long as k+1 and the number are coprime."""
    chapters = _chapters()
    number = start
    k = 0
    while True:
        stride = k % (len(chapters) - 1) + 1
        for i in range(len(chapters)):
            number += 1
            yield f"Chapter {number}"
            yield from chapters[(start + i * stride) % len(chapters)]
        k += 1


@lru_cache(maxsize=1)
def _chapters() -> tuple[tuple[str, ...], ...]:
    """Paragraphs of each chapter, without its heading. Eleven: a prime, so any stride below it visits them all."""
    text = files("llama_phase").joinpath("persuasion.txt").read_text(encoding="utf-8")
    chapters: list[list[str]] = []
    for paragraph in text.strip().split("\n\n"):
        if paragraph.startswith("Chapter "):
            chapters.append([])
        else:
            chapters[-1].append(paragraph)
    return tuple(map(tuple, chapters))
