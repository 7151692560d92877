"""`Attachment.refresh`: attach changed parameters anew, and keep the helpers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from paramd.errors import ConflictError, UsageError
from paramd.trainer.attaching.attachment import Attachment, Missing, Models
from paramd.trainer.attaching.checks import check_trained, optimizers_of, resolve
from paramd.trainer.attaching.discovering import together
from paramd.trainer.attaching.stages import Stages
from paramd.trainer.model import partitions


@dataclass(frozen=True, slots=True)
class Refreshing:
    """What `attach` was given, apart from optimizers: they would keep old parameters alive."""

    model: Models
    accelerator: Any
    keep: Mapping[str, Any] | None

    def __call__(self, attachment: Attachment, model: Models, optimizer: Any) -> None:
        """As `Attachment.refresh`."""
        accelerator = self.accelerator
        if model is not None or optimizer is not Missing.OPTIMIZER:
            accelerator = None
        if accelerator is None:
            model = model if model is not None else self._model_of(attachment)
            if optimizer is Missing.OPTIMIZER:
                optimizer = attachment._editor.given()
            elif optimizer is not None:
                # An iterator is passed twice.
                optimizer = optimizers_of(optimizer)

        def look() -> dict[str, Any]:
            if attachment._boundary.is_inside:
                raise ConflictError(
                    "refresh: this rank is inside an update or a block of other weights; call it "
                    "after that"
                )
            module, given = resolve(model, optimizer, attachment.job, accelerator)
            if module in partitions.declared:
                raise UsageError(
                    "refresh: parameters of DeepSpeed and Megatron-Core are attached anew by "
                    "detach() and their own attach"
                )
            check_trained(module, optimizers_of(given))
            return {}

        # Until here nothing has changed, and all stay attached; from here on all are detached, or
        # attached anew.
        together(attachment._exchange, look)
        step, tracking = attachment.step, attachment._tracking
        if tracking is not None:
            # A tracker ends with its run.
            tracking.close()
        stages = Stages(
            attachment._exchange,
            attachment._settings,
            attachment.job,
            self.keep if self.keep is not None else {},
            attachment._identity,
        )
        stages.take_helpers(attachment._sidecar, attachment._control, attachment._url)
        try:
            stages.leave(attachment)
            found = stages.discover(model, optimizer, accelerator, step)
            stages.begin_anew(found)
            identity = stages.identify()
            mesh = stages.open(identity, found)
            stages.move_in(found, identity, mesh, attachment)
        except BaseException:
            stages.close()
            raise
        attachment._again = replace(self, model=model, accelerator=accelerator)
        if tracking is not None:
            attachment._track(attachment._settings)

    def _model_of(self, attachment: Attachment) -> Models:
        return self.model if self.model is not None else attachment._model
