"""A route that is wrong for a while after an outage: nothing is lost, and what is said is true."""

from __future__ import annotations

from collections import Counter

from node import Node, until
from otlp_receiver import Receiver

STEPS = 2000
TRAIN = f"""
import otel_ddp
run = otel_ddp.init(run="r")
for step in range({STEPS}):
    run.log({{"loss": float(step)}}, step=step)
run.finish()
"""


def test_what_waits_for_a_collector_outlives_answers_that_people_can_mend() -> None:
    with Receiver() as receiver, Node() as node:
        node.export_to(receiver.start_http())
        receiver.set_mode(503)
        node.run(TRAIN)
        for mode in (503, 404, "redirect"):
            receiver.set_mode(mode)
            before = receiver.attempts.count("metrics")
            assert receiver.wait_for(
                lambda receiver, before=before: receiver.attempts.count("metrics") > before
            )
        receiver.set_mode("ok")

        def losses() -> Counter[float]:
            return Counter(p.value for p in receiver.points() if p.metric == "training.scalar")

        assert receiver.wait_for(lambda _: len(losses()) == STEPS)
        until(lambda: "takes data again" in node.place.agent_log.read_text(), "the recovery")
        lines = node.place.agent_log.read_text().splitlines()
        dropped = [each for each in node.series("otel_ddp_points_dropped_total") if each[1]]

    assert losses() == Counter(float(step) for step in range(STEPS))
    assert dropped == []
    assert len(lines) == 3, lines
    assert lines[1].endswith("what cannot be delivered waits on disk.")
