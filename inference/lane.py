"""The lane: bounded Redis lists between callers and model workers. What both sides agree on: keys, messages, scripts.

    m:index                      sorted set of <kind>:<model>, by first registration
    m:<kind>:<model>:spec        ModelSpec. Lives until the last worker stops cleanly
                    :identity    hash of what decides about vectors: two workers of one model have to agree on it
                    :seen        expires FORGET_SECONDS after the last heartbeat of any worker; then the model counts as unknown
                    :workers     set of instance names
                    :starts      how many there have been
                    :alive:<i>   heartbeat of instance i, TTL BEAT_TTL: state, progress, counters, and the requests it holds
                    :online      tickets of requests that wait, the list is the bounded queue
                    :bulk        likewise, of bulk work
    j:<request>                  the job, until a worker takes it or its caller's time is up
    r:<request>                  the reply, a list of one; expires after REPLY_SECONDS, or a second after its caller's time is up

A ticket is a deadline and a time of admission (13 digits each, milliseconds of Redis' own clock, so that the clocks of callers and
workers do not matter) and a request id of 32 hex digits. Jobs lie beside the list: a caller asks several times where its ticket is, and
a job may be megabytes.

A full list refuses, a caller that gives up removes its own ticket, and a list without traffic expires with its last deadline: there is no
counter, so nothing can leak. A request is run at most once. Whether a request that left the list is still in anybody's hands is seen in the
heartbeats, which name what each instance holds.
"""
from __future__ import annotations

import hashlib
import socket
import time
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from . import messages
from .errors import Away, ConfigError
from .wire import Kind, Lane, ModelSpec, State

INDEX = "m:index"
LISTS: dict[Lane, str] = {"interactive": "online", "bulk": "bulk"}

BEAT_SECONDS = 1.0
BEAT_TTL = 3.0
FORGET_SECONDS = 600
REPLY_SECONDS = 30
SLICE_SECONDS = 0.5               # a waiting caller looks this often whether anybody still works for it
SOCKET_SECONDS = 5.0              # far above SLICE_SECONDS: redis-py would otherwise take a quiet BLPOP for a dead connection
LEAST_VERSION = 7

STOPPING = "The server is shutting down. Please try again later."
REFUSALS = ("MISCONF ", "MASTERDOWN ", "NOREPLICAS ")      # of a Redis that may be well again in a while; redis-py has classes for others
SAME_MODEL = ("weights_hash", "dims", "max_length", "pooling", "normalize", "multi_vector", "scoring")

ADMIT = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
local depth, timeout = tonumber(ARGV[1]), tonumber(ARGV[2])
local length = redis.call('LLEN', KEYS[1])
while length >= depth do
  local head = redis.call('LINDEX', KEYS[1], 0)
  if not head or tonumber(string.sub(head, 1, 13)) > now then break end
  redis.call('LPOP', KEYS[1])
  length = length - 1
end
if length >= depth then
  redis.call('RPUSH', KEYS[3], '')
  redis.call('PEXPIRE', KEYS[3], 1000)
  return 0
end
redis.call('SET', KEYS[2], ARGV[4], 'PX', timeout)
redis.call('RPUSH', KEYS[1], string.format('%013d%013d', now + timeout, now) .. ARGV[3])
if redis.call('PTTL', KEYS[1]) < timeout then redis.call('PEXPIRE', KEYS[1], timeout) end
return now
"""
"""KEYS: list, job, reply. ARGV: depth, timeout in ms, id, job. The time of admission in ms, or 0: full, and an empty reply says so to the
caller, who waits for one already. Tickets past their deadline make room."""

TAKE = """
local jobs = {}
for i, key in ipairs(KEYS) do jobs[i] = redis.call('GETDEL', key) end
return jobs
"""
"""KEYS: jobs. What they hold, which is nothing where their time is up."""

WITHDRAW = """
if redis.call('LREM', KEYS[1], 1, ARGV[1]) == 0 then return 0 end
return redis.call('DEL', KEYS[2])
"""
"""KEYS: list, job. ARGV: ticket. Whether it was there."""

LOOK = """
local base, alive = ARGV[1], 0
for _, worker in ipairs(redis.call('SMEMBERS', base .. ':workers')) do
  local beat = redis.call('GET', base .. ':alive:' .. worker)
  if beat then
    if string.find(beat, ARGV[2], 1, true) then return {worker, 1, 0} end
    alive = 1
  end
end
return {'', alive, redis.call('LPOS', KEYS[1], ARGV[3]) and 1 or 0}
"""
"""KEYS: list. ARGV: base, request id, ticket. Who holds the request, whether any worker lives, whether the ticket is still in the list."""

SNAPSHOT = """
local found = {}
for _, name in ipairs(redis.call('ZRANGE', KEYS[1], 0, -1)) do
  local base = 'm:' .. name
  local spec = redis.call('GET', base .. ':spec')
  if spec and redis.call('EXISTS', base .. ':seen') == 1 then
    local beats = {}
    for _, worker in ipairs(redis.call('SMEMBERS', base .. ':workers')) do
      local beat = redis.call('GET', base .. ':alive:' .. worker)
      if beat then beats[#beats + 1] = beat end
    end
    found[#found + 1] = {name, spec, redis.call('LLEN', base .. ':online'), redis.call('LLEN', base .. ':bulk'), beats}
  end
end
return found
"""
"""KEYS: index. Every known model: name, spec, lengths of the lists, heartbeats."""

BEAT = """
local name, me, identity = ARGV[1], ARGV[2], ARGV[3]
local base = 'm:' .. name
local others = false
for _, worker in ipairs(redis.call('SMEMBERS', base .. ':workers')) do
  if worker ~= me then
    if redis.call('EXISTS', base .. ':alive:' .. worker) == 1 then others = true
    else redis.call('SREM', base .. ':workers', worker) end
  end
end
if others and redis.call('GET', base .. ':identity') ~= identity then return 0 end
redis.call('SET', base .. ':identity', identity)
redis.call('SET', base .. ':spec', ARGV[4])
redis.call('SET', base .. ':seen', 1, 'EX', ARGV[7])
redis.call('SADD', base .. ':workers', me)
redis.call('SET', base .. ':alive:' .. me, ARGV[5], 'PX', ARGV[6])
local time = redis.call('TIME')
redis.call('ZADD', KEYS[1], 'NX', time[1], name)
return time[1] * 1000 + math.floor(time[2] / 1000)
"""
"""KEYS: index. ARGV: name, instance, identity, spec, heartbeat, its TTL in ms, FORGET_SECONDS. Redis' time in ms; 0: other workers serve
another model under this name."""

REFUSE = """
local base = 'm:' .. ARGV[1]
for _, worker in ipairs(redis.call('SMEMBERS', base .. ':workers')) do
  if worker ~= ARGV[2] and redis.call('EXISTS', base .. ':alive:' .. worker) == 1 then return {} end
end
local waiting = {}
for _, list in ipairs(KEYS) do
  for _, ticket in ipairs(redis.call('LRANGE', list, 0, -1)) do
    waiting[#waiting + 1] = ticket
    redis.call('DEL', 'j:' .. string.sub(ticket, 27))
  end
  redis.call('DEL', list)
end
return waiting
"""
"""KEYS: lists. ARGV: name, instance. All tickets that wait, taken off the lists, unless another instance is there to serve them."""

RETIRE = """
local name, me = ARGV[1], ARGV[2]
local base = 'm:' .. name
redis.call('SREM', base .. ':workers', me)
redis.call('DEL', base .. ':alive:' .. me)
for _, worker in ipairs(redis.call('SMEMBERS', base .. ':workers')) do
  if redis.call('EXISTS', base .. ':alive:' .. worker) == 1 then return 0 end
end
redis.call('DEL', base .. ':spec', base .. ':identity', base .. ':seen', base .. ':workers', base .. ':starts')
redis.call('ZREM', KEYS[1], name)
return 1
"""
"""KEYS: index. ARGV: name, instance. 1: that was the last instance, and nobody knows the model any more."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a model's keys are."""

    kind: Kind
    model: str

    @property
    def name(self) -> str:
        return f"{self.kind}:{self.model}"

    @property
    def base(self) -> str:
        return f"m:{self.name}"

    def list(self, lane: Lane) -> str:
        return f"{self.base}:{LISTS[lane]}"


@dataclass(frozen=True, slots=True)
class Beat:
    """What an instance says of itself each second. `stalled`: seconds without progress on the work in its hands."""

    instance: str
    state: State = "loading"
    stalled: float = 0.0
    counters: Mapping[str, float] = field(default_factory=dict)
    holds: tuple[str, ...] = ()               # ids of the requests in its hands

    def pack(self) -> bytes:
        return messages.pack({"instance": self.instance, "state": self.state, "stalled": self.stalled, "counters": dict(self.counters),
                              "holds": self.holds})

    @classmethod
    def unpack(cls, data: bytes) -> Beat:
        return cls(**messages.unpack(data))


@dataclass(frozen=True, slots=True)
class Registered:
    """A model as the registry knows it."""

    address: Address
    spec: ModelSpec
    waiting: Mapping[Lane, int]
    beats: tuple[Beat, ...]


@dataclass(frozen=True, slots=True)
class Ticket:
    """A request that waits or is run; times in ms of Redis' clock."""

    deadline: int
    admitted: int
    id: str

    @property
    def job(self) -> str:
        return f"j:{self.id}"

    @property
    def reply(self) -> str:
        return f"r:{self.id}"

    def pack(self) -> bytes:
        return b"%013d%013d%s" % (self.deadline, self.admitted, self.id.encode())

    @classmethod
    def unpack(cls, data: bytes) -> Ticket:
        return cls(int(data[:13]), int(data[13:26]), data[26:58].decode("ascii"))


class Broker:
    """The commands of both sides over one Redis. Raises Away where Redis does not answer or cannot take it."""

    def __init__(self, url: str) -> None:
        # One attempt each: an admission that is repeated blindly could run twice. A connection that Redis closed while it lay in the pool
        # is noticed when it is taken out, for which this protocol version is needed (redis-py 8.1 skips the check with RESP3).
        network: dict[str, Any] = {} if url.startswith("unix:") else {"socket_connect_timeout": 2, "socket_keepalive": True}
        self.redis = cast(Any, redis.Redis).from_url(
            url, socket_timeout=SOCKET_SECONDS, protocol=2, retry=Retry(NoBackoff(), 0), **network)
        self.shown = _without_secrets(self.redis)
        self._scripts = {script: self.redis.register_script(script)
                         for script in (ADMIT, TAKE, WITHDRAW, LOOK, SNAPSHOT, BEAT, REFUSE, RETIRE)}

    def check(self) -> None:
        """Raises ConfigError where this Redis cannot do, Away where it does not answer."""
        version = self._do(lambda: self.redis.info("server"))["redis_version"]
        if int(version.partition(".")[0]) < LEAST_VERSION:
            raise ConfigError(f"Redis at {self.shown} has version {version}; {LEAST_VERSION} or newer is needed", param="MLXCEL_REDIS_URL")

    # ---- callers

    def snapshot(self) -> list[Registered]:
        found = []
        for name, spec, online, bulk, beats in self._run(SNAPSHOT, [INDEX]):
            kind, _, model = name.decode().partition(":")
            found.append(Registered(Address(kind, model), messages.unpack_spec(spec), {"interactive": online, "bulk": bulk},
                                    tuple(sorted((Beat.unpack(beat) for beat in beats), key=lambda beat: beat.instance))))
        return found

    def admit(self, address: Address, lane: Lane, job: bytes, timeout: float, depth: int, wait: float = SLICE_SECONDS,
              ) -> tuple[Ticket, bytes | None] | None:
        """Puts a request on the list and waits for its reply, mostly all there is to a request, in one exchange. None: the list is full.
        Raises Interrupted where the connection breaks while it waits."""
        id, milliseconds = uuid.uuid4().hex, max(int(timeout * 1000), 1)
        ticket = Ticket(0, 0, id)
        admission = ("EVALSHA", self._scripts[ADMIT].sha, 3, address.list(lane), ticket.job, ticket.reply, depth, milliseconds, id, job)
        with self._connection() as connection:
            connection.send_packed_command(connection.pack_commands([admission, _wait_for(ticket, min(timeout, wait))]))
            try:
                now = connection.read_response()
            except redis.exceptions.NoScriptError:                   # a Redis that was restarted: nothing has been admitted
                connection.disconnect()
                self.redis.script_load(ADMIT)
                return self.admit(address, lane, job, timeout, depth, wait)
            ticket = Ticket(now + milliseconds, now, id)
            try:
                found = connection.read_response()
            except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
                raise Interrupted(ticket) from error
        return (ticket, found and found[1]) if now else None

    def reply(self, ticket: Ticket, timeout: float) -> bytes | None:
        """Waits for at most `timeout` seconds, but never longer than a slice."""
        found = self._do(lambda: self.redis.execute_command(*_wait_for(ticket, min(timeout, SLICE_SECONDS))))
        return found and found[1]

    def full(self, address: Address, lane: Lane, depth: int) -> bool:
        return bool(self._do(lambda: self.redis.llen(address.list(lane))) >= depth)

    def look(self, address: Address, lane: Lane, ticket: Ticket) -> tuple[str, bool, bool]:
        """(instance that holds the request or "", whether any instance lives, whether the request still waits)."""
        holder, alive, waits = self._run(LOOK, [address.list(lane)], address.base, ticket.id, ticket.pack())
        return holder.decode(), bool(alive), bool(waits)

    def withdraw(self, address: Address, lane: Lane, ticket: Ticket) -> bool:
        """Whether it still waited: then nobody will run it."""
        return bool(self._run(WITHDRAW, [address.list(lane), ticket.job], ticket.pack()))

    # ---- workers

    def starting(self, address: Address) -> int:
        """How often the model's workers were started before, since it last had none on purpose."""
        return int(self._do(lambda: self.redis.incr(f"{address.base}:starts"))) - 1

    def beat(self, address: Address, identity: str, spec: bytes, beat: Beat) -> int:
        """Redis' time in ms. Raises ConfigError where other instances serve another model under this name."""
        now = self._run(BEAT, [INDEX], address.name, beat.instance, identity, spec, beat.pack(), int(BEAT_TTL * 1000), FORGET_SECONDS)
        if not now:
            raise ConfigError(f"another model is served as {address.model} already, by other workers over Redis at {self.shown}: "
                              "weights, pooling, normalisation or length limit differ, so vectors of the two cannot be mixed. "
                              "Stop those first")
        return int(now)

    def take(self, address: Address, lane: Lane, count: int, timeout: float) -> list[tuple[Ticket, bytes]]:
        """Waits for up to `timeout` seconds; at most `count` requests, oldest first, with their jobs. A job is empty where its
        caller's time is up."""
        found = self._do(lambda: self.redis.blmpop(timeout, 1, address.list(lane), direction="LEFT", count=count))
        tickets = [Ticket.unpack(data) for data in found[1]] if found else []
        jobs = self._run(TAKE, [ticket.job for ticket in tickets]) if tickets else []
        return [(ticket, job or b"") for ticket, job in zip(tickets, jobs, strict=True)]

    def answer(self, ticket: Ticket, reply: bytes, seconds: float = REPLY_SECONDS) -> None:
        """The reply is kept for `seconds`, at most REPLY_SECONDS, for its caller to fetch."""
        milliseconds = int(min(seconds, REPLY_SECONDS) * 1000)
        with self._connection() as connection:
            connection.send_packed_command(connection.pack_commands(
                [("RPUSH", ticket.reply, reply), ("PEXPIRE", ticket.reply, milliseconds)]))
            connection.read_response()
            connection.read_response()

    def refuse(self, address: Address, instance: str) -> list[Ticket]:
        """Takes everything that waits, unless another instance is there to serve it."""
        lists = [address.list(lane) for lane in LISTS]
        return [Ticket.unpack(data) for data in self._run(REFUSE, lists, address.name, instance)]

    def retire(self, address: Address, instance: str) -> bool:
        """Whether it was the last instance."""
        return bool(self._run(RETIRE, [INDEX], address.name, instance))

    def close(self) -> None:
        self.redis.close()

    def _run(self, script: str, keys: list[str], *values: Any) -> Any:
        return self._do(lambda: self._scripts[script](keys=keys, args=values))

    def _do(self, command: Any) -> Any:
        with self._told():
            return command()

    @contextmanager
    def _connection(self) -> Iterator[Any]:
        """For several commands in one write. After an error it is closed, for what may still come over it."""
        pool = self.redis.connection_pool
        with self._told():
            connection = pool.get_connection()
            try:
                yield connection
            except BaseException:
                connection.disconnect()
                raise
            finally:
                pool.release(connection)

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except (redis.ConnectionError, redis.TimeoutError, OSError) as error:
            raise Unreachable(f"Redis at {self.shown} cannot be reached: {error}") from error
        except redis.ResponseError as error:
            if not isinstance(error, redis.OutOfMemoryError | redis.ReadOnlyError) and not str(error).startswith(REFUSALS):
                raise
            raise Away(f"Redis at {self.shown} refuses: {error}") from error


class Unreachable(Away):
    """Redis does not answer, or the connection broke."""


class Interrupted(Unreachable):
    """The connection broke after a request was admitted."""

    def __init__(self, ticket: Ticket) -> None:
        super().__init__("the connection to Redis broke")
        self.ticket = ticket


class Clock:
    """Redis' clock, from the last time it was told."""

    def __init__(self) -> None:
        self._offset = 0.0

    def set(self, milliseconds: int, asked: float) -> None:
        """`asked`: time.monotonic() when the question was sent."""
        self._offset = milliseconds - (asked + time.monotonic()) / 2 * 1000

    def now(self) -> float:
        return time.monotonic() * 1000 + self._offset


def _wait_for(ticket: Ticket, timeout: float) -> tuple[str, str, float]:
    return "BLPOP", ticket.reply, max(timeout, 0.001)      # 0 would be for ever


def identity(spec: ModelSpec) -> str:
    """Equal for workers whose vectors may be mixed."""
    return hashlib.sha256(repr([getattr(spec, name) for name in SAME_MODEL]).encode()).hexdigest()


def instance_name() -> str:
    return f"{socket.gethostname()}:{uuid.uuid4().hex[:8]}"


def _without_secrets(client: Any) -> str:
    where = client.connection_pool.connection_kwargs
    return str(where.get("path") or f"{where.get('host', 'localhost')}:{where.get('port', 6379)}/{where.get('db', 0)}")
