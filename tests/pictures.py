"""Checks of pictures."""

from itertools import combinations

from matplotlib.artist import Artist
from matplotlib.figure import Figure


def overlaps(figure: Figure) -> list[tuple[Artist, Artist]]:
    """Returns the pairs of panels, legends and titles of a figure that overlap."""
    figure.draw_without_rendering()
    texts = [
        text
        for text in (figure._suptitle, figure._supxlabel, figure._supylabel)
        if text is not None
    ]
    boxes = {part: part.get_tightbbox() for part in (*figure.axes, *figure.legends, *texts)}
    return [
        (first, second)
        for (first, box), (second, other) in combinations(boxes.items(), 2)
        if box.padded(-1).overlaps(other.padded(-1))
    ]
