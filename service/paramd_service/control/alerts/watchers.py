"""One watcher for each epoch that goes on: begins and ends with it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from paramd_service.control.alerts.book import Alert
from paramd_service.control.alerts.config import AlertConfig
from paramd_service.control.alerts.documents import document
from paramd_service.control.alerts.sampling import MeshSampler, Sampler
from paramd_service.control.alerts.store import AlertStore
from paramd_service.control.alerts.watcher import Watcher
from paramd_service.control.alerts.webhook import Webhooks
from paramd_service.control.incarnation import Incarnation
from paramd_service.control.jobs import Jobs
from paramd_service.control.view import MeshView
from paramd_service.control.watch import Publish

MakeSampler = Callable[[Incarnation], Sampler]


def _sampler_of(incarnation: Incarnation) -> Sampler:
    mine = incarnation.bootstrap
    return MeshSampler(incarnation.terms.url, mine.token, mine.job)


class Watchers:
    """`start` before jobs open, `close` when they have ended. Use on one event loop."""

    def __init__(
        self,
        config: AlertConfig,
        *,
        publish: Publish,
        store: AlertStore | None = None,
        make_sampler: MakeSampler = _sampler_of,
        expires_s: Callable[[], float | None] = lambda: None,
    ) -> None:
        """No I/O. `store` None keeps alerts in memory alone; `expires_s` as in `Watcher`."""
        self._expires_s = expires_s
        self.config = config
        self.webhooks = Webhooks(config)
        self._publish = publish
        self._store = store
        self._make_sampler = make_sampler
        self._watchers: dict[str, Watcher] = {}
        self._ending: set[asyncio.Task[None]] = set()

    def start(self, jobs: Jobs) -> None:
        """Follows the jobs from now on."""
        self.webhooks.start()
        jobs.on_begin.append(self._begin)
        jobs.on_end.append(self._end)
        jobs.on_view.append(self._look)
        for incarnation in jobs.all():
            if incarnation.over is None:
                self._begin(incarnation)

    async def close(self) -> None:
        """Ends all watchers; what fires goes on to fire in the store. Idempotent."""
        for watcher in list(self._watchers.values()):
            await watcher.close()
        if self._ending:
            await asyncio.wait(self._ending)
        await self.webhooks.close()

    def get(self, job: str) -> Watcher | None:
        """The watcher of a job's last epoch, which may be over; None before any."""
        return self._watchers.get(job)

    def all(self) -> list[tuple[str, Watcher]]:
        """Every job's watcher, ordered by the job's name."""
        return sorted(self._watchers.items())

    def _begin(self, incarnation: Incarnation) -> None:
        watcher = Watcher(
            self.config,
            job=incarnation.job,
            epoch=incarnation.epoch,
            view=incarnation.registry.view,
            sampler=self._make_sampler(incarnation),
            webhooks=self.webhooks,
            store=self._store,
            tell=self._tell,
            expires_s=self._expires_s,
        )
        watcher.start()
        self._watchers[incarnation.job] = watcher

    def _end(self, incarnation: Incarnation) -> None:
        # An older epoch ends before its successor begins, so this is the right one.
        watcher = self._watchers.get(incarnation.job)
        if watcher is not None:
            task = asyncio.create_task(watcher.close(epoch_over=True))
            self._ending.add(task)
            task.add_done_callback(self._ending.discard)

    def _look(self, incarnation: Incarnation, view: MeshView) -> None:
        watcher = self._watchers.get(incarnation.job)
        if watcher is not None:
            watcher.look(view)

    def _tell(self, alert: Alert) -> None:
        self._publish("alert", document(alert).model_dump(), job=alert.job)
