"""The vocabulary of pipeline schedules: actions, transfers, steps, the placement of stages on ranks, and the table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


class ScheduleError(ValueError):
    """A schedule that cannot be run; the message names the rank, the step and the action at fault."""


class Kind(StrEnum):
    """What a compute action does with one micro-batch on one stage."""

    FORWARD = "F"
    BACKWARD = "B"
    """The whole backward: gradients of the input and of the weights."""
    BACKWARD_INPUT = "I"
    """Only the gradient of the input; a `BACKWARD_WEIGHT` of the same micro-batch follows."""
    BACKWARD_WEIGHT = "W"


class Payload(StrEnum):
    """What travels between two neighbouring stages."""

    ACTIVATION = "activation"
    """A stage's output, on its way to the next stage."""
    GRADIENT = "gradient"
    """The gradient of a stage's input, on its way to the previous stage."""


@dataclass(frozen=True, slots=True)
class Action:
    """One unit of compute on one rank: `kind` of micro-batch `microbatch` on the rank's `chunk`-th stage."""

    kind: Kind
    microbatch: int
    chunk: int = 0

    @property
    def parts(self) -> tuple[Action, ...]:
        """The single action, as a `Pair` has two."""
        return (self,)

    def __str__(self) -> str:
        return f"{self.kind.value}{self.microbatch}" + (f".{self.chunk}" if self.chunk else "")


@dataclass(frozen=True, slots=True)
class Pair:
    """A forward and a backward that do not need each other, run as one, the forward first.

    Both inputs must be there before it starts, and both results leave when it has ended: what the step posts travels
    under both, what the halves make does not travel under either.
    """

    forward: Action
    backward: Action

    @property
    def parts(self) -> tuple[Action, ...]:
        """The forward, then the backward."""
        return (self.forward, self.backward)

    def __str__(self) -> str:
        return f"{self.forward}&{self.backward}"


Work = Action | Pair
"""What a rank computes in one step."""


@dataclass(frozen=True, slots=True)
class Message:
    """One tensor between stages, named by who produced it: the output, or input gradient, of a (stage, micro-batch)."""

    payload: Payload
    microbatch: int
    stage: int
    """The stage that produced the tensor, counted over the whole pipeline."""

    def __str__(self) -> str:
        return f"{self.payload.value} of micro-batch {self.microbatch} from stage {self.stage}"


@dataclass(frozen=True, slots=True)
class Transfer:
    """One end of a message's way between two ranks: `peer` is the other end, as an index into the pipeline's group."""

    message: Message
    peer: int


@dataclass(frozen=True, slots=True)
class Step:
    """One line of a rank's table: post all transfers as one batch, then run the compute while they are in flight.

    What is sent was produced by an earlier step. The compute first awaits the batches that bring its inputs, posted
    by this step or by earlier ones, and nothing else.
    """

    compute: Work | None = None
    sends: tuple[Transfer, ...] = ()
    recvs: tuple[Transfer, ...] = ()

    @property
    def parts(self) -> tuple[Action, ...]:
        """The actions of its compute: none, one, or the two of a pair."""
        return self.compute.parts if self.compute is not None else ()


@dataclass(frozen=True)
class Placement:
    """Which rank holds which stage; a rank's stages in ascending order are its chunks 0, 1, ..."""

    rank_of: tuple[int, ...]
    """Per stage, first to last, the rank that holds it."""

    @classmethod
    def looped(cls, ranks: int, chunks: int = 1) -> Placement:
        """Stage i on rank i mod `ranks`: the plain pipeline for one chunk, the interleaved one for more."""
        return cls(tuple(range(ranks)) * chunks)

    @classmethod
    def vee(cls, ranks: int) -> Placement:
        """Two stages a rank, down and up again: rank r holds r and 2·ranks−1−r, rank 0 the first and the last."""
        return cls((*range(ranks), *reversed(range(ranks))))

    @property
    def stages(self) -> int:
        """Number of stages over all ranks."""
        return len(self.rank_of)

    @cached_property
    def stages_of(self) -> tuple[tuple[int, ...], ...]:
        """Per rank, the stages that it holds, ascending: index = chunk."""
        held: list[list[int]] = [[] for _ in range(max(self.rank_of) + 1)]
        for stage, rank in enumerate(self.rank_of):
            held[rank].append(stage)
        return tuple(tuple(stages) for stages in held)

    @property
    def ranks(self) -> int:
        """Number of ranks in the pipeline."""
        return len(self.stages_of)

    def source(self, kind: Kind, microbatch: int, stage: int) -> Message | None:
        """The message that this action needs from another stage; None where it needs none."""
        if kind is Kind.FORWARD and stage > 0:
            return Message(Payload.ACTIVATION, microbatch, stage - 1)
        if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and stage < self.stages - 1:
            return Message(Payload.GRADIENT, microbatch, stage + 1)
        return None

    def product(self, kind: Kind, microbatch: int, stage: int) -> Message | None:
        """The message that this action makes for another stage; None where nobody waits for one."""
        if kind is Kind.FORWARD and stage < self.stages - 1:
            return Message(Payload.ACTIVATION, microbatch, stage)
        if kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT) and stage > 0:
            return Message(Payload.GRADIENT, microbatch, stage)
        return None

    def receiver(self, message: Message) -> int:
        """The rank that holds the stage for which `message` is meant."""
        return self.rank_of[message.stage + (1 if message.payload is Payload.ACTIVATION else -1)]


@dataclass(frozen=True)
class Table:
    """A whole schedule as data: for each rank of the pipeline its steps, in order."""

    placement: Placement
    microbatches: int
    steps: tuple[tuple[Step, ...], ...]

    def stage(self, rank: int, action: Action) -> int:
        """The stage, counted over the whole pipeline, on which `rank` runs `action`."""
        return self.placement.stages_of[rank][action.chunk]

    @cached_property
    def sent_at(self) -> dict[Message, int]:
        """The step in which its sender posts each message that travels."""
        return {transfer.message: index for steps in self.steps for index, step in enumerate(steps)
                for transfer in step.sends}

    @cached_property
    def used_at(self) -> dict[Message, int]:
        """The step in which each message is used by the rank that receives it."""
        used = {}
        for rank, steps in enumerate(self.steps):
            for index, step in enumerate(steps):
                for action in step.parts:
                    source = self.placement.source(action.kind, action.microbatch, self.stage(rank, action))
                    if source is not None:
                        used[source] = index
        return used
