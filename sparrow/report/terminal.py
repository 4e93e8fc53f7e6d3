"""Tables of a page on a terminal."""

from rich.table import Table as RichTable
from rich.text import Text

from sparrow.report.page import Table


def rich_table(table: Table) -> RichTable:
    """The first column to the left, figures to the right; names are shown, not read as markup."""
    made = RichTable(title=Text(table.title) if table.title else None)
    for rank, column in enumerate(table.columns):
        made.add_column(Text(column), justify="right" if rank else "left")
    for row in table.rows:
        made.add_row(*map(Text, row))
    return made
