"""The readable form of csrc/planning/resized_step.h: numbers of a step of another size."""

from __future__ import annotations

import math
from collections.abc import Sequence

from vdnn.step.made_steps import Amounts
from vdnn.step.recording import SaveKey

# Bytes are rounded to blocks of an allocator.
_ROUNDING = 0.01
_NOTHING = 1e-3  # less than a byte: the error of floating-point numbers


class ReferenceCurve:
    """Numbers that are known at two or three sizes, in ascending order, at another size."""

    def __init__(self, known: Sequence[float], wanted: float) -> None:
        self._known = known
        self._shares = [  # those of Lagrange
            math.prod((wanted - other) / (one - other) for other in known if other != one) for one in known
        ]
        above = next((index for index, one in enumerate(known) if one >= wanted), len(known) - 1)
        self._pair = max(0, above - 1), max(1, above)
        lower, upper = (known[index] for index in self._pair)
        self._along_line, self._with_square = (
            (wanted**power - upper**power) / (upper**power - lower**power) for power in (1, 2)
        )
        self._is_above = wanted > upper

    def values(self, amounts: Amounts) -> list[int]:
        """See [Note: Two steps]. Values from three steps stay within the same bounds, because times are measured."""
        lowers, uppers = (amounts[index] for index in self._pair)
        if all(one == uppers for one in amounts):
            return list(uppers)  # most often zeros
        along_line, with_square, is_above, ceil = self._along_line, self._with_square, self._is_above, math.ceil
        found = []
        if len(amounts) == 2:
            for lower, upper in zip(lowers, uppers, strict=True):
                change = upper - lower
                if not change or (is_above and change < 0):
                    found.append(upper)
                    continue
                line, square = upper + change * along_line, upper + change * with_square
                found.append(ceil((line if line > square else square) - _NOTHING))
            return found
        first_share, second_share, third_share = self._shares
        for lower, upper, one, two, three in zip(lowers, uppers, *amounts, strict=True):
            if one == two == three:
                found.append(one)
                continue
            change = 0 if is_above and upper < lower else upper - lower
            line, square = upper + change * along_line, upper + change * with_square
            exact = first_share * one + second_share * two + third_share * three
            least = line if is_above else min(lower, upper)
            most = line if line > square else square
            exact = least if exact < least else exact
            found.append(ceil((most if exact > most else exact) - _NOTHING))
        return found

    def stored(self, keys: Sequence[Sequence[SaveKey]], amounts: Amounts) -> list[int]:
        """The bytes of storages with these first saves: they grow as the product of its sizes, each on a line."""
        found = self.values(amounts)
        for index, (of_storage, nbytes) in enumerate(
            zip(zip(*keys, strict=True), zip(*amounts, strict=True), strict=True)
        ):
            sizes = [key.size for key in of_storage]
            elements = [math.prod(size) for size in sizes]
            last_elements, last_bytes = elements[-1], nbytes[-1]
            if any(
                not of_all
                or len(size) != len(sizes[-1])
                or abs(one * last_elements / of_all - last_bytes) > _ROUNDING * last_bytes
                for size, of_all, one in zip(sizes, elements, nbytes, strict=True)
            ):
                continue
            lowers, uppers = (sizes[place] for place in self._pair)
            wanted = 1.0
            for lower, upper in zip(lowers, uppers, strict=True):
                wanted *= upper + (upper - lower) * self._along_line
            found[index] = math.ceil(last_bytes / last_elements * wanted - _NOTHING)
        return found
