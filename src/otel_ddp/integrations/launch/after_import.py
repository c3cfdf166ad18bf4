"""What to do once torch or a framework has been imported by a program without a line of ours."""

from __future__ import annotations

from otel_ddp.errors import containment

_done: set[str] = set()


@containment.contained()
def imported(name: str) -> None:
    """Do what this module's import calls for."""
    if name == "torch":
        try:
            from otel_ddp.integrations.launch import auto_run
        except ImportError:
            # Another module of this name, or a torch that is years too old.
            containment.reraise_foreign()
            return
        auto_run.wait_for_training()
    elif name not in _done:
        _done.add(name)
        if name == "transformers.trainer":
            from otel_ddp.integrations import transformers

            transformers.add_to_every_trainer()
        elif name == "ray.train":
            from otel_ddp.integrations import ray

            ray.log_every_report()
        elif name == "ray.train.torch":
            from otel_ddp.integrations import ray

            ray.end_with_the_function()
        else:
            from otel_ddp.integrations import lightning

            lightning.add_to_every_trainer()
