"""What a program of each framework has before the snippet of the docs, and after it."""

# Torch and the frameworks are imported already: what their imports below `otel-ddp run` set off.
WITHOUT_A_LINE = """
import sys

from otel_ddp.integrations import launch
from otel_ddp.integrations.launch.startup import sitecustomize

for name, call in sitecustomize.NAMES.items():
    if name in sys.modules:
        launch.imported(name, call)
sitecustomize.install()
"""

# -- Hugging Face's Trainer

TRANSFORMERS = """
import json

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel


class TinyConfig(PretrainedConfig):
    model_type = "tiny"

    def __init__(self, width=4, **more):
        self.width = width
        super().__init__(**more)


class Tiny(PreTrainedModel):
    config_class = TinyConfig

    def __init__(self, config):
        super().__init__(config)
        self.layer = nn.Linear(config.width, 1)
        self.post_init()

    def forward(self, x, labels=None):
        out = self.layer(x).squeeze(-1)
        return {"loss": (out - labels).square().mean(), "logits": out}


torch.manual_seed(0)
model = Tiny(TinyConfig(width=4, num_labels=3))
train_set = [{"x": torch.randn(4), "labels": torch.randn(())} for _ in range(64)]
eval_set = train_set[:16]
"""
TRANSFORMERS_REPORT = """
trainer.predict(eval_set)
if trainer.is_world_process_zero():
    with open("report.json", "w") as file:
        json.dump(trainer.state.log_history, file)
"""
TRANSFORMERS_WITHOUT_A_LINE = """
from transformers import Trainer, TrainingArguments

arguments = TrainingArguments(
    output_dir="out",
    num_train_epochs=1,
    logging_steps=2,
    eval_strategy="epoch",
    save_strategy="no",
)
trainer = Trainer(model, arguments, train_dataset=train_set, eval_dataset=eval_set)
trainer.train()
from otel_ddp.integrations.transformers import OtelDdpCallback

arguments.eval_strategy = "no"
other = Trainer(model, arguments, train_dataset=train_set, callbacks=[OtelDdpCallback()])
ours = [each for each in other.callback_handler.callbacks if isinstance(each, OtelDdpCallback)]
assert [type(each) for each in ours] == [OtelDdpCallback]
"""
TRANSFORMERS_FAILING = """
import transformers
import otel_ddp.integrations.transformers


def broken(features):
    if trainer.state.global_step == 2:
        raise RuntimeError("no more data")
    return transformers.default_data_collator(features)


arguments = transformers.TrainingArguments(
    output_dir="out",
    report_to="otel_ddp",
    run_name="tiny-1",
    hub_token="hf_" + 20 * "x",
    eval_strategy="steps",
    eval_steps=1,
    save_steps=1,
)
trainer = transformers.Trainer(
    model,
    arguments,
    train_dataset=train_set,
    eval_dataset={"one": eval_set, "other": eval_set},
    data_collator=broken,
)
trainer.train()
"""


# -- Lightning

LIGHTNING = """
import json

import lightning as L
import torch
from torch.utils.data import DataLoader, TensorDataset


class Tiny(L.LightningModule):
    def __init__(self, width, lr):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(width, 1)

    def training_step(self, batch, number):
        loss = self.layer(batch[0]).square().mean()
        self.log_dict({"train_loss": loss, "batch": float(number)})
        return loss

    def validation_step(self, batch, number):
        self.log("val_loss", self.layer(batch[0]).square().mean(), sync_dist=True)

    def test_step(self, batch, number):
        self.log("test_loss", self.layer(batch[0]).square().mean(), sync_dist=True)

    def predict_step(self, batch, number):
        return self.layer(batch[0])

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)


torch.manual_seed(0)
data = TensorDataset(torch.randn(64, 4))
model, train_loader, val_loader = Tiny(4, 0.1), DataLoader(data, 8), DataLoader(data, 16)
"""
LIGHTNING_REPORT = """
trainer.test(model, val_loader, verbose=False)
if trainer.is_global_zero:
    with open(f"{trainer.loggers[1].log_dir}/metrics.csv") as file:
        report = {"csv": file.read(), "folder": trainer.checkpoint_callback.dirpath}
    with open("report.json", "w") as file:
        json.dump(report, file)
"""
# Another run of the same ranks. Its module steps in the middle of what DDP takes for a forward.
LIGHTNING_MANUAL = """
import otel_ddp

otel_ddp.finish()


class Manual(Tiny):
    def __init__(self, width, lr):
        super().__init__(width, lr)
        self.automatic_optimization = False

    def forward(self, inputs):
        return self.layer(inputs)

    def training_step(self, batch, number):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self(batch[0]).square().mean())
        optimizer.step()


trainer = L.Trainer(
    devices=2,
    strategy="ddp",
    max_epochs=2,
    logger=False,
    enable_checkpointing=False,
    callbacks=[OtelDdpCallback(group="manual")],
)
trainer.fit(Manual(4, 0.1), train_loader)
"""
# A training and a test, with a logger of the program's own; then a Trainer that has our logger.
LIGHTNING_WITHOUT_A_LINE = """
from lightning.pytorch.loggers import CSVLogger

settings = dict(max_epochs=1, log_every_n_steps=2)
trainer = L.Trainer(logger=CSVLogger("logs"), **settings)
trainer.fit(model, train_loader, val_loader)
trainer.test(model, val_loader, verbose=False)
assert trainer.loggers[1].version == str(trainer.logger.version)
assert trainer.checkpoint_callback.dirpath.endswith("logs/lightning_logs/version_0/checkpoints")

from otel_ddp.integrations.lightning import OtelDdpCallback, OtelDdpLogger

logger = OtelDdpLogger()
assert L.Trainer(logger=logger, **settings).loggers == [logger]
assert L.Trainer(logger=False, **settings).loggers == []
assert len(L.Trainer(fast_dev_run=True, **settings).loggers) == 1
own = OtelDdpCallback()
there = L.Trainer(logger=False, callbacks=[own], **settings).callbacks
assert [each for each in there if isinstance(each, OtelDdpCallback)] == [own]
"""
# Other programs have it imported.
FORGET_LIGHTNING = """
import sys

for name in [each for each in sys.modules if each.partition(".")[0] == "lightning"]:
    del sys.modules[name]
"""
# The first training of a process fails, and the second one has the same logger or callback.
LIGHTNING_BROKEN = """
import contextlib

from otel_ddp.integrations.lightning import OtelDdpCallback, OtelDdpLogger

assert OtelDdpLogger.__base__.__module__.startswith(L.__name__)


class Broken(Tiny):
    def training_step(self, batch, number):
        if number == 2:
            raise RuntimeError("no more data")
        return super().training_step(batch, number)


ours, names = OURS(group="trials"), []
for each in (Broken(4, 0.1), model):
    trainer = L.Trainer(
        max_epochs=1,
        log_every_n_steps=1,
        enable_checkpointing=False,
        logger=ours if OURS is OtelDdpLogger else False,
        callbacks=[ours] if OURS is OtelDdpCallback else [],
    )
    # The end of the process says nothing.
    with contextlib.suppress(RuntimeError):
        trainer.fit(each, train_loader)
    if OURS is OtelDdpLogger:
        names.append([ours.name, ours.version])
with open("report.json", "w") as file:
    json.dump(names, file)
"""

# -- all of them

# A method -> how many arguments it is given, none of which it understands.
MISUSED = """
from unittest.mock import sentinel

from otel_ddp.integrations import lightning, transformers

METHODS = {
    transformers.OtelDdpCallback(): {
        **dict.fromkeys(["on_train_begin", "on_step_begin", "on_step_end", "on_epoch_begin"], 3),
        **dict.fromkeys(["on_epoch_end", "on_prediction_step", "on_save", "on_train_end"], 3),
        **dict.fromkeys(["on_log", "on_evaluate", "on_predict"], 4),
    },
    lightning.OtelDdpCallback(): {
        **dict.fromkeys(["on_fit_start", "on_validation_start", "on_validation_end"], 2),
        **dict.fromkeys(["on_test_start", "on_test_end", "on_fit_end"], 2),
    },
    lightning.OtelDdpLogger(): {"log_metrics": 2, "log_hyperparams": 1},
}
for each, methods in METHODS.items():
    for name, count in methods.items():
        getattr(each, name)(*[sentinel.anything] * count)
"""

# -- DeepSpeed

DEEPSPEED = """
import deepspeed
import torch

# It would be compiled first, for a minute.
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 1))
train_set = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 1))
criterion = torch.nn.MSELoss()
config = {
    "train_micro_batch_size_per_gpu": 8,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.1, "torch_adam": True}},
    "zero_optimization": {"stage": STAGE},
}
"""
DEEPSPEED_REPORT = """
import json

if engine.global_rank == 0:
    with open("report.json", "w") as file:
        json.dump({"steps": engine.global_steps, "loss": loss.item()}, file)
"""

# -- Accelerate

ACCELERATE = """
import torch
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
loader = DataLoader(TensorDataset(torch.randn(64, 4), torch.randn(64, 1)), 8)
criterion = torch.nn.MSELoss()
"""
