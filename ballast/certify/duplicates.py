"""Duplicates and near-duplicates of prompts.

texts --letters and digits alone--> equal: duplicates
texts --words that few records share--> sets, compared where their rarest words meet: near-duplicates
"""

import re
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence
from itertools import pairwise

Pair = tuple[str, str]
LAYOUT = re.compile(r"[\s'\"`’‘“”!?;:,]+|\.(?!\d)")
WORD = re.compile(r"\w+", re.UNICODE)
NEAR = 0.7  # of the pairs of words of both prompts: one word changes two pairs
FEWEST_PAIRS = 8  # that tell a prompt from others, below which none is a near-duplicate
COMMON = 0.02  # of the records: a pair of more of them is of the template
MOST_POSTINGS = 200  # records with a pair, above which it finds no candidates


def normal(text: str) -> str:
    """Return a text without case, layout and punctuation, which change no task."""
    return LAYOUT.sub("", unicodedata.normalize("NFKC", text).casefold())


def duplicates(keys: Sequence[Hashable]) -> dict[int, int]:
    """Return the places of repeated keys, each with the first place of its key."""
    first: dict[Hashable, int] = {}
    repeated = {}
    for place, key in enumerate(keys):
        if first.setdefault(key, place) != place:
            repeated[place] = first[key]
    return repeated


def telling_pairs(texts: Sequence[str]) -> tuple[list[set[Pair]], Counter[Pair]]:
    """Return the pairs of words that tell each text from others, and the number of texts with each pair."""
    pairs = [set(pairwise(WORD.findall(text.casefold()))) for text in texts]
    counts = Counter(pair for row in pairs for pair in row)
    most = max(2, COMMON * len(texts))
    return [{pair for pair in row if counts[pair] <= most} for row in pairs], counts


def near_duplicates(texts: Sequence[str], answers: Sequence[Hashable]) -> dict[int, int]:
    """Return the places of texts that repeat an earlier one in almost the same words, with its place.

    Only texts with the same numbers and answer count: others are tasks of one template.
    """
    telling, counts = telling_pairs(texts)
    numbers = [tuple(re.findall(r"\d+", text)) for text in texts]
    postings: dict[Pair, list[int]] = defaultdict(list)
    repeated = {}
    for place, row in enumerate(telling):
        if len(row) < FEWEST_PAIRS:
            continue
        rarest = sorted(row, key=lambda pair: (counts[pair], pair))
        rarest = rarest[: len(row) - int(NEAR * len(row)) + 1]
        candidates = {other for pair in rarest for other in postings[pair]}
        for other in sorted(candidates):
            same_task = (
                numbers[other] == numbers[place] and answers[other] == answers[place]
            )
            if same_task and len(row & telling[other]) >= NEAR * len(row | telling[other]):
                repeated[place] = other
                break
        for pair in rarest:
            if len(postings[pair]) < MOST_POSTINGS:
                postings[pair].append(place)
    return repeated
