"""Records the weights after each optimizer step, which measuring must not change.

A copy of this file lies in the environment of each program, in all of its ways alike. It knows
nothing of otel_ddp. A line of its file is a step: which optimizer, a checksum of all weights so
far, and when the step began and ended.
"""

import importlib.abc
import importlib.machinery
import itertools
import os
import sys
import time
import weakref
import zlib

FOLDER = os.environ.get("STEP_WITNESS", "")
# `<what>:<seconds>`: rank 1 is late in it.
LATE = os.environ.get("STEP_WITNESS_LATE", "")


def rank():
    import torch.distributed

    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    return int(os.environ.get("RANK", "0"))


def checksum(optimizer, so_far):
    import torch

    for group in optimizer.param_groups:
        for each in group["params"]:
            local = getattr(each, "to_local", None)
            data = (local() if local else each).detach().cpu().contiguous().reshape(-1)
            so_far = zlib.crc32(data.view(torch.uint8).numpy(), so_far)
    return so_far


class Steps:
    def __init__(self):
        self.so_far = 0
        self.left_at = time.perf_counter()
        self.optimizers = weakref.WeakKeyDictionary()
        self.numbers = itertools.count()

    def __call__(self, optimizer, args, kwargs):
        began = time.perf_counter()
        # A wrapper of an optimizer may step as one itself: the one beneath is the one that counts.
        # Not by its id: the next one may get that of one that is gone.
        if optimizer not in self.optimizers:
            self.optimizers[optimizer] = next(self.numbers)
        number = self.optimizers[optimizer]
        self.so_far = checksum(optimizer, self.so_far)
        with open(os.path.join(FOLDER, f"{rank()}-{os.getpid()}"), "a") as file:
            file.write(f"{number} {self.so_far:08x} {began - self.left_at:.7f}\n")
        self.left_at = time.perf_counter()


def late(what, seconds):
    import torch

    def wait(*_, **__):
        if rank() == 1:
            time.sleep(seconds)

    if what == "optimizer":
        # Torch calls it within each step: hooks of all optimizers come before it, or after it.
        torch.optim.Optimizer._optimizer_step_code = wait
    elif what == "input":
        from torch.utils.data._utils import fetch

        for kind in (fetch._MapDatasetFetcher, fetch._IterableDatasetFetcher):

            def slow(self, index, fetched=kind.fetch):
                wait()
                return fetched(self, index)

            kind.fetch = slow
    elif what == "forward":
        # In the first module that the model itself calls: within the model's own forward.
        deep = [0]
        waited = [False]

        def enter(module, args):
            deep[0] += 1
            if deep[0] == 1:
                waited[0] = False
            elif not waited[0] and module.training:
                waited[0] = True
                wait()

        def leave(*_):
            deep[0] -= 1

        torch.nn.modules.module.register_module_forward_pre_hook(enter)
        torch.nn.modules.module.register_module_forward_hook(leave, always_call=True)


def watch():
    from torch.optim.optimizer import register_optimizer_step_post_hook

    register_optimizer_step_post_hook(Steps())
    if LATE:
        what, seconds = LATE.split(":")
        late(what, float(seconds))


class Finder(importlib.abc.MetaPathFinder):
    """Watches once torch has been imported."""

    def find_spec(self, name, path=None, target=None):
        if name != "torch":
            return None
        # By those after this one. Whether torch is there is often asked before it is imported.
        for each in sys.meta_path[sys.meta_path.index(self) + 1 :]:
            spec = each.find_spec(name, path, target)
            if spec is not None:
                break
        else:
            return None
        execute = spec.loader.exec_module

        def exec_module(module):
            sys.meta_path.remove(self)
            execute(module)
            watch()

        spec.loader.exec_module = exec_module
        return spec


if FOLDER:
    sys.meta_path.insert(0, Finder())
