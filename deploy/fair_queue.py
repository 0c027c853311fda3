"""Whose request goes next when replicas are full: a share of the work to each tenant, whatever it asks for.

Start-time fair queueing: a tenant's clock runs on by the tokens that its requests make replicas compute (prompt tokens
that were not cached, and new ones), and the waiting tenant whose clock is least goes next. Requests of one tenant keep
their order. A tenant that was away does not save up: its clock is set to that of the one served last.
"""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from chunkserve.replica.protocol import ReplicaOverloaded

_MAX_TENANTS = 1024


class QueueFull(ReplicaOverloaded):
    """As many requests wait for a turn as may."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TenantShare:
    """What a tenant got: tokens computed for it, and how many fewer by its clock than for the one that leads."""

    served_tokens: int
    deficit_tokens: float


@dataclass(slots=True, eq=False)
class _Waiting:
    sequences: int
    tokens: int
    turn: "asyncio.Future[None]"


@dataclass(slots=True)
class _Tenant:
    clock: float
    waiting: deque[_Waiting] = field(default_factory=deque)
    in_flight: int = 0
    served_tokens: int = 0

    @property
    def is_idle(self) -> bool:
        return not self.waiting and not self.in_flight


@dataclass(slots=True)
class Turn:
    """A request that replicas work on; `tokens` is what it is charged, corrected by whoever knows better."""

    tokens: int


class FairQueue:
    """Requests on their way to replicas. Not for several event loops.

    Args:
        capacity: sequences that may be with replicas at once; one request may exceed it alone.
        max_waiting: requests that wait for that. Once so many do, a newcomer is refused, unless its tenant has fewer
            waiting than another: then the last one of the tenant with the most is.
    """

    def __init__(self, capacity: int, max_waiting: int) -> None:
        self.capacity = capacity
        self.max_waiting = max_waiting
        self.in_flight = 0
        self.num_waiting = 0
        self._clock = 0.0
        self._tenants: dict[str, _Tenant] = {}

    @asynccontextmanager
    async def turn(self, tenant_name: str, *, sequences: int, tokens: int) -> AsyncGenerator[Turn, None]:
        """Wait until replicas may have the request; it counts as theirs until the block ends.

        Args:
            tenant_name: who pays.
            sequences: choices of the request.
            tokens: that it will probably make replicas compute.
        Raises:
            QueueFull: too many wait already.
        """
        if self.num_waiting or not self._fits(sequences):
            self._make_room(tenant_name)
        tenant = self._tenants.get(tenant_name)
        if tenant is None:
            self._forget_idle()
            tenant = self._tenants[tenant_name] = _Tenant(clock=self._clock)
        elif tenant.is_idle:
            tenant.clock = max(tenant.clock, self._clock)
        waiting = _Waiting(sequences=sequences, tokens=tokens, turn=asyncio.get_running_loop().create_future())
        tenant.waiting.append(waiting)
        self.num_waiting += 1
        self._dispatch()
        try:
            await waiting.turn
        except asyncio.CancelledError:
            if waiting in tenant.waiting:
                tenant.waiting.remove(waiting)
                self.num_waiting -= 1
                self._dispatch()
            elif not waiting.turn.cancelled() and waiting.turn.exception() is None:
                # Its turn came in the same moment.
                self._leave(tenant, waiting, 0)
            raise
        turn = Turn(tokens)
        try:
            yield turn
        finally:
            self._leave(tenant, waiting, turn.tokens)

    def shares(self) -> dict[str, TenantShare]:
        """By tenant; idle ones are forgotten once there are many."""
        lead = max((tenant.clock for tenant in self._tenants.values()), default=0.0)
        return {
            name: TenantShare(served_tokens=tenant.served_tokens, deficit_tokens=lead - tenant.clock)
            for name, tenant in self._tenants.items()
        }

    def _fits(self, sequences: int) -> bool:
        return self.in_flight == 0 or self.in_flight + sequences <= self.capacity

    def _make_room(self, newcomer: str) -> None:
        if self.num_waiting < self.max_waiting:
            return
        message = f"{self.num_waiting} requests wait for a replica; at most {self.max_waiting} (max_waiting_requests)"
        own = len(self._tenants[newcomer].waiting) if newcomer in self._tenants else 0
        most = max(self._tenants.values(), key=lambda tenant: len(tenant.waiting), default=None)
        if most is None or len(most.waiting) <= own + 1:
            raise QueueFull(message)
        last = most.waiting.pop()
        self.num_waiting -= 1
        if not last.turn.done():
            last.turn.set_exception(QueueFull(f"{message}, and this tenant has the most of them"))

    def _dispatch(self) -> None:
        while self.num_waiting:
            tenant = min((t for t in self._tenants.values() if t.waiting), key=lambda t: t.clock)
            waiting = tenant.waiting[0]
            if not waiting.turn.cancelled():
                if not self._fits(waiting.sequences):
                    return
                self._clock = max(self._clock, tenant.clock)
                tenant.clock += waiting.tokens
                tenant.in_flight += waiting.sequences
                self.in_flight += waiting.sequences
                waiting.turn.set_result(None)
            tenant.waiting.popleft()
            self.num_waiting -= 1

    def _forget_idle(self) -> None:
        """Forget what idle tenants owe once they are many; names may be as many as requests."""
        if len(self._tenants) >= _MAX_TENANTS:
            self._tenants = {name: tenant for name, tenant in self._tenants.items() if not tenant.is_idle}

    def _leave(self, tenant: _Tenant, waiting: _Waiting, tokens: int) -> None:
        tenant.clock += tokens - waiting.tokens
        tenant.served_tokens += tokens
        tenant.in_flight -= waiting.sequences
        self.in_flight -= waiting.sequences
        self._dispatch()
