"""What a rank tells about itself through shared memory: where it is, and which of its slots are whole.

One page for each rank, in its folder of the arena. It survives the rank, costs the rank a few stores a step,
and is read without disturbing it. All words are unsigned, of 64 bits, in the byte order of the machine. Each
has one writer: the rank, but for `FROZEN` and the slots' `WANTED`, which the guardian sets or clears.

A slot is whole if its sequence word is even and not 0, and stays what it was while the slot is read: the
rank makes it odd before it touches the slot, and even again when all bytes are there. Stores of one aligned
word are not torn. Between the bytes and the word that says so the rank takes a lock, which orders both.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path

from ds_toolkit.errors import ToolkitError
from ds_toolkit.guardian.pieces import PieceKind
from ds_toolkit.guardian.processes import start_ticks

CONTROL_NAME = "control"
MAX_SLOTS = 8
_MAGIC = int.from_bytes(b"DSTKCTL1", "little")
_WORD = struct.Struct("=Q")
_PAGE_BYTES = 4096
_FIRST_SLOT_WORD, _WORDS_PER_SLOT = 32, 8
_KINDS = tuple(PieceKind)


class Phase(IntEnum):
    """Where a rank is in its training loop.

    `DATA` is all that lies between two batches; `IDLE` is a loop that has ended, in `guard.close()`; `BUSY`
    is work that takes as long as it takes, by the program's own word.
    """

    ATTACHED = 0
    DATA = 1
    FORWARD = 2
    BACKWARD = 3
    STEP = 4
    PARKED = 5
    IDLE = 6
    SAVE = 7
    LOAD = 8
    EVALUATION = 9
    BUSY = 10
    UNKNOWN = 99

    @classmethod
    def _missing_(cls, value: object) -> Phase | None:
        # Of a newer version, that is; what is beyond was never a phase.
        return cls.UNKNOWN if isinstance(value, int) and value < cls.UNKNOWN else None


class Leaving(IntEnum):
    """Whether a rank is about to end, and why; what it waits for is the guardian's word."""

    NO = 0
    END = 1
    EXCEPTION = 2
    SIGNAL = 3
    GOODBYE = 4


class _Word(IntEnum):
    MAGIC = 0
    RANK = 1
    PID = 2
    START_TICKS = 3
    PHASE = 4
    STEP = 5
    MICRO_STEP = 6
    CHANGED_NS = 7
    LEAVING = 8
    FROZEN = 9
    NUM_SLOTS = 10
    # Absent from pages of earlier versions, where they are 0.
    STACKS_SIGNAL = 11
    STACKS_DESCRIPTOR = 12
    MAIN_THREAD = 13


class _SlotWord(IntEnum):
    SEQUENCE = 0
    STEP = 1
    KINDS = 2
    WANTED = 3


@dataclass(frozen=True)
class StacksOffer:
    """What a rank does to show where its threads are.

    Attributes:
        signal: at which it writes the stacks of all its threads.
        descriptor: of its own, to which it writes them.
        main_thread: identifier of its main thread, as it stands there.
    """

    signal: int
    descriptor: int
    main_thread: int


@dataclass(frozen=True)
class SlotState:
    """One look at a slot.

    Attributes:
        index: which of the rank's slots.
        sequence: odd while it is written, 0 before it is written for the first time.
        step: optimizer steps that it holds.
        kinds: what it holds.
        wanted: number of the save that it is kept for; 0 if it may be written over.
    """

    index: int
    sequence: int
    step: int
    kinds: frozenset[PieceKind]
    wanted: int

    @property
    def is_whole(self) -> bool:
        """Whether it could be read at that moment."""
        return self.sequence > 0 and self.sequence % 2 == 0


class ControlBlock:
    """The page of one rank, mapped into this process."""

    def __init__(self, folder: Path, *, writable: bool = True) -> None:
        """Map the page of the rank whose folder this is.

        Raises:
            ToolkitError: there is none, or it is none of ours.
        """
        path = folder / CONTROL_NAME
        flags = os.O_RDWR if writable else os.O_RDONLY
        try:
            descriptor = os.open(path, flags | os.O_CLOEXEC)
        except OSError as error:
            raise ToolkitError(
                "a rank's page of the arena cannot be read", where=path, why=error.strerror
            ) from error
        try:
            access = mmap.ACCESS_WRITE if writable else mmap.ACCESS_READ
            self._page = mmap.mmap(descriptor, _PAGE_BYTES, access=access)
        except (ValueError, OSError) as error:
            raise ToolkitError("a rank's page of the arena is cut short", where=path) from error
        finally:
            os.close(descriptor)
        if self._get(_Word.MAGIC) != _MAGIC:
            raise ToolkitError("a rank's page of the arena is of another version", where=path)

    @classmethod
    def create(cls, folder: Path, rank: int, num_slots: int) -> ControlBlock:
        """Make the page of the calling process, a rank with so many slots."""
        words = {
            _Word.RANK: rank,
            _Word.PID: os.getpid(),
            _Word.START_TICKS: start_ticks(os.getpid()) or 0,
            _Word.NUM_SLOTS: num_slots,
            _Word.MAGIC: _MAGIC,
        }
        page = bytearray(_PAGE_BYTES)
        for word, value in words.items():
            _WORD.pack_into(page, word * _WORD.size, value)
        partial = folder / f".{CONTROL_NAME}.partial"
        partial.write_bytes(page)
        partial.chmod(0o600)
        partial.replace(folder / CONTROL_NAME)
        return cls(folder)

    def close(self) -> None:
        """Unmap it."""
        self._page.close()

    @property
    def rank(self) -> int:
        """Global rank."""
        return self._get(_Word.RANK)

    @property
    def process(self) -> tuple[int, int]:
        """Process id, and when that process began (`start_ticks`): ids are used again."""
        return self._get(_Word.PID), self._get(_Word.START_TICKS)

    @property
    def phase(self) -> Phase:
        """Where the rank is."""
        return Phase(self._get(_Word.PHASE))

    @property
    def step(self) -> int:
        """Optimizer steps that the rank has done."""
        return self._get(_Word.STEP)

    @property
    def micro_step(self) -> int:
        """Micro-steps that the engine has done, all in all."""
        return self._get(_Word.MICRO_STEP)

    @property
    def changed_ns(self) -> int:
        """When the phase changed, by `time.monotonic_ns`, which all processes of a host share."""
        return self._get(_Word.CHANGED_NS)

    def enter(self, phase: Phase, step: int, micro_step: int, now_ns: int) -> None:
        """The rank's phase has changed."""
        self._set(_Word.STEP, step)
        self._set(_Word.MICRO_STEP, micro_step)
        self._set(_Word.PHASE, phase)
        self._set(_Word.CHANGED_NS, now_ns)

    @property
    def stacks(self) -> StacksOffer | None:
        """How to get the Python stacks of the rank; None if there is no way."""
        number = self._get(_Word.STACKS_SIGNAL)
        if not number:
            return None
        return StacksOffer(number, self._get(_Word.STACKS_DESCRIPTOR), self._get(_Word.MAIN_THREAD))

    @stacks.setter
    def stacks(self, offer: StacksOffer) -> None:
        self._set(_Word.STACKS_DESCRIPTOR, offer.descriptor)
        self._set(_Word.MAIN_THREAD, offer.main_thread)
        # Last: it says that the others are there.
        self._set(_Word.STACKS_SIGNAL, offer.signal)

    @property
    def leaving(self) -> Leaving:
        """Whether the rank is about to end."""
        return Leaving(self._get(_Word.LEAVING))

    @leaving.setter
    def leaving(self, leaving: Leaving) -> None:
        self._set(_Word.LEAVING, leaving)

    @property
    def frozen(self) -> bool:
        """Whether no slot may be written any more: the guardian has begun its last words."""
        return bool(self._get(_Word.FROZEN))

    def freeze(self) -> None:
        """Let the rank write no slot any more. What it has begun it ends."""
        self._set(_Word.FROZEN, 1)

    @property
    def num_slots(self) -> int:
        """How many slots the rank has."""
        return self._get(_Word.NUM_SLOTS)

    @num_slots.setter
    def num_slots(self, num_slots: int) -> None:
        self._set(_Word.NUM_SLOTS, num_slots)

    def slot(self, index: int) -> SlotState:
        """One look at a slot, which may be written over at any time: compare the sequence after reading."""
        sequence = self._get_slot(index, _SlotWord.SEQUENCE)
        mask = self._get_slot(index, _SlotWord.KINDS)
        return SlotState(
            index=index,
            sequence=sequence,
            step=self._get_slot(index, _SlotWord.STEP),
            kinds=frozenset(kind for bit, kind in enumerate(_KINDS) if mask >> bit & 1),
            wanted=self._get_slot(index, _SlotWord.WANTED),
        )

    def slots(self) -> list[SlotState]:
        """All of them."""
        return [self.slot(index) for index in range(self.num_slots)]

    def begin_slot(self, index: int, step: int, kinds: Iterable[PieceKind], wanted: int = 0) -> None:
        """A slot is written from now on."""
        sequence = self._get_slot(index, _SlotWord.SEQUENCE)
        self._set_slot(index, _SlotWord.SEQUENCE, sequence | 1)
        self._set_slot(index, _SlotWord.STEP, step)
        self._set_slot(index, _SlotWord.KINDS, sum(1 << _KINDS.index(kind) for kind in set(kinds)))
        self._set_slot(index, _SlotWord.WANTED, wanted)

    def end_slot(self, index: int) -> None:
        """It is whole."""
        self._set_slot(index, _SlotWord.SEQUENCE, self._get_slot(index, _SlotWord.SEQUENCE) + 1)

    def let_go(self, index: int) -> None:
        """A save that the slot was kept for is over."""
        self._set_slot(index, _SlotWord.WANTED, 0)

    def _get(self, word: int) -> int:
        value: int = _WORD.unpack_from(self._page, word * _WORD.size)[0]
        return value

    def _set(self, word: int, value: int) -> None:
        _WORD.pack_into(self._page, word * _WORD.size, value)

    def _get_slot(self, index: int, word: _SlotWord) -> int:
        return self._get(_FIRST_SLOT_WORD + index * _WORDS_PER_SLOT + word)

    def _set_slot(self, index: int, word: _SlotWord, value: int) -> None:
        self._set(_FIRST_SLOT_WORD + index * _WORDS_PER_SLOT + word, value)
