"""Format parts of messages: an error in one line, a number of bytes, a table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def first_line(error: BaseException) -> str:
    r"""Return the first line of an error's message that is not blank; the name of its class if there is none.

    >>> first_line(ValueError("\n  cannot open model.onnx \nat line 3")), first_line(KeyboardInterrupt())
    ('cannot open model.onnx', 'KeyboardInterrupt')
    """
    return next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)


def format_bytes(count: float) -> str:
    """Format a number of bytes with the units of SI: 1 kB is 1000 bytes.

    >>> format_bytes(40), format_bytes(2300), format_bytes(8e9), format_bytes(1.38e12)
    ('40 bytes', '2.3 kB', '8 GB', '1.38 TB')
    """
    for unit in ("bytes", "kB", "MB", "GB"):
        if count < 999.5:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"


def table(rows: Iterable[Sequence[str]], *, align: str = "", indent: str = "  ", width: int | None = None) -> list[str]:
    """Align rows of cells in columns.

    >>> for line in table([["case", "steps", "worst"], ["batch 3", "2", "logits"], ["batch 12", "why"]], indent="| "):
    ...     print(line)
    | case      steps  worst
    | batch 3   2      logits
    | batch 12  why
    >>> for line in table([["model.layers.0", "9 MB"], ["head", "12.5 MB"]], align="<>", indent="| ", width=20):
    ...     print(line)
    | ...yers.0     9 MB
    | head       12.5 MB
    """
    # rows: the cells of each row; the first row can be a header. The last cell of a row is as long as it is, so a row
    # can end early with a sentence.
    # align: one sign per column, `"<"` for the left and `">"` for the right. Default: all to the left.
    # indent: what every line begins with; two spaces by default
    # width: most characters of a line, for which the first cells are shortened at their start. Default: no limit.
    cells = [list(row) for row in rows]
    signs = align.ljust(max(map(len, cells), default=0), "<")
    widths = [0] * len(signs)
    for row in cells:
        for column, cell in enumerate(row):
            if column < len(row) - 1 or signs[column] == ">":
                widths[column] = max(widths[column], len(cell))
    if width is not None:
        widths[0] = min(widths[0], width - len(indent) - sum(2 + other for other in widths[1:]))
        for row in cells:
            if len(row[0]) > widths[0]:
                row[0] = "..." + row[0][3 - widths[0] :]
    lines = ("  ".join(f"{c:{sign}{wide}}" for c, sign, wide in zip(row, signs, widths, strict=False)) for row in cells)
    return [f"{indent}{line}".rstrip() for line in lines]
