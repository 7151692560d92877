"""Lightning's Trainer: a callback. Fabric needs none.

    from paramd.integrations.lightning import ParamdCallback

    trainer = Trainer(..., callbacks=[ParamdCallback(job="my-run")])

With Fabric, attach what it has set up:

    model, optimizer = fabric.setup(model, optimizer)
    attachment = paramd.attach(model, optimizer, job="my-run")
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from paramd.errors import UsageError
from paramd.integrations import training
from paramd.integrations.versions import require

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer
elif "pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules:
    # The same code under its other name; a script uses one of them.
    require("pytorch-lightning", at_least="2.5", below="3", extra="lightning")
    from pytorch_lightning import Callback
else:
    require("lightning", at_least="2.5", below="3", extra="lightning")
    from lightning.pytorch import Callback

STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "FSDPStrategy", "ModelParallelStrategy")
"""Strategies that are served."""


class ParamdCallback(training.Callback, Callback):
    """Attaches a LightningModule when its training begins and detaches it when it ends.

    paramd's step is the Trainer's `global_step`: updates by optimizers, each of several, also
    after a checkpoint was resumed. An exception in fit detaches as well.
    """

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Attach, after wrapping, the sanity check, and loading a checkpoint."""
        self._training.check_no_resume("Lightning", 'use fit(ckpt_path="last")')
        strategy = trainer.strategy
        if not any(kind.__name__ in STRATEGIES for kind in type(strategy).__mro__):
            raise UsageError(
                f"Lightning's {type(strategy).__name__} is not supported; paramd serves "
                f"{', '.join(STRATEGIES)}"
            )
        self._training.begin(strategy.model, trainer.optimizers, step=trainer.global_step)

    def on_train_batch_start(self, *_: Any, **__: Any) -> None:
        """Settle the last update here: Lightning does not call the module's forward to train."""
        self._training.begin_iteration()

    def on_train_batch_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Keep up with `global_step`, which counts skipped steps, too."""
        self._training.counted(trainer.global_step)

    def teardown(self, *_: Any, **__: Any) -> None:
        """Detach after a training that a callback has stopped, too."""
        self._training.end()

    on_train_end = on_exception = teardown
