"""Numba intrinsics for what NumPy cannot say: 64 comparisons at once as the bits of one integer, and bit tricks.

They emit portable LLVM vector code: AVX-512, AVX2, NEON or plain instructions, whatever the processor has.
"""

# pyright: reportMissingImports=false, reportMissingTypeStubs=false
from typing import Any

import llvmlite.binding
import numpy as np
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic as numba_intrinsic

LANES = 64
"""Elements one mask covers."""

CLASSES = 12
"""Octaves of magnitude that are told apart; below the lowest nearly every element changes anyway."""

_I8 = ir.IntType(8)
_I16 = ir.IntType(16)
_I64 = ir.IntType(64)


def _element(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [index])


def _load_lanes(context: Any, builder: Any, array_type: Any, array: Any, index: Any) -> Any:
    vector = ir.VectorType(_I16, LANES)
    pointer = builder.bitcast(_element(context, builder, array_type, array, index), vector.as_pointer())
    return builder.load(pointer, align=2)


def _splat(builder: Any, value: Any) -> Any:
    undefined = ir.Constant(ir.VectorType(value.type, LANES), ir.Undefined)
    first = builder.insert_element(undefined, value, ir.Constant(ir.IntType(32), 0))
    zeros = ir.Constant(ir.VectorType(ir.IntType(32), LANES), [0] * LANES)
    return builder.shuffle_vector(first, undefined, zeros)


def intrinsic(function: Any) -> Any:
    """Numba's own, for type checkers: the typing context is no argument of the compiled function."""
    return numba_intrinsic(function)


@intrinsic
def changed_mask(_typing: Any, old: Any, new: Any, start: Any) -> Any:
    """Bit i is set where `old[start + i] != new[start + i]`, for 64 uint16 elements; reads no bounds."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        left = _load_lanes(context, builder, signature.args[0], arguments[0], arguments[2])
        right = _load_lanes(context, builder, signature.args[1], arguments[1], arguments[2])
        return builder.bitcast(builder.icmp_unsigned("!=", left, right), _I64)

    return types.uint64(old, new, types.intp), generate


@intrinsic
def class_masks(_typing: Any, bits: Any, start: Any, top: Any, masks: Any) -> Any:
    """Sort 64 bf16 patterns by exponent: `masks[c]` gets the bits of those of class c, for each of `CLASSES`.

    Class 0 has exponents of at least `top`, class c the exponent `top - c`, the last one all below. Both
    `top - CLASSES + 2 >= 0` and the bounds of the arrays are the caller's to see to.
    """

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        lanes = _load_lanes(context, builder, signature.args[0], arguments[0], arguments[1])
        seven = ir.Constant(lanes.type, [7] * LANES)
        exponents = builder.trunc(builder.lshr(lanes, seven), ir.VectorType(_I8, LANES))
        for number in range(CLASSES):
            last = number == CLASSES - 1
            bound = builder.sub(arguments[2], ir.Constant(_I8, number - last))
            comparison = ">=" if number == 0 else "<" if last else "=="
            mask = builder.bitcast(builder.icmp_unsigned(comparison, exponents, _splat(builder, bound)), _I64)
            index = ir.Constant(_I64, number)
            builder.store(mask, _element(context, builder, signature.args[3], arguments[3], index))
        return context.get_dummy_value()

    return types.void(bits, types.intp, types.uint8, masks), generate


@intrinsic
def popcount(_typing: Any, value: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.ctpop(arguments[0])

    return types.int64(types.uint64), generate


@intrinsic
def lowest_bit(_typing: Any, value: Any) -> Any:
    """Index of the lowest set bit; 64 for none."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        return builder.cttz(arguments[0], ir.Constant(ir.IntType(1), 0))

    return types.int64(types.uint64), generate


@intrinsic
def highest_bit(_typing: Any, value: Any) -> Any:
    """Index of the highest set bit; -1 for none."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        leading = builder.ctlz(arguments[0], ir.Constant(ir.IntType(1), 0))
        return builder.sub(ir.Constant(_I64, 63), leading)

    return types.int64(types.uint64), generate


@intrinsic
def multiply_high(_typing: Any, left: Any, right: Any) -> Any:
    """The upper 64 bits of a product."""

    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        wide = [builder.zext(argument, ir.IntType(128)) for argument in arguments]
        return builder.trunc(builder.lshr(builder.mul(*wide), ir.Constant(ir.IntType(128), 64)), _I64)

    return types.uint64(types.uint64, types.uint64), generate


@intrinsic
def _deposit(_typing: Any, value: Any, mask: Any) -> Any:
    def generate(_context: Any, builder: Any, _signature: Any, arguments: Any) -> Any:
        pdep = builder.module.declare_intrinsic("llvm.x86.bmi.pdep.64", (), ir.FunctionType(_I64, [_I64, _I64]))
        return builder.call(pdep, arguments)

    return types.uint64(types.uint64, types.uint64), generate


@njit(inline="always")
def _nth_bit_by_deposit(mask, n):  # type: ignore[no-untyped-def]
    return lowest_bit(_deposit(np.uint64(1) << np.uint64(n), mask))


@njit(inline="always")
def _nth_bit_by_loop(mask, n):  # type: ignore[no-untyped-def]
    for _ in range(n):
        mask &= mask - np.uint64(1)
    return lowest_bit(mask)


nth_bit = _nth_bit_by_deposit if llvmlite.binding.get_host_cpu_features().get("bmi2") else _nth_bit_by_loop
"""Index of the n-th set bit of `mask`, from 0."""


@intrinsic
def load_u16(_typing: Any, data: Any, start: Any) -> Any:
    """Two bytes from `data[start]` on, little-endian; reads no bounds."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _element(context, builder, signature.args[0], arguments[0], arguments[1])
        return builder.load(builder.bitcast(pointer, _I16.as_pointer()), align=1)

    return types.uint16(data, types.intp), generate


@intrinsic
def load_u64(_typing: Any, data: Any, start: Any) -> Any:
    """Eight bytes from `data[start]` on, little-endian; reads no bounds."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _element(context, builder, signature.args[0], arguments[0], arguments[1])
        return builder.load(builder.bitcast(pointer, _I64.as_pointer()), align=1)

    return types.uint64(data, types.intp), generate


@intrinsic
def store_u64(_typing: Any, data: Any, start: Any, value: Any) -> Any:
    """Write `value` as eight little-endian bytes from `data[start]` on; checks no bounds."""

    def generate(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        pointer = _element(context, builder, signature.args[0], arguments[0], arguments[1])
        builder.store(arguments[2], builder.bitcast(pointer, _I64.as_pointer()), align=1)
        return context.get_dummy_value()

    return types.void(data, types.intp, types.uint64), generate
