"""Peers: ways of saving memory in a step, from torch, other packages and vdnn. PEERS has them by name.

If a peer cannot run, it says why, and the cell is recorded as not run.
"""

from __future__ import annotations

from benchmarks.peers.checkpoint import CHECKPOINT, CHECKPOINT_SELECTIVE
from benchmarks.peers.compiled_offload import COMPILED_OFFLOAD, COMPILED_PLAIN
from benchmarks.peers.deepspeed_checkpoint import DEEPSPEED_CHECKPOINT
from benchmarks.peers.package_hooks import TORCHTUNE, TRL
from benchmarks.peers.peer import CannotRun, Opened, Peer, Trial
from benchmarks.peers.plain import PLAIN
from benchmarks.peers.save_on_cpu import SAVE_ON_CPU_PAGEABLE, SAVE_ON_CPU_PINNED
from benchmarks.peers.vdnn_session import VDNN_2016, VDNN_AUTO, VDNN_AUTO_OFFLOAD
from vdnn.report import Cell

# Plain is first, because others are compared with it. The slowest are last.
PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        PLAIN,
        CHECKPOINT,
        CHECKPOINT_SELECTIVE,
        *VDNN_2016,
        VDNN_AUTO,
        VDNN_AUTO_OFFLOAD,
        TRL,
        TORCHTUNE,
        DEEPSPEED_CHECKPOINT,
        COMPILED_PLAIN,
        COMPILED_OFFLOAD,
        SAVE_ON_CPU_PINNED,
        SAVE_ON_CPU_PAGEABLE,
    )
}
# Names for several peers.
GROUPS = {
    "vdnn-2016": tuple(peer.name for peer in VDNN_2016),
    "save-on-cpu": (SAVE_ON_CPU_PINNED.name, SAVE_ON_CPU_PAGEABLE.name),
    "all": tuple(PEERS),
}

__all__ = ["GROUPS", "PEERS", "CannotRun", "Opened", "Peer", "Trial", "name_of_cell", "peer_named", "peers_named"]


def peer_named(name: str) -> Peer:
    """The peer of that name. Raises ValueError, which lists the known names."""
    try:
        return PEERS[name]
    except KeyError:
        raise ValueError(f"expected a peer among {', '.join([*PEERS, *GROUPS])}, got {name!r}.") from None


def peers_named(names: list[str]) -> list[str]:
    """The names with groups expanded, each peer once, in the order of PEERS."""
    wanted = {peer_named(one).name for name in names for one in GROUPS.get(name, (name,))}
    return [name for name in PEERS if name in wanted]


def name_of_cell(cell: Cell) -> str:
    """The name in PEERS of the peer that a cell ran, or the cell's own name for it."""
    found = (name for name, peer in PEERS.items() if (peer.cell_name, peer.compiled) == (cell.peer, cell.compiled))
    return next(found, cell.peer)
