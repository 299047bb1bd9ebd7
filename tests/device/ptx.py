"""Runs PTX without a GPU: a CTA at a time, its threads in lock step, every access to memory checked.

`Program(ptx).run(grid, arguments, blocks, shared)` does what a launch does to the tensors that the arguments point to.
What no kernel of ours may do is a `Fault`: an access outside the arguments' storages or of the wrong alignment, threads
that part at a branch or a barrier, a shared or global location that two threads touch, one of them writing, with no
barrier between. Registers and shared memory that nothing was written to hold NaN.
Not seen: races between CTAs, what ptxas makes of the PTX, the last digits of approximations, time.
"""

import functools
import itertools
import re
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from tests.device import instructions
from tests.device.instructions import BITS, WARP, width_of
from tests.device.memory import Fault, process_memory, shared_memory

# What all threads of a CTA do at once.
TOGETHER = {
    "bra",
    "ret",
    "bar",
    "shfl",
    "redux",
    "ldmatrix",
    "stmatrix",
}
LONGEST = 3_000_000  # instructions of a CTA


class Instruction(NamedTuple):
    """`@guard name.word.word operand, operand`."""

    text: str
    guard: str
    negated: bool
    name: str
    words: tuple[str, ...]
    operands: tuple[str, ...]


# --------------------------------------------------------------------------- the text

STATEMENT = re.compile(r"(?:@(!?)(%p\d+)\s+)?([\w.]+)\s*(.*)")
OPERAND = re.compile(r"\{[^}]*\}|\[[^\]]*\]|[^,\s]+")


def _instruction(text: str) -> Instruction:
    negated, guard, name, rest = STATEMENT.fullmatch(text).groups()
    name, *words = name.split(".")
    operands = tuple(OPERAND.findall(rest))
    return Instruction(text, guard or "", negated == "!", name, tuple(words), operands)


def _statements(body: str) -> Iterable[str]:
    for line in re.sub(r"//.*", "", body).splitlines():
        if line.strip().endswith(":"):
            yield line.strip()
        for statement in line.split(";")[:-1]:  # braces around a statement are a scope of names
            yield statement.strip().removeprefix("{").strip()


class Program:
    """The one kernel of a module in PTX."""

    def __init__(self, ptx: str):
        head, body = ptx.split(".entry ", 1)[1].split("\n{\n", 1)
        self.name = head.split("(")[0]
        self.parameters = re.findall(r"\.param \.(\w+)(?: \.ptr \.global \.align \d+)? (\w+)", head)
        self.threads = int(re.search(r"\.reqntid (\d+)", head)[1])
        self.code, self.labels = [], {}
        for statement in _statements(body):
            if statement.endswith(":"):
                self.labels[statement[:-1]] = len(self.code)
            elif not statement.startswith("."):
                self.code.append(_instruction(statement))

    def run(self, grid, arguments, blocks, shared, chosen=None):
        """Execute the CTAs of a grid, or those `chosen` as triples, one after the other.

        `arguments` that are missing at the end are 0; only `blocks` may be touched. Raises Fault where a GPU would
        stop or go wrong in silence, and Unknown for an instruction that is not implemented here.
        """
        missing = len(self.parameters) - len(arguments)
        values = [*arguments, *[0] * missing]
        constants = {}
        for (kind, name), value in zip(self.parameters, values, strict=True):
            constants[name] = _bits(value, kind)
        blocks = sorted(set(blocks))
        for at in itertools.product(*map(range, grid)) if chosen is None else chosen:
            CTA(self, grid, at, constants, blocks, shared).run()


def _bits(value, kind: str):
    """A number as the bits of a type."""
    if kind[0] == "f":
        return instructions.write(np.array(value), kind, width_of(kind))[()]
    return BITS[width_of(kind)](value % (1 << width_of(kind)))


@functools.cache
def _immediate(text: str, kind: str):
    """0f3F800000, 0d…, 0x3340U, -8388608 as the bits of a type."""
    width = width_of(kind)
    if kind == "pred":
        return np.bool_(int(text))
    if text[:2] in ("0f", "0d"):
        return BITS[width](int(text[2:], 16))
    return BITS[width](int(text.removesuffix("U"), 0) % (1 << width))


# --------------------------------------------------------------------------- a CTA


def _list(operand: str) -> list[str]:
    """`{%r1, %r2}` or `%r1`."""
    return re.findall(r"[%\w.]+", operand)


def _register_width(name: str, kind: str) -> int:
    widths = {"%p": 1, "%rs": 16, "%r": 32, "%rd": 64}
    # A name of a scope has the width of what it gets.
    return widths.get(name.rstrip("0123456789"), width_of(kind))


class CTA:
    """One program of a grid: its registers and memories."""

    def __init__(self, program: Program, grid, at, constants, blocks, shared: int):
        self.program, self.at, self.constants = program, at, constants
        self.threads = program.threads
        self.all = np.ones(self.threads, bool)
        self.thread = np.arange(self.threads)
        self.memories = {"global": process_memory(blocks), "shared": shared_memory(shared)}
        self.registers = {
            "%tid.x": self.thread.astype(np.uint32),
            "global_smem": np.zeros(self.threads, np.uint64),
        }
        for axis, place, size in zip("xyz", at, grid, strict=True):
            self.registers[f"%ctaid.{axis}"] = np.full(self.threads, place, np.uint32)
            self.registers[f"%nctaid.{axis}"] = np.full(self.threads, size, np.uint32)

    def run(self):
        line = count = 0
        with np.errstate(all="ignore"):
            while line is not None:
                step = self.program.code[line]
                try:
                    line = self.execute(step, line)
                except Fault as fault:
                    raise Fault(
                        f"{self.program.name}, program {self.at}: {step.text}: {fault}"
                    ) from None
                count += 1
                if count > LONGEST:
                    raise Fault(
                        f"{self.program.name}, program {self.at}: more than {LONGEST:,} instructions"
                    )

    def execute(self, step: Instruction, line: int) -> int | None:
        """Do one instruction; return the number of the next one, None at the end."""
        on = self.all
        if step.guard:
            on = self.registers[step.guard] != step.negated
            if not on.any():
                return line + 1
            if on.all():
                on = self.all
            elif step.name in TOGETHER:
                raise Fault("threads part here")
        if step.name == "bra":
            return self.program.labels[step.operands[0]]
        if step.name in ("ret", "bar"):
            self.barrier()
            return None if step.name == "ret" else line + 1
        method = self.SPECIAL.get(step.name, CTA.compute)
        method(self, step, on)
        return line + 1

    def barrier(self):
        for memory in self.memories.values():
            memory.check_races()
            memory.forget()

    # registers

    def get(self, operand: str, kind: str):
        """The numbers of a register, (threads,), or of an immediate."""
        bits = self.registers.get(operand)
        if bits is None:
            bits = _immediate(operand, kind)
        return instructions.read(bits, kind)

    def put(self, operand: str, values, kind: str, on):
        """Numbers, (threads,), into a register, where `on`."""
        if operand == "_":
            return
        bits = instructions.write(values, kind, _register_width(operand, kind))
        if bits.shape != self.all.shape:
            bits = np.full(self.threads, bits)
        if on is not self.all:
            untouched = np.full(self.threads, -1).astype(bits.dtype)
            bits = np.where(on, bits, self.registers.get(operand, untouched))
        self.registers[operand] = bits

    def compute(self, step: Instruction, on):
        result, *operands = step.operands
        planned = _plan(step)
        numbers = []
        for operand, kind in zip(operands, planned.operands, strict=True):
            numbers.append(self.get(operand, kind))
        self.put(result, planned.function(*numbers), planned.result, on)

    def move(self, step: Instruction, on):
        """One register into another, into several, or several into one."""
        into, source = step.operands
        kind = step.words[0]
        parts = _list(into), _list(source)
        width = width_of(kind) // max(map(len, parts))
        if len(parts[0]) > 1:
            whole = self.get(source, kind)
            for i, part in enumerate(parts[0]):
                self.put(part, whole >> whole.dtype.type(i * width), f"b{width}", on)
        elif len(parts[1]) > 1:
            whole = 0
            for i, part in enumerate(parts[1]):
                bits = self.get(part, f"b{width}").astype(BITS[width_of(kind)])
                whole = whole | bits << bits.dtype.type(i * width)
            self.put(into, whole, kind, on)
        else:
            self.put(into, self.get(source, kind), kind, on)

    # memory

    def addresses(self, operand: str, on):
        base, *offset = re.findall(r"-?[%\w.]+", operand)
        kind = "u64" if base.startswith("%rd") else "u32"
        at = self.get(base, kind).astype(np.int64)[on]
        return at + sum(map(int, offset))

    def access(self, step: Instruction, on):
        """(memory, width, address of each part of a vector, names of its registers)"""
        space, *_, kind = step.words
        registers = 0 if step.name == "ld" else 1
        names = _list(step.operands[registers])
        at = self.addresses(step.operands[1 - registers], on)
        memory, size = self.memories[space], width_of(kind) // 8
        memory.touch(at, self.thread[on], size * len(names), writes=step.name == "st")
        parts = [at + i * size for i in range(len(names))]
        return memory, width_of(kind), parts, names

    def load(self, step: Instruction, on):
        kind = step.words[-1]
        if step.words[0] == "param":
            value = self.constants[step.operands[1].strip("[]")]
            self.put(step.operands[0], instructions.read(value, kind), kind, on)
            return
        memory, width, parts, names = self.access(step, on)
        for at, name in zip(parts, names, strict=True):
            bits = np.zeros(self.threads, BITS[width])
            bits[on] = memory.load(at, width)
            self.put(name, bits, kind, on)

    def store(self, step: Instruction, on):
        memory, width, parts, names = self.access(step, on)
        for at, name in zip(parts, names, strict=True):
            bits = np.broadcast_to(self.get(name, f"b{width}"), self.threads)
            memory.store(at, width, bits[on])

    def matrix(self, step: Instruction, on):
        """ldmatrix and stmatrix: of each 8 x 8 matrix of 16 bits, row i begins at the address that thread i has.

        A thread has two neighbours of a row, or of a column where they are transposed.
        """
        loads = step.name == "ldmatrix"
        names, rows = step.operands if loads else reversed(step.operands)
        rows, memory = self.addresses(rows, on), self.memories["shared"]
        lane = self.thread % WARP
        for i, name in enumerate(_list(names)):
            both = self.get(name, "b32") if not loads else np.zeros(self.threads, np.uint32)
            for half in range(2):
                row, column = lane // 4, lane % 4 * 2 + half
                if "trans" in step.words:
                    row, column = column, row
                at = rows[self.thread - lane + 8 * i + row] + 2 * column
                memory.touch(at, self.thread, 2, writes=not loads)
                if loads:
                    both |= memory.load(at, 16).astype(np.uint32) << np.uint32(16 * half)
                else:
                    memory.store(at, 16, (both >> np.uint32(16 * half)).astype(np.uint16))
            if loads:
                self.put(name, both, "b32", on)

    # warps

    def shuffle(self, step: Instruction, on):
        result, source, distance, *_ = step.operands
        sources = instructions.warp_sources(step.words[1], self.threads, int(distance))
        values = np.broadcast_to(self.get(source, "b32"), self.threads)
        self.put(result, values[sources], "b32", on)

    def reduce(self, step: Instruction, on):
        _, how, kind = step.words
        values = self.get(step.operands[1], kind)
        self.put(step.operands[0], instructions.reduce_warps(how, values), kind, on)

    SPECIAL = {
        "ld": load,
        "st": store,
        "mov": move,
        "shfl": shuffle,
        "redux": reduce,
        "ldmatrix": matrix,
        "stmatrix": matrix,
    }


@functools.cache
def _plan(step: Instruction) -> instructions.Plan:
    return instructions.plan(step.name, step.words, len(step.operands) - 1)
