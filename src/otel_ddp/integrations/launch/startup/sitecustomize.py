"""Imported by Python at its start: waits for the import of torch or of a framework.

Every Python below `otel-ddp run` imports this, so it must work in all versions. It imports otel_ddp
only once there is something to measure. Without otel_ddp, nothing happens.
"""

import os
import sys

# For each module our function that `launch` calls once the program has imported the module.
NAMES = {
    "torch": "launch.wait_for_training",
    "torch.utils.tensorboard": "trackers.listen",
    "tensorboardX": "trackers.listen",
    "wandb": "trackers.listen",
    "swanlab": "trackers.listen",
    "mlflow": "trackers.listen",
    "transformers.trainer": "transformers.add_to_every_trainer",
    "lightning.pytorch": "lightning.add_to_every_trainer",
    "pytorch_lightning": "lightning.add_to_every_trainer",
    "ray.train.torch": "ray.end_with_the_function",
}


class Finder(object):
    """Finds no module itself, but calls *imported* once one of the modules *names* is imported."""

    is_of_otel_ddp = True

    def __init__(self, names, imported):
        self._names = set(names)
        self._imported = imported

    def add(self, names):
        """Wait for the imports of these modules too, unless they are imported already."""
        self._names.update(set(names).difference(sys.modules))

    def find_spec(self, name, path=None, target=None):
        if name not in self._names:
            return None
        # Ask the finders after this one: those before it have found nothing.
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
        """Wrap `exec_module` of the loader, to notice when the module is imported."""
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
            pass  # a loader that cannot be wrapped, as in a frozen program


def imported(name):
    """Tell otel_ddp that this module has been imported. Does nothing if otel_ddp is missing."""
    try:
        from otel_ddp.integrations import launch

        launch.imported(name, NAMES[name])
    except Exception:  # a broken installation, or one too old for this file
        pass


def install(names=NAMES):
    """Wait for the imports of these modules.

    If there is a finder of ours already, as in a nested `otel-ddp run`, it waits for them too.
    """
    found = [each for each in sys.meta_path if getattr(each, "is_of_otel_ddp", False)]
    if found:
        found[0].add(names)  # type: ignore[attr-defined]
    else:
        sys.meta_path.insert(0, Finder(names, imported))


def give_way():
    """Import the sitecustomize that Python would have imported instead of this one."""
    here = os.path.dirname(__file__)
    sys.path[:] = [each for each in sys.path if each != here]
    sys.modules.pop("sitecustomize", None)
    # If there is no other sitecustomize, this raises ImportError, as Python expects in this case.
    __import__("sitecustomize")


if __name__ == "sitecustomize":
    if sys.version_info >= (3, 10):
        install()
    give_way()
