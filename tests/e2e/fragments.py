"""The Python fragments of the pages that are no whole programs, and what stands around them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from textwrap import indent

from tools.stack.server import free_port

ROOT = Path(__file__).parents[2]

_RUN = """
import torch
import torch.distributed as dist
import otel_ddp
run = otel_ddp.init()
epoch = step = 0
loss = torch.ones(())
model = torch.nn.ModuleDict({"fc": torch.nn.Linear(4, 1)})
model.fc(torch.ones(8, 4)).mean().backward()
state, device = model.state_dict(), "cpu"
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
_TRAINING = """
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
import otel_ddp
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
criterion = torch.nn.MSELoss()
loader, targets = [torch.ones(8, 4)] * 3, torch.ones(8, 1)
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
"""
# The page, and the place of the fragment on it: what comes before it and after it. It is in a block
# that is open there.
AROUND = {
    ("docs/artifacts.md", 0): (
        f"""{_RUN}
from pathlib import Path
for each in ("data/train", "out"):
    Path(each).mkdir(parents=True)
""",
        "",
    ),
    ("docs/frameworks.md", 0): (_TRAINING, ""),
    ("docs/frameworks.md", 1): (
        f"""{_TRAINING}
import sys
sys.path.insert(0, "{ROOT}/examples/trainer_ddp")
from train import CONFIG, data
import trainer
class TrainerDDP(trainer.TrainerDDP):
    def __init__(self, rank, config):
        super().__init__(rank, config)
        global train_loader, val_loader
        train_loader, val_loader, _ = self.prepare_dataloaders()
rank, config = 0, CONFIG
config["training"] |= {{"num_epochs": 1, "path": "."}}
""",
        "",
    ),
    ("docs/frameworks.md", 5): (
        f"""{_TRAINING}
from ignite.engine import Engine, create_supervised_evaluator
from ignite.metrics import Loss
def update(engine, batch):
    optimizer.zero_grad()
    loss = criterion(model(batch), targets)
    loss.backward()
    optimizer.step()
    return loss.item()
trainer, val_loader = Engine(update), [(loader[0], targets)]
evaluator = create_supervised_evaluator(model, {{"loss": Loss(criterion)}})
""",
        "trainer.run(loader)",
    ),
    ("docs/frameworks.md", 9): (
        f"""{_TRAINING}
import functools
import os
import torch.multiprocessing as mp
dist.destroy_process_group()
# A program of `-c` has no file that a new process could read.
mp.spawn = functools.partial(mp.start_processes, start_method="fork")
os.environ |= {{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "{free_port()}"}}
world_size = 2
def train():
    ours = DistributedDataParallel(model)
    for batch in loader:
        criterion(ours(batch), targets).backward()
        optimizer.step()
""",
        "",
    ),
    ("docs/notifications.md", 0): (_RUN, ""),
    ("docs/opentelemetry.md", 0): (
        f"""{_RUN}
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
import requests
from opentelemetry import trace
class Here(BaseHTTPRequestHandler):
    def do_POST(self):
        self.send_response(204)
        self.end_headers()
server = HTTPServer(("127.0.0.1", 0), Here)
threading.Thread(target=server.handle_request).start()
tracer, batch = trace.get_tracer(__name__), [1]
url = f"http://127.0.0.1:{{server.server_port}}"
""",
        "server.server_close()",
    ),
    ("docs/processes.md", 0): (
        """
import multiprocessing
import otel_ddp
def train(n):
    return n / 2
""",
        "",
    ),
    ("docs/processes.md", 1): (
        """
import queue
import otel_ddp
messages = queue.Queue()
for each in ({"rank": 0, "loss": 0.5, "step": 1}, None):
    messages.put(each)
queue = messages
""",
        "",
    ),
    ("docs/training.md", 0): (f"{_RUN}\nevaluations_without_better = 3\nwhile True:\n", ""),
    ("docs/training.md", 1): (_RUN, ""),
    ("docs/training.md", 2): ("import otel_ddp", "run.finish()"),
}

# The quickstart with its two ranks, and the frameworks in tests/integrations.
ELSEWHERE = {("docs/quickstart.md", 0), *(("docs/frameworks.md", n) for n in (2, 3, 4, 6, 7, 8))}


def of(page: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", (ROOT / page).read_text(), re.MULTILINE | re.DOTALL)


def completed() -> Iterator[tuple[str, str]]:
    """A name for each fragment, and the program that it is with what stands around it."""
    for (page, place), (before, after) in AROUND.items():
        # There is no GPU here.
        fragment = of(page)[place].replace('"nccl"', '"gloo"')
        within = before.rstrip().endswith(":")
        yield f"{page} {place}", f"{before}\n{indent(fragment, '    ' * within)}\n{after}\n"
