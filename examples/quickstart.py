"""The smallest program that shows something: no GPU, no torch, no collector.

python examples/quickstart.py
curl http://localhost:9464/metrics
"""

import math

import otel_ddp

run = otel_ddp.init(group="quickstart", config={"lr": 0.1, "model": {"depth": 3}})

for step in range(200):
    loss = math.exp(-step / 50)
    run.log({"loss": loss, "lr": 0.1}, step=step)
    if step % 50 == 49:
        with run.phase("eval"):
            accuracy = 1 - loss
        run.log({"accuracy": accuracy}, step=step, split="val")

run.finish()
print(f"Recorded as run {run.run}. See it with: otel-ddp status")
