"""The live picture of `otel-ddp top`, in a terminal, with textual."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import ClassVar

from rich.segment import Segment
from rich.style import Style
from textual import work
from textual.app import App as TextualApp
from textual.app import ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Vertical
from textual.geometry import Region, Size
from textual.screen import ModalScreen
from textual.scroll_view import ScrollView
from textual.strip import Strip
from textual.widgets import Input

from otel_ddp.cli.node.top import frame
from otel_ddp.cli.node.top.frame import Line, Part
from otel_ddp.cli.node.top.order import GROUPS, SORTS, Choice
from otel_ddp.cli.node.top.watch import View, Watch
from otel_ddp.errors import ConfigError

# The terminal's own colours, which fit its background, light or dark. No colour stands alone: a
# late rank has a "!" too.
_STYLES = {
    "title": Style(bold=True),
    "head": Style(reverse=True),
    "note": Style(color="yellow"),
    "verdict": Style(color="red", bold=True),
    "late": Style(color="red", bold=True),
    "high": Style(color="red"),
    "wait": Style(dim=True),
    "over": Style(dim=True),
    "dim": Style(dim=True),
    "gpu": Style(color="cyan"),
    "value": Style(color="green"),
    "bars": Style(color="blue"),
    "keys": Style(reverse=True),
}
_CURSOR = Style(reverse=True)
_KEYS = "q quit  / filter  s sort  g group  d details  p pause  h help"
_HELP = """\
otel-ddp top only looks: no key of it stops, pauses or changes a training.

q, Ctrl-C        quit
down j, up k     the next rank, the one before
PageDown, PageUp, Home, End
Enter, d         details of the rank under the cursor; Esc goes back
/                filter: words that a rank, node, run, role, state or phase has;
                 Enter keeps it, Esc takes it off
s                sort by rank, work, time in the phase, step, state
g                group by run, by node, or not at all
p, space         pause the picture; the training goes on
r                look at once
h, ?             this help

FOR        for how long the rank is in its phase
STEP TIME  how long its last step took
WORK       its own time in a step, without waits for other ranks: the median of
           the last 50; bars of one run have one scale, and a column is one step
!          an open verdict names this rank"""


class Lines(ScrollView, can_focus=True, inherit_bindings=False):
    """Lines of which only those on the screen are drawn, however many there are."""

    def __init__(self, *, cursor: bool = False, id: str | None = None) -> None:
        super().__init__(id=id)
        self._lines: list[Line] = []
        self._shows_cursor = cursor
        self.chosen = ""
        """The key of the rank under the cursor."""

    def show(self, lines: list[Line]) -> None:
        """Replace all lines; the cursor stays on its rank."""
        self._lines = lines
        if self._shows_cursor and not any(each.rank == self.chosen for each in lines if each.rank):
            self.chosen = next((each.rank for each in lines if each.rank), "")
        widest = max((frame.cells(each.text) for each in lines), default=0)
        self.virtual_size = Size(min(widest, self.size.width or widest), len(lines))
        self.refresh()

    def move(self, by: int) -> None:
        """Put the cursor so many ranks further down."""
        ranks = list(dict.fromkeys(each.rank for each in self._lines if each.rank))
        if not self._shows_cursor or not ranks:
            self.scroll_relative(y=by, animate=False)
            return
        at = ranks.index(self.chosen) if self.chosen in ranks else 0
        self.chosen = ranks[min(len(ranks) - 1, max(0, at + by))]
        y = next(y for y, each in enumerate(self._lines) if each.rank == self.chosen)
        # Above the first rank there are lines that no cursor reaches.
        top = 0 if self.chosen == ranks[0] else y
        self.scroll_to_region(Region(0, top, 1, y - top + 1), animate=False)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        at = y + self.scroll_offset.y
        width = self.size.width
        if at >= len(self._lines):
            return Strip.blank(width)
        line = self._lines[at]
        chosen = self._shows_cursor and line.rank and line.rank == self.chosen
        more = _CURSOR if chosen else Style()
        parts = (*line.parts, Part(" " * width)) if chosen else line.parts
        segments = [Segment(part.text, _STYLES.get(part.style, Style()) + more) for part in parts]
        return Strip(segments).adjust_cell_length(width)


class _Reading(ModalScreen[None]):
    """Lines over the whole screen, until a key closes them."""

    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("escape,q,h,question_mark,d,enter,left", "dismiss", "back"),
        Binding("down,j", "move(1)"),
        Binding("up,k", "move(-1)"),
        Binding("pagedown", "move(20)"),
        Binding("pageup", "move(-20)"),
        Binding("home", "move(-100000)"),
        Binding("end", "move(100000)"),
    ]

    def __init__(self, lines: Callable[[int], list[Line]]) -> None:
        super().__init__()
        self._make = lines

    def compose(self) -> ComposeResult:
        yield Lines(id="reading")

    def on_mount(self) -> None:
        self.update()

    def on_resize(self) -> None:
        self.update()

    def update(self) -> None:
        """Make the lines anew."""
        self.query_one(Lines).show(self._make(self.app.size.width))

    def action_move(self, by: int) -> None:
        self.query_one(Lines).move(by)


class TopApp(TextualApp[None]):
    """One look a second, in a thread, so that keys are heard meanwhile."""

    ENABLE_COMMAND_PALETTE = False
    CSS = """
    Screen { background: ansi_default; color: ansi_default; overflow: hidden; }
    Lines { background: ansi_default; color: ansi_default; }
    #title, #head, #keys { height: 1; overflow: hidden; }
    #body { height: 1fr; overflow-x: hidden; overflow-y: auto; scrollbar-size-vertical: 0; }
    #reading { height: 1fr; overflow-x: hidden; scrollbar-size-vertical: 0; }
    #filter { height: 1; border: none; padding: 0; display: none;
              background: ansi_default; color: ansi_default; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q,ctrl+c", "quit", "quit", priority=False),
        Binding("down,j", "move(1)"),
        Binding("up,k", "move(-1)"),
        Binding("pagedown", "page(1)"),
        Binding("pageup", "page(-1)"),
        Binding("home", "move(-100000)"),
        Binding("end", "move(100000)"),
        Binding("enter,d", "details"),
        Binding("slash", "filter"),
        Binding("escape", "no_filter"),
        Binding("s", "sort"),
        Binding("g", "group"),
        Binding("p,space", "pause"),
        Binding("r", "look"),
        Binding("h,question_mark", "help"),
    ]

    def __init__(self, watch: Watch, choice: Choice, *, interval_s: float = 1.0) -> None:
        super().__init__(ansi_color=True)
        self._watch_node = watch
        self.choice = choice
        self._interval_s = interval_s
        self._view = View(time.time_ns())
        self._chosen = ""
        self._trouble = ""
        self._looking = False
        self.paused = False
        self.looks = 0
        """How many looks are shown."""

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Lines(id="title")
            yield Lines(id="head")
            yield Lines(cursor=True, id="body")
            yield Input(placeholder="words to look for", id="filter", compact=True)
            yield Lines(id="keys")

    def on_mount(self) -> None:
        for name in ("title", "head", "keys"):
            self.query_one(f"#{name}").can_focus = False
        self._body.focus()
        self.set_interval(self._interval_s, self._look_unless_paused)
        self.look()

    def on_resize(self) -> None:
        self._draw()

    @property
    def _body(self) -> Lines:
        return self.screen_stack[0].query_one("#body", Lines)

    # -- looking

    def _look_unless_paused(self) -> None:
        if not self.paused:
            self.look()

    def look(self) -> None:
        """Look once, unless a look is under way."""
        if not self._looking:
            self._looking = True
            self._look()

    @work(thread=True)
    def _look(self) -> None:
        # A place that vanishes is said, and looked for again.
        try:
            view, trouble = self._watch_node.look(self._chosen), ""
        except (ConfigError, OSError) as error:
            view, trouble = self._view._replace(now_ns=time.time_ns()), str(error)
        self.call_later(self._show, view, trouble)

    def _show(self, view: View, trouble: str) -> None:
        self._view, self._trouble = view, trouble
        self._looking = False
        self.looks += 1
        self._draw()
        for screen in self.screen_stack[1:]:
            if isinstance(screen, _Reading):
                screen.update()

    def _draw(self) -> None:
        if not self.is_running or not self.screen_stack:
            return
        base, width = self.screen_stack[0], self.size.width
        at = time.strftime("%H:%M:%S", time.localtime(self._view.now_ns / 1e9))
        base.query_one("#title", Lines).show([frame.title(self._view, width, at)])
        base.query_one("#head", Lines).show([frame.head(width)])
        lines = frame.body(self._view, self.choice, width)
        if self._trouble:
            lines.insert(0, Line((Part(f"note: {self._trouble}", "note"),)))
        self._body.show(lines)
        base.query_one("#keys", Lines).show([Line((Part(self._keys(), "keys"),))])

    def _keys(self) -> str:
        choice = self.choice
        said = ["PAUSED (p goes on)"] if self.paused else []
        said += [f"filter: {choice.filter}"] if choice.filter else []
        said += [f"sorted by {choice.sort}"] if choice.sort != SORTS[0] else []
        said += [f"grouped by {choice.group}"] if choice.group != GROUPS[0] else []
        return "  ".join((*said, _KEYS)).ljust(self.size.width)

    # -- keys

    def action_move(self, by: int) -> None:
        self._body.move(by)

    def action_page(self, by: int) -> None:
        self._body.move(by * max(1, self._body.size.height - 1))

    def action_look(self) -> None:
        self.look()

    def action_pause(self) -> None:
        self.paused = not self.paused
        self._draw()

    def action_sort(self) -> None:
        self._choose(sort=_next(SORTS, self.choice.sort))

    def action_group(self) -> None:
        self._choose(group=_next(GROUPS, self.choice.group))

    def _choose(self, **changed: str) -> None:
        self.choice = self.choice._replace(**changed)
        self._draw()

    def action_filter(self) -> None:
        box = self.query_one("#filter", Input)
        box.value = self.choice.filter
        box.display = True
        box.focus()

    def action_no_filter(self) -> None:
        self._close_filter()
        self._choose(filter="")

    def on_input_changed(self, event: Input.Changed) -> None:
        self._choose(filter=event.value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self._close_filter()

    def _close_filter(self) -> None:
        self.query_one("#filter", Input).display = False
        self._body.focus()

    def action_help(self) -> None:
        help_lines = [Line((Part(text),)) for text in _HELP.splitlines()]
        self.push_screen(_Reading(lambda width: help_lines))

    def action_details(self) -> None:
        if chosen := self._body.chosen:
            # The next look brings its values.
            self._chosen, self._view = chosen, self._view._replace(chosen=())
            self.push_screen(_Reading(lambda width: self._details(chosen, width)))
            self.look()

    def _details(self, key: str, width: int) -> list[Line]:
        return frame.details(self._view, key, width)


def _next(words: tuple[str, ...], word: str) -> str:
    return words[(words.index(word) + 1) % len(words)]
