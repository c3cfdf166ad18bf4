"""Simulates the ranks of a training, step by step, and their journal words."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tools.device_training.rank import MS, Jitter, Mark, Rank, UnwatchedRank
from tools.device_training.setting import DEVICE_SHARES, LAUNCH_SHARES, Setting, Trouble

from otel_ddp.journal.layout import CODE_SHIFT, STEP_GC
from otel_ddp.journal.parser import Steps

_TOKENS = 1000
_CHECKPOINT_EVERY = 150
_CHECKPOINT_MS = 400.0


class Piece(NamedTuple):
    """The output of one rank at the end of one step."""

    marks: list[Mark]
    """The true times, which the rank does not know of all marks."""
    host: list[int]
    """Words of the host's steps."""
    device: list[int]
    """Words of the device's steps, which are earlier ones."""


class WordStream:
    """Words of one kind as the records of a journal."""

    def __init__(self, on_device: bool) -> None:
        self._on_device = on_device
        self._words = 0

    def record(self, words: Sequence[int]) -> Steps:
        """The next record."""
        offset = self._words
        self._words += len(words)
        return Steps(offset, struct.pack(f"<{len(words)}Q", *words), 0, self._on_device)


class _Amounts:
    """The durations of one rank in the present step, including faults."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self.begin([])

    def begin(self, troubles: Sequence[Trouble]) -> None:
        """*troubles*: the active faults of this rank."""
        setting = self._setting
        launch_ns = setting.launch_ms * MS / setting.kernels
        self.launch_ns = dict.fromkeys(("forward", "backward", "optimizer"), launch_ns)
        self.work_ns = {
            "forward": setting.forward_ms * MS / setting.layers,
            "backward": setting.backward_ms * MS / setting.layers,
            "optimizer": setting.optimizer_ms * MS,
        }
        self.host_ns = setting.host_ms * MS
        self.copy_ns = setting.copy_ms * MS
        self.load_ns = setting.load_ms * MS
        # Of the host, in forward: before its first layer, and before each.
        self.first_ns = self.each_ns = 0.0
        self.item_every = setting.item_every
        self.tokens = _TOKENS
        for each in troubles:
            self._add(each)

    def _add(self, trouble: Trouble) -> None:
        where, amount = trouble.where, trouble.amount
        for phase in DEVICE_SHARES.get(where, ()):
            self.work_ns[phase] *= 1 + amount
        for phase in LAUNCH_SHARES.get(where, ()):
            self.launch_ns[phase] *= 1 + amount
        if where == "cores":
            self.host_ns *= 1 + amount
            if not self._setting.prefetch:
                self.load_ns *= 1 + amount
        elif where == "loader":
            self.load_ns += amount * MS / self._setting.accumulation
        elif where == "batch":
            self.scale_batch(1 + amount)
        elif where == "host":
            self.host_ns += amount * MS
        elif where == "before forward":
            self.first_ns += amount * MS / self._setting.accumulation
        elif where == "in forward":
            self.each_ns += amount * MS / self._setting.accumulation / self._setting.layers
        elif where == "copy":
            self.copy_ns += amount * MS / self._setting.accumulation
        elif where == "item":
            self.item_every = round(amount)

    def scale_batch(self, share: float) -> None:
        """A batch of another length than usual."""
        self.tokens = round(self.tokens * share)
        self.work_ns["forward"] *= share
        self.work_ns["backward"] *= share


class Training:
    """All ranks. They do the same in the same order, so each event depends on earlier ones only."""

    def __init__(
        self, setting: Setting, troubles: Sequence[Trouble] = (), watched: bool = True
    ) -> None:
        setting.check()
        self.setting = setting
        kind = Rank if watched else UnwatchedRank
        self.ranks = [kind(rank, setting.jitter, setting.seed) for rank in range(setting.ranks)]
        self.steps = 0
        self._troubles = troubles
        self._kernels = {part: setting.kernels_of(part) for part in _Amounts(setting).work_ns}
        self._amounts = [_Amounts(setting) for _ in self.ranks]
        self._transfers = Jitter(setting.jitter, f"transfers {setting.seed}")

    def step(self) -> list[Piece]:
        """One step of every rank."""
        self.steps += 1
        setting = self.setting
        self._begin_step()
        for batch in range(setting.accumulation):
            self._fetch()
            self._forward()
            self._backward(reduces=batch == setting.accumulation - 1)
        self._launch_on_all("optimizer", "optimizer")
        return [
            Piece(*rank.end_step(self.steps, amounts.tokens))
            for rank, amounts in zip(self.ranks, self._amounts, strict=True)
        ]

    def _begin_step(self) -> None:
        """The user's work between two steps."""
        number = self.steps
        self._transfers.begin_step()
        for rank, amounts in zip(self.ranks, self._amounts, strict=True):
            rank.begin_step()
            if self._troubles:
                own = [e for e in self._troubles if e.rank == rank.rank and number > e.begins]
                amounts.begin(own)
            if self.setting.disturbances:
                self._disturb(rank, amounts)
            rank.work(amounts.host_ns)
            if amounts.item_every and number % amounts.item_every == 0:
                rank.synchronize()

    def _disturb(self, rank: Rank, amounts: _Amounts) -> None:
        chance = rank.chance
        if not self._troubles:
            amounts.begin([])
        amounts.scale_batch(chance.uniform(0.95, 1.05))
        if chance.random() < 0.01:
            rank.host_ns += chance.uniform(30, 200) * MS
        if chance.random() < 0.02:
            garbage_ns = round(chance.uniform(2, 60) * MS)
            rank.host_ns += garbage_ns
            rank.host_words.append(STEP_GC << CODE_SHIFT | garbage_ns)
        if self.steps % _CHECKPOINT_EVERY == 0 and rank.rank == 0:
            rank.mark("checkpoint")
            rank.synchronize()
            rank.work(_CHECKPOINT_MS * MS)
            rank.mark("other")

    def _fetch(self) -> None:
        for rank, amounts in zip(self.ranks, self._amounts, strict=True):
            rank.mark("data")
            rank.load(amounts.load_ns, self.setting.prefetch)
            rank.mark("other")
            rank.launch(1, amounts.launch_ns["forward"], amounts.copy_ns)

    def _launch_on_all(self, phase: str, part: str) -> None:
        """Begin or continue a phase, and launch its kernels."""
        kernels = self._kernels[part]
        for rank, amounts in zip(self.ranks, self._amounts, strict=True):
            if phase:
                rank.mark(phase)
            if part == "forward" and (first_ns := amounts.each_ns + amounts.first_ns * bool(phase)):
                rank.work(first_ns)
            rank.launch(kernels, amounts.launch_ns[part], amounts.work_ns[part])

    # -- forward and backward

    def _forward(self) -> None:
        self._launch_on_all("forward", "forward")
        for _ in range(self.setting.layers - 1):
            self._launch_on_all("", "forward")
        self._mark_all("other")

    def _backward(self, reduces: bool) -> None:
        setting = self.setting
        self._mark_all("backward")
        transfer_ns = setting.transfer_ms * MS / setting.layers
        for _ in range(setting.layers):
            self._launch_on_all("", "backward")
            if reduces:
                self._all_reduce(transfer_ns)
        self._mark_all("comm_wait")
        if reduces:
            for rank in self.ranks:
                rank.wait_for_communication()
        self._mark_all("other")

    def _mark_all(self, phase: str) -> None:
        for rank in self.ranks:
            rank.mark(phase)

    def _all_reduce(self, transfer_ns: float) -> None:
        """Enqueue a collective on all communication streams, after all work so far."""
        started_ns = []
        for rank, amounts in zip(self.ranks, self._amounts, strict=True):
            rank.host_ns += amounts.launch_ns["backward"]
            started_ns.append(max(rank.comm_ns, rank.host_ns, rank.compute_ns))
        ended_ns = max(started_ns) + transfer_ns * self._transfers.part()
        for rank in self.ranks:
            rank.comm_ns = ended_ns


def trained(
    setting: Setting, steps: int, troubles: Sequence[Trouble] = (), watched: bool = True
) -> Iterator[list[Piece]]:
    """The first *steps* steps. Not *watched*: only their ends, in half the time."""
    training = Training(setting, troubles, watched)
    for _ in range(steps):
        yield training.step()
