"""Vector code in LLVM's terms: what a kernel does in its innermost loop is written here, lane by lane, and not left to a compiler's luck.

Every function made here is a numba intrinsic on addresses and counts. A last incomplete vector is loaded and stored under a mask,
and lanes are added up in one fixed order; so an element's result depends on the element, and a row's on the row, never on a
place in memory. NaN stays NaN.
"""
from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic

from .jit import FEATURES

if FEATURES.get("avx512f"):
    LANES, VECTORS, ROWS = 16, 2, 12                        # a tile of ROWS x (VECTORS * LANES) sums stays in registers
elif FEATURES.get("avx2") and FEATURES.get("fma"):
    LANES, VECTORS, ROWS = 8, 2, 6
elif FEATURES.get("neon"):
    LANES, VECTORS, ROWS = 4, 4, 6
else:
    LANES = VECTORS = ROWS = 0                              # no fused multiply-add: the plain numpy path is taken
WIDTH = VECTORS * LANES
BF16_DOT = bool(FEATURES.get("avx512bf16"))

F32, I1, I32, I64 = ir.FloatType(), ir.IntType(1), ir.IntType(32), ir.IntType(64)
VF, VI, VM = ir.VectorType(F32, LANES or 1), ir.VectorType(I32, LANES or 1), ir.VectorType(I1, LANES or 1)


class _BFloat(ir.Type):
    """llvmlite has no name for it."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


class Vector:
    """LANES f32 with operators; a Python number beside it stands in every lane."""

    def __init__(self, code: Code, value: ir.Value) -> None:
        self.code, self.value = code, value

    def _lift(self, other: Vector | float) -> ir.Value:
        return other.value if isinstance(other, Vector) else self.code.constant(other)

    def __add__(self, other: Vector | float) -> Vector:
        return Vector(self.code, self.code.b.fadd(self.value, self._lift(other)))

    def __sub__(self, other: Vector | float) -> Vector:
        return Vector(self.code, self.code.b.fsub(self.value, self._lift(other)))

    def __rsub__(self, other: float) -> Vector:
        return Vector(self.code, self.code.b.fsub(self._lift(other), self.value))

    def __mul__(self, other: Vector | float) -> Vector:
        return Vector(self.code, self.code.b.fmul(self.value, self._lift(other)))

    def __rtruediv__(self, other: float) -> Vector:
        return Vector(self.code, self.code.b.fdiv(self._lift(other), self.value))

    def __truediv__(self, other: Vector | float) -> Vector:
        return Vector(self.code, self.code.b.fdiv(self.value, self._lift(other)))

    __radd__, __rmul__ = __add__, __mul__

    def fma(self, factor: Vector | float, term: Vector | float) -> Vector:
        """self * factor + term, rounded once."""
        return Vector(self.code, self.code.call(f"llvm.fma.v{LANES}f32", VF, self.value, self._lift(factor), self._lift(term)))

    def at_least(self, bound: float) -> Vector:
        return self._unless("<", bound)

    def at_most(self, bound: float) -> Vector:
        return self._unless(">", bound)

    def _unless(self, relation: str, bound: float) -> Vector:
        limit = self.code.constant(bound)
        return Vector(self.code, self.code.b.select(self.code.b.fcmp_ordered(relation, self.value, limit), limit, self.value))

    def max(self, other: Vector) -> Vector:
        larger = self.code.b.fcmp_ordered(">", self.value, other.value)
        return Vector(self.code, self.code.b.select(larger, self.value, other.value))

    def abs(self) -> Vector:
        return Vector(self.code, self.code.call(f"llvm.fabs.v{LANES}f32", VF, self.value))


class Code:
    """The body of an intrinsic: an IR builder that knows this machine's vectors. Addresses are i64, counts are of elements."""

    def __init__(self, builder: ir.IRBuilder) -> None:
        self.b = builder

    def call(self, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
        kind = ir.FunctionType(result, [argument.type for argument in arguments])
        return self.b.call(get_or_insert_function(self.b.module, kind, name), arguments)

    def constant(self, number: float) -> ir.Constant:
        return ir.Constant(VF, [ir.Constant(F32, float(number))] * LANES)

    def spread(self, value: ir.Value, kind: ir.Type = VF) -> ir.Value:
        """One scalar in every lane."""
        undefined = ir.Constant(kind, ir.Undefined)
        first = self.b.insert_element(undefined, value, I32(0))
        return self.b.shuffle_vector(first, undefined, ir.Constant(ir.VectorType(I32, kind.count), [I32(0)] * kind.count))

    def vector(self, value: ir.Value) -> Vector:
        return Vector(self, self.spread(value))

    def pointer(self, base: ir.Value, byte: ir.Value | int, kind: ir.Type) -> ir.Value:
        return self.b.inttoptr(self.b.add(base, byte if isinstance(byte, ir.Value) else I64(byte)), kind.as_pointer())

    def load(self, base: ir.Value, byte: ir.Value | int = 0, kind: ir.Type = VF, align: int = 4) -> ir.Value:
        return self.b.load(self.pointer(base, byte, kind), align=align)

    def store(self, value: ir.Value, base: ir.Value, byte: ir.Value | int = 0) -> None:
        self.b.store(value, self.pointer(base, byte, value.type), align=4)

    def mask(self, count: ir.Value) -> ir.Value:
        """The first `count` lanes, all of them where there are more."""
        order = ir.Constant(VI, [I32(i) for i in range(LANES)])
        return self.b.icmp_signed("<", order, self.spread(self.b.trunc(count, I32), VI))

    def load_some(self, base: ir.Value, byte: ir.Value, mask: ir.Value, other: float) -> ir.Value:
        return self.call(f"llvm.masked.load.v{LANES}f32.p0", VF, self.pointer(base, byte, VF), I32(4), mask, self.constant(other))

    def store_some(self, value: ir.Value, base: ir.Value, byte: ir.Value | int, mask: ir.Value) -> None:
        self.call(f"llvm.masked.store.v{LANES}f32.p0", ir.VoidType(), value, self.pointer(base, byte, VF), I32(4), mask)

    def either(self, condition: ir.Value, yes: Callable[[], list[ir.Value]], no: Callable[[], list[ir.Value]]) -> list[ir.Value]:
        """What yes() returns where the condition holds, else what no() returns."""
        with self.b.if_else(condition) as (first, second):
            with first:
                one, after_one = yes(), self.b.block
            with second:
                other, after_other = no(), self.b.block
        merged = [self.b.phi(value.type) for value in one]
        for phi, a, b in zip(merged, one, other, strict=True):
            phi.add_incoming(a, after_one)
            phi.add_incoming(b, after_other)
        return merged

    def loop(self, count: ir.Value, step: int, state: list[ir.Value], body: Callable[[ir.Value, list[ir.Value]], list[ir.Value]]
             ) -> list[ir.Value]:
        """body(i, state) for i = 0, step, ... while i + step <= count; the state after the last turn."""
        before, head = self.b.block, self.b.append_basic_block("head")
        turn, after = self.b.append_basic_block("turn"), self.b.append_basic_block("after")
        self.b.branch(head)
        self.b.position_at_end(head)
        i, kept = self.b.phi(I64), [self.b.phi(value.type) for value in state]
        following = self.b.add(i, I64(step))
        self.b.cbranch(self.b.icmp_signed("<=", following, count), turn, after)
        self.b.position_at_end(turn)
        new = body(i, list(kept))
        last = self.b.block
        self.b.branch(head)
        for phi, first, next_ in zip([i, *kept], [I64(0), *state], [following, *new], strict=True):
            phi.add_incoming(first, before)
            phi.add_incoming(next_, last)
        self.b.position_at_end(after)
        return list(kept)

    def lanes(self, count: ir.Value, state: list[Vector], body: Callable[[Access, list[Vector]], list[Vector]]) -> list[Vector]:
        """`body` over all of `count` elements, LANES at a time and the rest under a mask."""
        def full(i: ir.Value, kept: list[ir.Value]) -> list[ir.Value]:
            return [v.value for v in body(Access(self, self.b.mul(i, I64(4)), None), [Vector(self, k) for k in kept])]

        values = self.loop(count, LANES, [v.value for v in state], full)
        whole = self.b.and_(count, I64(-LANES))
        rest = self.b.sub(count, whole)
        before = self.b.block
        with self.b.if_then(self.b.icmp_signed(">", rest, I64(0))):
            new = body(Access(self, self.b.mul(whole, I64(4)), self.mask(rest)), [Vector(self, k) for k in values])
            inside = self.b.block
        merged = []
        for old, vector in zip(values, new, strict=True):
            phi = self.b.phi(VF)
            phi.add_incoming(old, before)
            phi.add_incoming(vector.value, inside)
            merged.append(Vector(self, phi))
        return merged

    def across(self, vector: Vector, join: Callable[[Vector, Vector], Vector]) -> ir.Value:
        """All lanes joined pairwise, halves first: a scalar."""
        width = LANES // 2
        while width:
            order = [I32((i + width) % LANES) for i in range(LANES)]
            turned = self.b.shuffle_vector(vector.value, vector.value, ir.Constant(ir.VectorType(I32, LANES), order))
            vector = join(vector, Vector(self, turned))
            width //= 2
        return self.b.extract_element(vector.value, I32(0))


class Access:
    """One vector's worth of elements at the same place of several arrays."""

    def __init__(self, code: Code, byte: ir.Value, mask: ir.Value | None) -> None:
        self.code, self.byte, self.mask = code, byte, mask

    def load(self, base: ir.Value, other: float = 0.0) -> Vector:
        """`other` in the lanes beyond the end."""
        value = self.code.load(base, self.byte) if self.mask is None else self.code.load_some(base, self.byte, self.mask, other)
        return Vector(self.code, value)

    def store(self, vector: Vector, base: ir.Value) -> None:
        if self.mask is None:
            self.code.store(vector.value, base, self.byte)
        else:
            self.code.store_some(vector.value, base, self.byte, self.mask)


def function(arguments: str, result: str = "void") -> Callable[[Callable[..., Any]], Any]:
    """An intrinsic from `body(code, *arguments)`; `arguments` spells a for an address or a count, f for an f32."""
    def decorate(body: Callable[..., Any]) -> Any:
        kinds = [types.float32 if letter == "f" else types.intp for letter in arguments]
        returns = types.float32 if result == "f" else types.void
        names = ", ".join(f"a{i}" for i in range(len(kinds)))

        def typed(*_: Any) -> Any:
            def generate(context: Any, builder: ir.IRBuilder, signature: Any, values: Any) -> ir.Value:
                value = body(Code(builder), *values)
                return context.get_dummy_value() if value is None else value
            return returns(*kinds), generate

        space: dict[str, Any] = {"typed": typed}
        exec(f"def {body.__name__}(context, {names}):\n    return typed({names})", space)    # numba counts the parameters
        return intrinsic(space[body.__name__])
    return decorate


# ---- functions of one vector

# exp(r) = 1 + r + r^2 q(r) for |r| <= ln 2 / 2, q fitted for least relative error (3e-9).
_Q = (0.001381461275741458, 0.008368710055947304, 0.04166838899254799, 0.1666652113199234, 0.4999999403953552)
_LOG2E, _LN2_HIGH, _LN2_LOW, _MAGIC = 1.4426950408889634, 0.693145751953125, 1.428606765330187e-06, 12582912.0
LOWEST, HIGHEST = -87.33654, 88.37626                      # exp stays a normal number


def exp(x: Vector) -> Vector:
    """Relative error below 2e-7; clamped to the normal numbers at both ends."""
    return exp_within(x.at_least(LOWEST).at_most(HIGHEST))


def exp_within(x: Vector) -> Vector:
    """exp for LOWEST <= x <= HIGHEST; beyond, any number."""
    code, b = x.code, x.code.b
    shifted = x.fma(_LOG2E, _MAGIC)                         # 1.5 * 2^23: the low bits now hold the nearest whole number
    n = shifted - _MAGIC
    r = n.fma(-_LN2_LOW, n.fma(-_LN2_HIGH, x))
    q = reduce(lambda sum_, a: r.fma(sum_, a), _Q[1:], Vector(code, code.constant(_Q[0])))
    p = (r * r).fma(q, r) + 1.0
    bits = b.shl(b.bitcast(shifted.value, VI), ir.Constant(VI, [I32(23)] * LANES))
    power = b.bitcast(b.add(bits, ir.Constant(VI, [I32(127 << 23)] * LANES)), VF)
    return p * Vector(code, power)


# erfc(a / sqrt 2) / 2 = exp(-p(a)) for 0 <= a <= 6, p fitted for least absolute error of a exp(-p(a)) (5e-8).
_P = (-2.2938193069421686e-05, 0.000533182465005666, -0.00560112576931715, 0.03702244907617569, 0.3179958164691925,
      0.7979522347450256, 0.6931423544883728)


def gelu(x: Vector) -> Vector:
    """max(x, 0) - |x| erfc(|x| / sqrt 2) / 2; absolute error below 2e-7 + 1e-7 |x|."""
    a = x.abs().at_most(6.0)
    p = reduce(lambda sum_, c: a.fma(sum_, c), _P[1:], Vector(x.code, x.code.constant(_P[0])))
    return x.at_least(0.0) - a * exp_within(0.0 - p)


def gelu_tanh(x: Vector) -> Vector:
    """x / (1 + exp(-2u)), u = sqrt(2 / pi) (x + 0.044715 x^3)"""
    square = x * x
    u = square.fma(-2 * 0.7978845608028654 * 0.044715, -2 * 0.7978845608028654) * x
    return x.at_least(LOWEST) / (exp(u) + 1.0)


def silu(x: Vector) -> Vector:
    return x.at_least(LOWEST) / (exp(0.0 - x) + 1.0)          # exp is clamped: so must x be


# ---- rows

def elementwise(of: Callable[[Vector], Vector]) -> Any:
    """intrinsic(source, target, count)"""
    @function("aaa")
    def apply(code: Code, source: ir.Value, target: ir.Value, count: ir.Value) -> None:
        def step(at: Access, _: list[Vector]) -> list[Vector]:
            at.store(of(at.load(source)), target)
            return []
        code.lanes(count, [], step)
    return apply


gelu_row, gelu_tanh_row, silu_row = elementwise(gelu), elementwise(gelu_tanh), elementwise(silu)


@function("aaaa")
def add_row(code: Code, one: ir.Value, other: ir.Value, target: ir.Value, count: ir.Value) -> None:
    def step(at: Access, _: list[Vector]) -> list[Vector]:
        at.store(at.load(one) + at.load(other), target)
        return []
    code.lanes(count, [], step)


@function("aaf")
def scale_row(code: Code, row: ir.Value, count: ir.Value, factor: ir.Value) -> None:
    by = code.vector(factor)

    def step(at: Access, _: list[Vector]) -> list[Vector]:
        at.store(at.load(row) * by, row)
        return []
    code.lanes(count, [], step)


def _moments(code: Code, row: ir.Value, count: ir.Value, mean: Vector | None) -> Vector:
    """The mean of the row, or of its squared distances from `mean`, in every lane."""
    def step(at: Access, sums: list[Vector]) -> list[Vector]:
        x = at.load(row)
        if mean is None:
            return [sums[0] + x]
        apart = x - mean
        if at.mask is not None:                             # beyond the end, x is 0 and not the mean
            apart = Vector(code, code.b.select(at.mask, apart.value, code.constant(0.0)))
        return [apart.fma(apart, sums[0])]

    total = code.across(code.lanes(count, [Vector(code, code.constant(0.0))], step)[0], Vector.__add__)
    return code.vector(code.b.fdiv(total, code.b.sitofp(count, F32)))


def _inverse_root(code: Code, variance: Vector, eps: ir.Value) -> Vector:
    root = code.call(f"llvm.sqrt.v{LANES}f32", VF, (variance + code.vector(eps)).value)
    return 1.0 / Vector(code, root)


@function("aaaaaf")
def layer_norm_row(code: Code, row: ir.Value, target: ir.Value, weight: ir.Value, bias: ir.Value, count: ir.Value, eps: ir.Value) -> None:
    mean = _moments(code, row, count, None)
    by = _inverse_root(code, _moments(code, row, count, mean), eps)

    def step(at: Access, _: list[Vector]) -> list[Vector]:
        at.store(((at.load(row) - mean) * by).fma(at.load(weight), at.load(bias)), target)
        return []
    code.lanes(count, [], step)


@function("aaaaf")
def rms_norm_row(code: Code, row: ir.Value, target: ir.Value, weight: ir.Value, count: ir.Value, eps: ir.Value) -> None:
    by = _inverse_root(code, _moments(code, row, count, Vector(code, code.constant(0.0))), eps)

    def step(at: Access, _: list[Vector]) -> list[Vector]:
        at.store(at.load(row) * by * at.load(weight), target)
        return []
    code.lanes(count, [], step)


@function("aaaaa")
def rotate_row(code: Code, row: ir.Value, target: ir.Value, cos: ir.Value, sin: ir.Value, half: ir.Value) -> None:
    """Pairs (i, i + half)."""
    bytes_ = code.b.mul(half, I64(4))
    second, into = code.b.add(row, bytes_), code.b.add(target, bytes_)

    def step(at: Access, _: list[Vector]) -> list[Vector]:
        x, y, c, s = at.load(row), at.load(second), at.load(cos), at.load(sin)
        at.store(x * c - y * s, target)
        at.store(y * c + x * s, into)
        return []
    code.lanes(half, [], step)


@function("aaf", "f")
def softmax_row(code: Code, row: ir.Value, count: ir.Value, scale: ir.Value) -> ir.Value:
    """row becomes exp(scale (row - its maximum)), scale > 0; exactly 0 where that is too small for a normal number. Returns the sum."""
    def most(at: Access, kept: list[Vector]) -> list[Vector]:
        return [at.load(row, float("-inf")).max(kept[0])]

    largest = code.vector(code.across(code.lanes(count, [Vector(code, code.constant(float("-inf")))], most)[0], Vector.max))
    by = code.vector(scale)

    def step(at: Access, sums: list[Vector]) -> list[Vector]:
        x = (at.load(row, float("-inf")) - largest) * by
        tiny = code.b.fcmp_ordered("<", x.value, code.constant(LOWEST))
        e = Vector(code, code.b.select(tiny, code.constant(0.0), exp_within(x).value))
        at.store(e, row)
        return [sums[0] + e]

    return code.across(code.lanes(count, [Vector(code, code.constant(0.0))], step)[0], Vector.__add__)


# ---- matrix products

def _tile(code: Code, rows: int, bf16: bool, a: ir.Value, lda: ir.Value, b: ir.Value, k: ir.Value, c: ir.Value, ldc: ir.Value,
          columns: ir.Value, start: ir.Value, lds: ir.Value, ahead: ir.Value, pace: ir.Value) -> None:
    builder = code.b
    each, across = builder.mul(lda, I64(4)), builder.mul(ldc, I64(4))
    sources = [builder.add(a, builder.mul(each, I64(r))) for r in range(rows)]
    origins = [builder.add(start, builder.mul(lds, I64(4 * r))) for r in range(rows)]
    targets = [builder.add(c, builder.mul(across, I64(r))) for r in range(rows)]
    places = [(r, j) for r in range(rows) for j in range(VECTORS)]
    whole = builder.icmp_signed(">=", columns, I64(WIDTH))  # most are, and AVX2 stores under a mask many times slower

    def masks() -> list[ir.Value]:
        return [code.mask(builder.sub(columns, I64(LANES * j))) for j in range(VECTORS)]

    def load_all() -> list[ir.Value]:
        return [code.load(origins[r], 4 * LANES * j) for r, j in places]

    def load_some() -> list[ir.Value]:
        under = masks()
        return [code.load_some(origins[r], I64(4 * LANES * j), under[j], 0.0) for r, j in places]

    element = I32 if bf16 else F32

    def step(i: ir.Value, sums: list[ir.Value]) -> list[ir.Value]:
        byte = builder.mul(i, I64(4))
        there = builder.add(b, builder.mul(i, I64(4 * WIDTH)))
        panel = [code.load(there, 4 * LANES * j) for j in range(VECTORS)]
        fetched = builder.add(builder.add(b, ahead), builder.mul(i, pace))
        for j in range(0, 4 * WIDTH, 64):
            code.call("llvm.prefetch.p0", ir.VoidType(), code.pointer(fetched, j, F32), I32(0), I32(2), I32(1))
        new = []
        for r in range(rows):
            x = code.spread(code.load(sources[r], byte, element), VI if bf16 else VF)
            for j in range(VECTORS):
                s = sums[r * VECTORS + j]
                if bf16:
                    pairs = ir.VectorType(_BFloat(), 2 * LANES)
                    factors = [builder.bitcast(x, pairs), builder.bitcast(panel[j], pairs)]
                    new.append(code.call("llvm.x86.avx512bf16.dpbf16ps.512", VF, s, *factors))
                else:
                    new.append(code.call(f"llvm.fma.v{LANES}f32", VF, x, panel[j], s))
        return new

    sums = code.loop(k, 1, code.either(whole, load_all, load_some), step)

    def store_all() -> list[ir.Value]:
        for (r, j), total in zip(places, sums, strict=True):
            code.store(total, targets[r], 4 * LANES * j)
        return []

    def store_some() -> list[ir.Value]:
        under = masks()
        for (r, j), total in zip(places, sums, strict=True):
            code.store_some(total, targets[r], 4 * LANES * j, under[j])
        return []

    code.either(whole, store_all, store_some)


def _tiles(bf16: bool) -> Any:
    @function("aaaaaaaaaaaa")
    def tile(code: Code, rows: ir.Value, a: ir.Value, lda: ir.Value, b: ir.Value, k: ir.Value, c: ir.Value, ldc: ir.Value,
             columns: ir.Value, start: ir.Value, lds: ir.Value, ahead: ir.Value, pace: ir.Value) -> None:
        """c[:rows, :columns] = start + a @ b: `rows` from 1 to ROWS, `columns` from 1 to WIDTH (or more, meaning WIDTH).

        a, c, start: row strides lda, ldc, lds; b: a panel [k, WIDTH]. Each sum runs over k in order, in one chain of fused multiply-adds,
        whatever `rows` is. `ahead`: bytes from b to what is multiplied next, which is fetched meanwhile, `pace` bytes a row.
        bf16: a and b hold pairs of numbers along k; k, lda and the panel's rows count pairs.
        """
        after = code.b.append_basic_block("done")
        choice = code.b.switch(rows, after)
        for count in range(1, ROWS + 1):
            block = code.b.append_basic_block(f"rows{count}")
            choice.add_case(I64(count), block)
            code.b.position_at_end(block)
            _tile(code, count, bf16, a, lda, b, k, c, ldc, columns, start, lds, ahead, pace)
            code.b.branch(after)
        code.b.position_at_end(after)
    return tile


tile = _tiles(bf16=False)
tile_bf16 = _tiles(bf16=True)


@function("aaaa")
def column(code: Code, row: ir.Value, target: ir.Value, count: ir.Value, stride: ir.Value) -> None:
    """target[i * stride] = row[i]"""
    bytes_ = code.b.mul(stride, I64(4))

    def step(i: ir.Value, _: list[ir.Value]) -> list[ir.Value]:
        code.store(code.load(row, code.b.mul(i, I64(4)), F32), target, code.b.mul(i, bytes_))
        return []
    code.loop(count, 1, [], step)


@function("aaa")
def transpose(code: Code, source: ir.Value, across: ir.Value, target: ir.Value) -> None:
    """LANES x LANES: target[i * WIDTH + j] = source[j][i]; `across`: bytes from row to row of the source. Bits are moved as they are."""
    rows = [code.load(source, code.b.mul(across, I64(i)), VI) for i in range(LANES)]
    step = 1
    while step < LANES:                                     # swaps the two blocks of step x step off the diagonal, everywhere
        low = ir.Constant(ir.VectorType(I32, LANES), [I32(i if not i & step else LANES + i - step) for i in range(LANES)])
        high = ir.Constant(ir.VectorType(I32, LANES), [I32(i + step if not i & step else LANES + i) for i in range(LANES)])
        for i in range(LANES):
            if not i & step:
                a, b = rows[i], rows[i + step]
                rows[i], rows[i + step] = code.b.shuffle_vector(a, b, low), code.b.shuffle_vector(a, b, high)
        step *= 2
    for i, row in enumerate(rows):
        code.store(row, target, 4 * WIDTH * i)


@function("aaa")
def panel_row(code: Code, row: ir.Value, target: ir.Value, count: ir.Value) -> None:
    """target[:WIDTH] = row[:count] and zeros."""
    for j in range(VECTORS):
        mask = code.mask(code.b.sub(count, I64(LANES * j)))
        code.store(code.load_some(row, I64(4 * LANES * j), mask, 0.0), target, 4 * LANES * j)


@function("aaa")
def halves_row(code: Code, row: ir.Value, target: ir.Value, count: ir.Value) -> None:
    """f32 to bf16, nearest even, in whole vectors: `target` is written to the next multiple of LANES, with zeros."""
    def step(at: Access, _: list[Vector]) -> list[Vector]:
        half = code.call("llvm.x86.avx512bf16.cvtneps2bf16.512", ir.VectorType(_BFloat(), LANES), at.load(row).value)
        code.store(code.b.bitcast(half, ir.VectorType(ir.IntType(16), LANES)), target, code.b.lshr(at.byte, I64(1)))
        return []
    code.lanes(count, [], step)
