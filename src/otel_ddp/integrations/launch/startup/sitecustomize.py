"""Python imports this file at its start: it waits for torch, and steps out of the way.

Every Python below `otel-ddp run` comes here, whatever its version, so this file runs on all of
them. It imports nothing of otel_ddp before there is something to measure. Where otel_ddp cannot be
imported, nothing happens.
"""

import os
import sys

# Once one of these has been imported, `launch` calls this function of the integrations.
NAMES = {
    "torch": "launch.wait_for_training",
    "torch.utils.tensorboard": "trackers.listen",
    "tensorboardX": "trackers.listen",
    "wandb": "trackers.listen",
    "swanlab": "trackers.listen",
    "mlflow": "trackers.listen",
    "transformers.trainer": "transformers.add_to_every_trainer",
    "accelerate.accelerator": "accelerate.autolog",
    "lightning.pytorch": "lightning.add_to_every_trainer",
    "pytorch_lightning": "lightning.add_to_every_trainer",
    "ray.train": "ray.log_every_report",
    "ray.train.torch": "ray.end_with_the_function",
}


class Finder(object):
    """Finds no module by itself, and learns when one of the names has been imported."""

    is_of_otel_ddp = True

    def __init__(self, names, imported):
        self._names = set(names)
        self._imported = imported

    def add(self, names):
        """Wait for these as well, but for those that have been imported."""
        self._names.update(set(names).difference(sys.modules))

    def find_spec(self, name, path=None, target=None):
        if name not in self._names:
            return None
        # Those before this one have found nothing.
        reached = False
        for each in list(sys.meta_path):
            find = getattr(each, "find_spec", None) if reached else None
            spec = None if find is None else find(name, path, target)
            if spec is not None:
                self._watch(name, spec.loader)
                return spec
            reached = reached or each is self
        return None

    def _watch(self, name, loader):
        """Have this loader of one module call us: it stays the module's loader."""
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module):
            loader.__dict__.pop("exec_module", None)
            execute(module)
            if name in self._names:
                self._names.discard(name)
                self._imported(name)

        try:
            loader.exec_module = exec_module
        except (AttributeError, TypeError):
            pass  # A loader that cannot be watched, as one of a frozen program.


def imported(name):
    """Say that a module has been imported, where otel_ddp can be."""
    try:
        from otel_ddp.integrations import launch

        launch.imported(name, NAMES[name])
    except Exception:  # An installation that is broken, or too old for this file.
        pass


def install(names=NAMES):
    """Wait for these modules, by one finder: one `otel-ddp run` may start another one."""
    found = [each for each in sys.meta_path if getattr(each, "is_of_otel_ddp", False)]
    if found:
        found[0].add(names)  # type: ignore[attr-defined]
    else:
        sys.meta_path.insert(0, Finder(names, imported))


def give_way():
    """Import the sitecustomize that Python would have found without this one."""
    here = os.path.dirname(__file__)
    sys.path[:] = [each for each in sys.path if each != here]
    sys.modules.pop("sitecustomize", None)
    # Where there is none, this raises what Python expects from there being none.
    __import__("sitecustomize")


if __name__ == "sitecustomize":
    if sys.version_info >= (3, 10):
        install()
    give_way()
