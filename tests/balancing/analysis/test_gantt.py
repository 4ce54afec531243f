"""Gantt charts: what they say in words, and that they are drawn the same every time."""

from xml.etree import ElementTree

import numpy as np
from PIL import Image

from balancing import Pipeline, plan_batch
from balancing.analysis.gantt import (
    WAITING,
    chart_of_ranks,
    chart_of_stages,
    figure_of,
    svg_of,
)

EVEN = chart_of_ranks("after", [np.array([[1.0, 1.0]]), np.array([[1.0, 1.0]])], 2.0)
UNEVEN = chart_of_ranks("before", [np.array([[2.0, 0.0]]), np.array([[1.5, 0.5]])], 2.0)


def words_of(svg):
    texts = ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")
    return " ".join("".join(element.itertext()) for element in texts)


def test_a_page_can_hold_the_drawing_and_it_says_what_it_shows():
    svg = svg_of(figure_of([UNEVEN, EVEN]))
    words = words_of(svg)
    for expected in (
        "before",
        "1.750 × ideal",
        "42.9% of rank time waits",
        "1.000 × ideal",
        "mini-batch 1",
    ):
        assert expected in words
    assert svg == svg_of(figure_of([UNEVEN, EVEN]))
    assert "var(--waiting)" in svg


def test_a_pipeline_shows_its_stages_and_their_bubble():
    """Two equal micro-steps on two stages: of 3 times (forward + backward) each stage waits 1."""
    pipeline = Pipeline(2)
    plan = plan_batch([6, 6], ranks=1, max_tokens=6, pipeline=pipeline, order="small_ends")
    words = words_of(svg_of(figure_of([chart_of_stages("planned", plan, pipeline, 6.0)])))
    for expected in ("planned", "stage", "1.500 × ideal", "bubble 33.3%", "backward"):
        assert expected in words


def test_every_rank_waits_where_it_has_less_than_the_heaviest(tmp_path):
    def waiting(chart):
        figure_of([chart]).savefig(tmp_path / "chart.png")
        pixels = np.asarray(Image.open(tmp_path / "chart.png").convert("RGB"))
        colour = [int(WAITING[start : start + 2], 16) for start in (1, 3, 5)]
        rows = (pixels == colour).all(axis=2)
        return rows[: int(len(rows) * 0.7)].mean()  # the legend below shows the colour, too

    assert waiting(UNEVEN) > 0.2
    assert waiting(EVEN) < 0.001
