"""Gantt charts: what they say in words, and that they are drawn the same every time."""

from xml.etree import ElementTree

import numpy as np
from PIL import Image

from balancing.analysis.gantt import WAITING, Chart, save_png, to_svg

EVEN = Chart("after", [np.array([[1.0, 1.0]]), np.array([[1.0, 1.0]])])
UNEVEN = Chart("before", [np.array([[2.0, 0.0]]), np.array([[1.5, 0.5]])])


def texts(svg):
    return [
        "".join(element.itertext()) for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    ]


def test_a_page_can_hold_the_drawing_and_it_says_what_it_shows():
    svg = to_svg([UNEVEN, EVEN], 2.0)
    words = " ".join(texts(svg))
    assert "before" in words
    assert "1.750 × ideal" in words
    assert "42.9% of rank time waits" in words
    assert "1.000 × ideal" in words
    assert svg == to_svg([UNEVEN, EVEN], 2.0)
    assert "var(--waiting)" in svg


def test_every_rank_waits_where_it_has_less_than_the_heaviest(tmp_path):
    save_png([UNEVEN], 2.0, tmp_path / "before.png")
    save_png([EVEN], 2.0, tmp_path / "after.png")

    def waiting(name):
        pixels = np.asarray(Image.open(tmp_path / name).convert("RGB"))
        colour = [int(WAITING[start : start + 2], 16) for start in (1, 3, 5)]
        rows = (pixels == colour).all(axis=2)
        return rows[: int(len(rows) * 0.7)].mean()  # the legend below shows the colour, too

    assert waiting("before.png") > 0.2
    assert waiting("after.png") < 0.001
