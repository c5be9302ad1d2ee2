"""Tables: column widths that fit the terminal, one row a line."""

from __future__ import annotations

from kueue.cli.screen import Screen
from kueue.cli.text import keep_start, pad, width

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence


class Cell:
    """One entry: harmless text and the style of the screen it is shown in.

    `parts`: (piece, style) for pieces of `text` with styles of their own; only in columns that never shrink.
    """

    __slots__ = ("parts", "style", "text")

    def __init__(self, text: str, style: str = "", parts: tuple[tuple[str, str], ...] = ()) -> None:
        self.text = text
        self.style = style
        self.parts = parts


class Column:
    """How a column is laid out. `least` none: as wide as its longest entry, always; else it may shrink to `least`."""

    def __init__(
        self,
        header: str,
        least: int | None = None,
        *,
        right: bool = False,
        shorten: Callable[[str, int], str] = keep_start,
    ) -> None:
        self.header = header
        self.least = least
        self.right = right
        self.shorten = shorten


def fit(limits: Sequence[tuple[int, int]], available: int | None) -> list[int]:
    """Widths of columns with these (least, most) in `available` cells; none: as many as they like.

    If even the least does not fit it is taken all the same. Else the narrowest column that still wants more gets the
    next cell, the first one on a tie.
    """
    most = [max(low, high) for low, high in limits]
    if available is None or sum(most) <= available:
        return most
    widths = [low for low, _ in limits]
    for _ in range(available - sum(widths)):
        wanting = [index for index, taken in enumerate(widths) if taken < most[index]]
        widths[min(wanting, key=lambda index: widths[index])] += 1
    return widths


def render(
    screen: Screen, columns: Sequence[Column], rows: Sequence[Sequence[Cell]], *, reserved: int = 0
) -> tuple[list[str], int]:
    """The lines of the table, header first, and their width in cells; `reserved` cells of the terminal stay free."""
    for row in rows:
        for cell in row:
            cell.text = screen.shown(cell.text)
            cell.parts = tuple((screen.shown(piece), style) for piece, style in cell.parts)
    limits = []
    for index, column in enumerate(columns):
        longest = max((width(row[index].text) for row in rows), default=0)
        if column.least is None:
            longest = max(longest, width(column.header))
            limits.append((longest, longest))
        else:
            limits.append((column.least, longest))
    available = None if screen.columns is None else screen.columns - (3 * len(columns) + 1) - reserved
    widths = fit(limits, available)
    head = [Cell(column.header, "head") for column in columns]
    lines = []
    for row in [head, *rows]:
        parts = []
        for cell, column, cells in zip(row, columns, widths, strict=True):
            if cell.parts:
                styled = "".join(screen.styled(piece, style) for piece, style in cell.parts)
                parts.append(pad(cell.text, cells, right=True).replace(cell.text, styled))
                continue
            text = cell.text if width(cell.text) <= cells else column.shorten(cell.text, cells)
            parts.append(screen.styled(pad(text, cells, right=column.right and row is not head), cell.style))
        lines.append("| " + " | ".join(parts) + " |")
    return lines, sum(widths) + 3 * len(columns) + 1
