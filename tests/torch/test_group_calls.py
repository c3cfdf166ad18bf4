"""Which calls to process groups are noted, on real ranks; and when their hooks are on and off."""

from __future__ import annotations

import os
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from threading import Event, Thread
from time import thread_time_ns
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.testing._internal.distributed.fake_pg import FakeStore

import otel_ddp
from conftest import Here
from measured import Measured
from node import Node, finished
from otel_ddp.diagnosis.step_facts import facts_of
from otel_ddp.diagnosis.steps import Step
from otel_ddp.journal import layout
from otel_ddp.torch.steps.group_calls import GroupCalls

pytestmark = pytest.mark.skipif(
    not hasattr(dist.ProcessGroup, "register_pre_hook"), reason="PyTorch 2.15 has these hooks"
)

# -- four real ranks, one way of being parallel after the other

RANKS, STEPS = 4, 6
Act = Callable[[], None]


def trains(model: nn.Module) -> Act:
    def step() -> None:
        model(torch.ones(4, 8)).sum().backward()

    return step


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 1))


def ddp() -> tuple[nn.Module, Act]:
    model = DistributedDataParallel(net())
    return model, trains(model)


def hsdp() -> tuple[nn.Module, Act]:
    mesh, model = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "shard")), net()
    for block in (*list(model.children())[:2], model):
        fully_shard(block, mesh=mesh)
    return model, trains(model)


def pipeline() -> tuple[nn.Module, Act]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "pp"))
    number, group = mesh["pp"].get_local_rank(), mesh["pp"].get_group()
    model = DistributedDataParallel(nn.Linear(8, 8), process_group=mesh["dp"].get_group())
    stage = PipelineStage(model, number, 2, torch.device("cpu"), group=group)
    schedule = Schedule1F1B(stage, 4, loss_fn=lambda output, _: output.sum())

    def step() -> None:
        if number:
            schedule.step(target=torch.zeros(8, 8))
        else:
            schedule.step(torch.ones(8, 8))

    return model, step


MODES = {each.__name__: each for each in (ddp, hsdp, pipeline)}
# A step's calls: how often, in which dimension, what, in which phase.
USUAL = {
    "ddp": {("", "allreduce", "backward"): 1},
    "hsdp": {
        ("shard", "allgather_base", "forward"): 3,
        ("shard", "allgather_base", "backward"): 2,
        ("shard", "reduce_scatter_base", "backward"): 1,
        ("dp", "allreduce", "backward"): 1,
        ("shard", "reduce_scatter_base", "comm_wait"): 2,
        ("dp", "allreduce", "comm_wait"): 2,
    },
    "pipeline": {
        ("pp", "send", "other"): 4,
        ("pp", "recv", "other"): 4,
        ("dp", "allreduce", "backward"): 1,
    },
}


# Calls and bytes of a step, by dimension and operation. FSDP pads what it shards, here the last
# layer's one row; micro-batches of the pipeline have two rows of eight numbers.
BLOCK, LAST, FLOAT = 8 * 8 + 8, 2 * (8 + 1), 4
SUMS = {
    "ddp": {("world", "all_reduce"): [1, (2 * BLOCK + 8 + 1) * FLOAT]},
    "hsdp": {
        # The last layer is a part of the root, which stays whole until its backward.
        ("shard", "all_gather"): [5, (2 * 2 * BLOCK + LAST) * FLOAT],
        ("shard", "reduce_scatter"): [3, (2 * BLOCK + LAST) * FLOAT],
        ("dp", "all_reduce"): [3, (2 * BLOCK + LAST) // 2 * FLOAT],
    },
    "pipeline": {
        ("pp", "send"): [4, 4 * 2 * 8 * FLOAT],
        ("pp", "recv"): [4, 4 * 2 * 8 * FLOAT],
        ("dp", "all_reduce"): [1, BLOCK * FLOAT],
    },
}


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [getattr(each, "to_local", each.detach)().clone() for each in model.parameters()]


def train_on_ranks() -> None:
    """What each of the ranks does: each way twice, without us first."""
    dist.init_process_group("gloo")
    for name, make in MODES.items():
        kept = []
        for watched in (False, True):
            torch.manual_seed(3)
            model, step = make()
            run = otel_ddp.init(group=name) if watched else None
            if run is not None:
                otel_ddp.instrument(model)
            optimizer = SGD(model.parameters(), lr=0.01)
            for _ in range(STEPS):
                step()
                optimizer.step()
                optimizer.zero_grad()
            if run is not None:
                run.finish()
            kept.append(weights(model))
        assert all(torch.equal(*each) for each in zip(*kept, strict=True)), name
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def on_ranks() -> dict[tuple[str, int], list[Step]]:
    """The steps of every way and rank, from one launch."""
    found: dict[tuple[str, int], list[Step]] = {}
    with Node(
        OTEL_DDP_AGENT="off", PYTHONPATH=os.pathsep.join(map(str, Path(__file__).parents[1:3]))
    ) as node:
        finished(node.torchrun(RANKS, __file__))
        for each in Here(node.place.directory).read():
            found[each.identity["group"], each.identity["global_rank"]] = each.steps
    return found


@pytest.mark.parametrize("mode", MODES)
def test_each_step_tells_its_calls_alike_on_all_ranks_and_few_how_many_bytes_they_have(
    mode: str, on_ranks: dict[tuple[str, int], list[Step]]
) -> None:
    for rank in range(RANKS):
        sums = {each.number: each.collectives for each in on_ranks[mode, rank]}
        assert sums == {number: SUMS[mode] if number == 5 else None for number in sums}
    ranks = [facts_of(on_ranks[mode, rank]) for rank in range(RANKS)]

    # The groups are not known before the first step.
    assert [[each.number for each in steps if each.calls] for steps in ranks] == [
        [*range(2, STEPS + 1)]
    ] * RANKS
    for steps in zip(*ranks, strict=True):
        by_group: dict[str, list[list[str]]] = {}
        sent = Counter[tuple[int, int, bool]]()
        for rank, each in enumerate(steps):
            if each.calls is None:
                continue
            calls, at_ns, _ = each.calls
            if each.number > 2:
                # DDP has told itself by then in which order gradients come.
                found = Counter((call.dimension, call.op, call.phase) for call in calls)
                assert dict(found) == USUAL[mode]
            assert [each.ended_ns - each.took_ns, *at_ns, each.ended_ns] == sorted(
                [each.ended_ns - each.took_ns, *at_ns, each.ended_ns]
            )
            for group in {call.group for call in calls}:
                ops = [call.op for call in calls if call.group == group and call.peer < 0]
                by_group.setdefault(group, []).append(ops)
            for call in calls:
                if call.peer >= 0:
                    sends = call.op == "send"
                    a, b = (rank, call.peer) if sends else (call.peer, rank)
                    sent[a, b, sends] += 1
        assert all(mine == members[0] for members in by_group.values() for mine in members)
        assert all(count == sent[a, b, not sends] for (a, b, sends), count in sent.items())


# -- one process, and a group of two ranks that is none


class Loop:
    """The calls of one process whose steps are as the test says."""

    def __init__(self, folder: Path) -> None:
        self.measured = Measured(folder)
        self.progress = self.measured.progress
        self.calls = GroupCalls(self.progress)
        self.sums: list[int] = []
        """Calls and bytes that the last step has told."""
        self.progress.begin_steps()

    def begin(self, *, measured: bool = True, adds_up: bool = False) -> None:
        self.calls.begin(self.measured.now_ns, measured, adds_up)

    def step(self, *acts: Callable[[], Any]) -> int | None:
        """A measured step that does this: how many calls are noted; None: that is not known."""
        self.begin()
        return self.rest_of_step(*acts)

    def rest_of_step(self, *acts: Callable[[], Any]) -> int | None:
        for act in acts:
            act()
        before = len(self.progress.phases.pending)
        self.calls.step_ended(self.measured.now_ns)
        words = self.progress.phases.pending[before:]
        in_sums = (layout.STEP_CALL_COUNT, layout.STEP_CALL_BYTES)
        low = (1 << layout.CALL_SHIFT) - 1
        self.sums = [sum(e & low for e in words if e >> 56 == code) for code in in_sums]
        codes = [each >> 56 for each in words if each >> 56 not in in_sums]
        if layout.STEP_CALLS not in codes:
            assert codes == []
            return None
        assert codes[-1] == layout.STEP_CALLS
        return codes.count(layout.STEP_CALL)


@pytest.fixture
def loop(tmp_path: Path) -> Iterator[Loop]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    loop = Loop(tmp_path)
    yield loop
    loop.calls.give_up()
    loop.measured.close()
    if dist.is_initialized():
        dist.destroy_process_group()


def reduce() -> None:
    dist.all_reduce(torch.ones(1))


def test_very_many_ranks_note_fewer_steps_for_the_sake_of_their_lead(loop: Loop) -> None:
    loop.step(*[reduce] * 20)
    assert loop.calls.least_every(10**9) == 1

    dist.destroy_process_group()
    dist.init_process_group("fake", rank=0, world_size=100_000, store=FakeStore())
    loop.step(*[reduce] * 20)
    assert loop.calls.least_every(10**9) == 16


def elsewhere() -> None:
    thread = Thread(target=reduce)
    thread.start()
    thread.join()


def hooks_called(act: Callable[[], Any]) -> int:
    """How often this calls a hook of ours."""
    count = 0

    def look(frame: Any, event: str, _: Any) -> None:
        nonlocal count
        ours = frame.f_globals["__name__"] == GroupCalls.__module__
        count += event == "call" and ours and frame.f_code.co_name == "called"

    sys.setprofile(look)
    try:
        act()
    finally:
        sys.setprofile(None)
    return count


def test_hooks_are_on_in_measured_steps_alone(loop: Loop) -> None:
    assert hooks_called(reduce) == 0
    assert loop.step(reduce, reduce) == 2

    loop.begin(measured=False)
    assert hooks_called(reduce) == 0

    assert loop.step(reduce) == 1
    loop.calls.give_up()
    assert hooks_called(reduce) == 0


def test_a_signal_that_interrupts_a_hook_is_the_loops_and_ends_nothing(loop: Loop) -> None:
    class TimeLimit(Exception):
        pass

    def over(number: int, frame: Any) -> None:
        raise TimeLimit

    before = signal.signal(signal.SIGUSR1, over)
    waits: Any = SimpleNamespace(
        call_began=lambda _: signal.raise_signal(signal.SIGUSR1),
        call_ended=lambda _: None,
        **dict.fromkeys(("switch", "take_off"), lambda *_: None),
        step_ended=lambda: 0,
    )
    loop.calls.waits = waits
    try:
        loop.begin()
        with pytest.raises(TimeLimit):
            reduce()
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert loop.calls.waits_seen


def test_calls_of_a_thread_that_does_not_train_are_of_no_step(loop: Loop) -> None:
    assert loop.step(reduce, elsewhere, elsewhere) == 1


def test_each_call_tells_for_what_share_of_the_time_before_it_the_thread_stood_still(
    loop: Loop,
) -> None:
    def stand_still() -> None:
        loop.measured.spend(1)

    def work() -> None:
        began_ns = thread_time_ns()
        while (ran_ns := thread_time_ns() - began_ns) < 20_000_000:
            pass
        # The clock of the test goes on as if the thread had not stopped once.
        loop.measured.now_ns += ran_ns

    assert loop.step(stand_still, reduce, work, reduce, stand_still) == 2
    first, second, rest = [
        word >> layout.CALL_IDLE_SHIFT & 0xFF
        for word in loop.progress.phases.pending
        if word >> 56 in (layout.STEP_CALL, layout.STEP_CALLS)
    ]

    assert min(first, rest) > 230
    assert second < 25


def test_a_group_made_in_a_step_is_noted_from_the_next_one_on(loop: Loop) -> None:
    made = []
    call_it = lambda: dist.all_reduce(torch.ones(1), group=made[0])  # noqa: E731

    assert loop.step(lambda: made.append(dist.new_group([0, 1])), call_it, reduce) == 1
    assert loop.step(call_it, reduce) == 2
    dist.destroy_process_group(made.pop())
    assert loop.step(reduce) == 1
    # All of them are gone, and made anew.
    loop.begin()
    dist.destroy_process_group()
    assert loop.rest_of_step() == 0
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    assert loop.step(reduce) == 1


def test_hooks_stay_as_they_are_while_another_thread_is_in_a_call(loop: Loop) -> None:
    entered, go_on = Event(), Event()

    def wait(_: Any) -> None:
        entered.set()
        go_on.wait(60)

    loop.step(reduce)
    # A hook of the user's own, before ours: torch has begun to go through them.
    dist.group.WORLD.register_pre_hook(1, wait)
    thread = Thread(target=reduce)
    thread.start()
    entered.wait(60)
    loop.begin(measured=False)
    dist.group.WORLD.unregister_pre_hook(2)
    go_on.set()
    thread.join()
    dist.group.WORLD.unregister_pre_hook(1)

    assert hooks_called(reduce) == 1
    assert loop.rest_of_step() is None
    loop.begin(measured=False)
    assert hooks_called(reduce) == 0


def test_a_handler_that_ends_the_run_within_our_hook_leaves_it_where_it_is(loop: Loop) -> None:
    loop.begin()
    before = signal.signal(signal.SIGUSR1, lambda *_: loop.calls.give_up())
    clock = loop.progress.phases.clock

    def interrupted() -> int:
        os.kill(os.getpid(), signal.SIGUSR1)
        return clock()

    loop.progress.phases.clock = interrupted
    # This hook is of the group that comes now, and so has that clock.
    group = dist.new_group([0, 1])
    try:
        loop.begin()
        dist.all_reduce(torch.ones(1), group=group)
    finally:
        signal.signal(signal.SIGUSR1, before)

    assert not loop.calls.noted
    assert hooks_called(reduce) == 1
    loop.begin()
    assert hooks_called(reduce) == 0


def test_a_step_is_not_noted_that_has_more_calls_than_there_is_room_for(loop: Loop) -> None:
    loop.calls._left = 1

    assert loop.step(reduce) == 1
    assert loop.step(reduce, dist.barrier, reduce) is None
    assert loop.step(reduce) == 1


def test_a_step_is_not_noted_that_lasts_longer_than_its_words_can_tell(loop: Loop) -> None:
    assert loop.step(reduce, lambda: loop.measured.spend(1099)) == 1
    assert loop.step(reduce, lambda: loop.measured.spend(1100)) is None


def on_device(loop: Loop) -> Callable[[], None]:
    """Calls the hook as a group does that reduces 4 numbers of 4 bytes on a device."""
    tensors = [torch.ones(4, device="meta")]
    call = SimpleNamespace(input_tensors=tensors, output_tensors=tensors, root=-1)
    call.name = SimpleNamespace(name="ALLREDUCE", value=3)
    return partial(loop.calls._hook("7", object(), [0, 1], False), call)


def test_on_a_device_calls_are_added_up_and_no_arrival_is_noted(loop: Loop) -> None:
    act = on_device(loop)

    assert loop.step(reduce) == 1
    assert loop.calls.noted
    assert loop.step(reduce, act, reduce) is None
    assert not loop.calls.noted
    assert loop.step(reduce) is None
    assert hooks_called(reduce) == 0
    loop.begin(adds_up=True)
    assert loop.rest_of_step(act, act, elsewhere) is None
    assert loop.sums == [2, 32]


class Backward(torch.autograd.Function):
    """Acts in backward."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, act: Act) -> torch.Tensor:
        ctx.act = act
        return value.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.act()
        return gradient, None


def test_on_a_device_calls_of_a_backward_count_in_whatever_thread_it_is(loop: Loop) -> None:
    outputs = Backward.apply(torch.ones(1, requires_grad=True), on_device(loop))
    thread = Thread(target=outputs.backward)

    loop.calls.on_device = True
    loop.begin(adds_up=True)

    assert loop.rest_of_step(thread.start, thread.join) is None
    assert loop.sums == [1, 16]


def test_a_step_without_calls_is_counted_too(loop: Loop) -> None:
    loop.begin(adds_up=True)

    assert loop.rest_of_step() == 0
    codes = [word >> layout.CODE_SHIFT for word in loop.progress.phases.pending]
    assert layout.STEP_CALL_COUNT in codes


def test_more_bytes_than_a_word_holds_have_several(loop: Loop) -> None:
    act = on_device(loop)
    sizes = {"numel": lambda: 5 << 38, "element_size": lambda: 4}
    act.args[0].input_tensors = [SimpleNamespace(device=torch.device("meta"), **sizes)]

    loop.begin(adds_up=True)

    assert loop.rest_of_step(act) is None
    assert loop.sums == [1, 5 << 40]


def test_groups_are_called_by_their_mesh_or_what_they_are_and_few_have_a_series_of_their_own(
    loop: Loop,
) -> None:
    label = loop.calls._label

    assert [label("", name, False) for name in ("undefined", "")] == ["other"] * 2
    assert [label("", "default_pg", True), label("", "TENSOR", False)] == ["world", "TENSOR"]
    assert [label(f"d{n}", f"mesh_d{n}", False) for n in range(15)] == [
        *(f"d{n}" for n in range(14)),
        "other",
    ]


def test_a_failure_of_ours_ends_the_noting_and_no_call(
    loop: Loop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(_: str) -> int:
        raise RuntimeError("broken")

    monkeypatch.setattr(loop.progress.recorder.names, "of_text", fails)

    assert loop.step(reduce) is None
    assert loop.step(reduce) is None
    assert hooks_called(reduce) == 0


# Each way in a child, which ends as a program does: torch is imported once.
EXITS = """
import os, sys, threading, time
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

# This imports the compiler, which takes as long as torch.
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=0.1).step()
for way in ("as it is", "in a forked child", "while a thread is in a call"):
    child = os.fork()
    if not child:
        break
    print(way, os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
else:
    sys.exit()

import otel_ddp

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
model = torch.nn.Linear(4, 1)
otel_ddp.instrument(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(2):
    model(torch.ones(2, 4)).sum().backward()
    dist.all_reduce(torch.ones(1))
    optimizer.step()
if way == "in a forked child" and (child := os.fork()):
    sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
if way == "while a thread is in a call":
    entered = threading.Event()
    dist.group.WORLD.register_pre_hook(1, lambda _: entered.set() or time.sleep(600))
    threading.Thread(target=dist.all_reduce, args=(torch.ones(1),), daemon=True).start()
    entered.wait()
"""


def test_a_program_may_end_while_hooks_are_on() -> None:
    with Node(OTEL_DDP_AGENT="off") as node:
        ended = finished(node.start(sys.executable, "-c", EXITS))

    ways = "as it is", "in a forked child", "while a thread is in a call"
    assert ended == "".join(f"{way} 0\n" for way in ways)


if __name__ == "__main__":
    train_on_ranks()
