"""The configuration of MegEngine's sublinear memory, with MegEngine's names for its parameters."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class SublinearConfig:
    """`thresh_nr_try`: block sizes that are tried in each of two rounds. `genetic_nr_iter`: generations of the genetic
    search, none by default. `genetic_pool_size`: how many survive a generation. `lb_memory_mb`: a peak in MiB below
    which memory is spent on time. `num_worker` has no effect here: one worker is enough."""

    thresh_nr_try: int = 10
    genetic_nr_iter: int = 0
    genetic_pool_size: int = 20
    lb_memory_mb: int = 0
    num_worker: int = 1

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            least = 1 if field.name in ("genetic_pool_size", "num_worker") else 0
            if type(value) is not int or value < least:
                raise ValueError(
                    f"SublinearConfig: expected {field.name} to be an integer of at least {least}, got {value!r}."
                )
