"""The configuration of MegEngine's sublinear memory, by its own names: for those who come from there."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True, slots=True)
class SublinearConfig:
    """`thresh_nr_try`: block sizes tried in each of two rounds. `genetic_nr_iter`: generations of the genetic search,
    none by default; `genetic_pool_size`: how many survive one. `lb_memory_mb`: MiB of memory below which nothing is
    gained: what is left is spent on time. `num_worker` changes nothing here: one worker is enough."""

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
                    f"SublinearConfig: expected {field.name} to be a number from {least} on, got {value!r}."
                )
