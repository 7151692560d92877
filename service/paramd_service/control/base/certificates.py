"""Certificates of one incarnation for its control plane and its clients."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from paramd.clock import since_boot_s
from paramd.security.tls import Pems

if TYPE_CHECKING:
    from paramd.security.authority import JobAuthority

CLIENT_RENEWED_AT = 0.5
"""Part of its validity after which a client's certificate is issued again."""
MAX_CLIENTS = 1024
"""Most clients' certificates kept; past the cap, the oldest is issued again when next needed."""


class JobCertificates:
    """Issues certificates when they are first needed, and again in time. Event loop only."""

    def __init__(
        self,
        private_key: bytes,
        *,
        job: str,
        incarnation: int,
        clock: Callable[[], float] = since_boot_s,
    ) -> None:
        """No I/O. Cheap: most jobs have one host and need no certificate."""
        self._private_key = private_key
        self._job, self._incarnation = job, incarnation
        self._clock = clock
        self._made: JobAuthority | None = None
        self._kept: OrderedDict[str, tuple[float, Pems]] = OrderedDict()

    @property
    def authority(self) -> JobAuthority:
        if self._made is None:
            # Imported only if the job has a CA: it is slow to load.
            from paramd.security.authority import JobAuthority

            self._made = JobAuthority(
                self._private_key, job=self._job, incarnation=self._incarnation
            )
        return self._made

    def own(self) -> Pems:
        """The certificate with which the control plane calls sidecars."""
        return self._of("", "paramd control plane")

    def served(self, names: Sequence[str]) -> Pems:
        """The certificate that the control plane serves, for the `names` that others connect to."""
        return self.authority.issue("paramd control plane", names)

    def client(self, token_id: str | None) -> Pems:
        """The certificate for clients with this token; None is the owner's."""
        return self._of(f"client {token_id or ''}", f"paramd client {token_id or ''}".strip())

    def _of(self, key: str, name: str) -> Pems:
        from paramd.security.authority import CLIENT_S

        now_s = self._clock()
        renew_s, pems = self._kept.get(key, (0.0, None))
        if pems is None or now_s >= renew_s:
            pems = self.authority.issue(name, lifetime_s=CLIENT_S)
            self._kept[key] = (now_s + CLIENT_RENEWED_AT * CLIENT_S, pems)
            if len(self._kept) > MAX_CLIENTS:
                self._kept.popitem(last=False)
        return pems
