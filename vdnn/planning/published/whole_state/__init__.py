"""Published policies for whole trainings, each in a file of its own. See README.md."""

from vdnn.planning.published.whole_state.fsdp2_offload import FSDP2_OFFLOAD
from vdnn.planning.published.whole_state.megatrain import MEGATRAIN
from vdnn.planning.published.whole_state.placed_training import WholeStatePolicy
from vdnn.planning.published.whole_state.protrain import PROTRAIN
from vdnn.planning.published.whole_state.torchao_offload import TORCHAO_OFFLOAD
from vdnn.planning.published.whole_state.trainstream import TRAINSTREAM
from vdnn.planning.published.whole_state.twin_flow import TWIN_FLOW
from vdnn.planning.published.whole_state.zero_offload import ZERO_OFFLOAD, ZERO_OFFLOAD_DELAYED

WHOLE_STATE_POLICIES = (
    ZERO_OFFLOAD,
    ZERO_OFFLOAD_DELAYED,
    TWIN_FLOW,
    TORCHAO_OFFLOAD,
    PROTRAIN,
    FSDP2_OFFLOAD,
    MEGATRAIN,
    TRAINSTREAM,
)

__all__ = ["WHOLE_STATE_POLICIES", "WholeStatePolicy"]
