"""The live picture of `otel-ddp top`, in a terminal, with textual."""

from __future__ import annotations

from typing import ClassVar

from rich.text import Text
from textual import work
from textual.app import App as TextualApp
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.coordinate import Coordinate
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Static

from otel_ddp.cli.node.top import frame
from otel_ddp.cli.node.top.frame import SORTS, Choice, Row
from otel_ddp.cli.node.top.watch import View, Watch
from otel_ddp.cli.text import padded
from otel_ddp.errors import ConfigError


class _Details(ModalScreen[None]):
    """One rank over the whole screen, until a key closes it."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,d,enter", "dismiss", "back")]

    def __init__(self, key: str) -> None:
        super().__init__()
        self.key = key

    def compose(self) -> ComposeResult:
        with VerticalScroll():
            yield Static(markup=False)
        yield Footer()

    def show(self, lines: list[str]) -> None:
        """Replace what is shown."""
        self.query_one(Static).update("\n".join(lines))


class TopApp(TextualApp[None]):
    """One look a second, in a thread, so that keys are heard meanwhile. No key changes a run."""

    ENABLE_COMMAND_PALETTE = False
    # The terminal's own colours, which fit its background, light or dark.
    CSS = """
    Screen, DataTable, Static, Input, Footer, FooterKey, VerticalScroll {
        background: ansi_default; color: ansi_default;
    }
    #above { max-height: 50%; }
    DataTable { height: 1fr; background-tint: transparent; scrollbar-size: 0 0; }
    DataTable > .datatable--header { background: ansi_default; text-style: bold; }
    DataTable > .datatable--even-row { background: ansi_default; }
    DataTable > .datatable--cursor, DataTable:focus > .datatable--cursor {
        background: ansi_default; color: ansi_default; text-style: reverse;
    }
    #filter { height: 1; border: none; padding: 0; display: none; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "quit", priority=False),
        Binding("j", "move('down')", show=False),
        Binding("k", "move('up')", show=False),
        Binding("home", "move('top')", show=False, priority=True),
        Binding("end", "move('bottom')", show=False, priority=True),
        Binding("d,enter", "details", "details"),
        Binding("slash", "filter", "filter"),
        Binding("escape", "no_filter", show=False),
        Binding("s", "sort", "sort"),
    ]

    def __init__(self, watch: Watch, *, interval_s: float = 1.0) -> None:
        super().__init__(ansi_color=True)
        self._watch_node = watch
        self.choice = Choice()
        self._interval_s = interval_s
        self._view = View(0)
        self._rows: list[Row] = []
        self._lengths: list[int] = []
        self._looking = False
        self.looks = 0
        """How many looks are shown."""

    def compose(self) -> ComposeResult:
        yield Static(id="above", markup=False)
        yield DataTable(cursor_type="row")
        yield Input(placeholder="words to look for", id="filter", compact=True)
        yield Footer()

    def on_mount(self) -> None:
        # Of one column: each cell that changes costs as much as a line.
        self._table.add_column("")
        self._table.focus()
        self.set_interval(self._interval_s, self.look)
        self.look()

    @property
    def _table(self) -> DataTable[Text]:
        return self.screen_stack[0].query_one(DataTable)

    # -- looking

    def look(self) -> None:
        """Look once, unless a look is under way."""
        if not self._looking:
            self._looking = True
            self._look()

    @work(thread=True)
    def _look(self) -> None:
        # A place that vanishes is said, and looked for again.
        try:
            view = self._watch_node.look()
        except (ConfigError, OSError) as error:
            view = self._view._replace(notes=(str(error),))
        open_screen = self.screen_stack[-1]
        if isinstance(open_screen, _Details):
            chosen = [each for each in view.ranks if each.process.key == open_screen.key]
            values = self._watch_node.values(chosen[0]) if chosen else ()
            lines = frame.details(view, open_screen.key, values)
            self.call_later(open_screen.show, lines)
        self.call_later(self._show, view)

    def _show(self, view: View) -> None:
        self._view = view
        self._looking = False
        self.looks += 1
        self._draw()

    def _draw(self) -> None:
        """Update lines and table; the cursor stays on its rank."""
        table, chosen = self._table, self._chosen
        lines = frame.above(self._view, self.choice)
        lengths, self._lengths = self._lengths, [len(line) for line in lines]
        above = self.screen_stack[0].query_one("#above", Static)
        # A layout of the screen costs more than all else, so only where lines may wrap otherwise.
        above.update(_styled(lines), layout=lengths != self._lengths)
        self._rows = frame.rows(self._view, self.choice)
        cells = [frame.heads(self._view), *(row.cells for row in self._rows)]
        shown = list(padded(cells, frame.RIGHT))
        # Equally long, so that one row tells the table how wide it is.
        widest = max(map(len, shown))
        head, *texts = (text.ljust(widest) for text in shown)
        table.ordered_columns[0].label = Text(head)
        if table.row_count != len(texts):
            table.clear()
            table.add_rows([Text()] for _ in texts)
        for y, (row, text) in enumerate(zip(self._rows, texts, strict=True)):
            style = "dim" if row.rank.process.ended else "bold red" if row.rank.named else ""
            before = table.get_cell_at(Coordinate(y, 0))
            if (before.plain, before.style) != (text, style):
                table.update_cell_at(Coordinate(y, 0), Text(text, style), update_width=y == 0)
        keys = [row.rank.process.key for row in self._rows]
        table.move_cursor(row=keys.index(chosen) if chosen in keys else 0)

    @property
    def _chosen(self) -> str:
        """The key of the rank under the cursor."""
        at = self._table.cursor_row
        return self._rows[at].rank.process.key if at < len(self._rows) else ""

    # -- keys

    def action_move(self, where: str) -> None:
        table = self._table
        moved = {"down": table.cursor_row + 1, "up": table.cursor_row - 1, "top": 0}
        table.move_cursor(row=moved.get(where, len(self._rows) - 1))

    def action_sort(self) -> None:
        self._choose(sort=SORTS[(SORTS.index(self.choice.sort) + 1) % len(SORTS)])

    def _choose(self, **changed: str) -> None:
        self.choice = self.choice._replace(**changed)
        self._draw()

    def action_filter(self) -> None:
        box = self.query_one(Input)
        box.value = self.choice.filter
        box.display = True
        box.focus()

    def action_no_filter(self) -> None:
        self._choose(filter="")
        self.on_input_submitted()

    def on_input_changed(self, event: Input.Changed) -> None:
        self._choose(filter=event.value)

    def on_input_submitted(self) -> None:
        self.query_one(Input).display = False
        self._table.focus()

    def on_data_table_row_selected(self) -> None:
        self.action_details()

    def action_details(self) -> None:
        if chosen := self._chosen:
            # The next look fills it.
            self.push_screen(_Details(chosen))
            self.look()


def _styled(lines: list[str]) -> Text:
    """No colour stands alone: trouble has its mark too."""
    text = Text()
    for at, line in enumerate(lines):
        style = "bold" if not at else "bold red" if line.startswith("!") else ""
        text.append(f"{line}\n" if at < len(lines) - 1 else line, style)
    return text
