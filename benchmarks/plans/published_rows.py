"""Published figures of systems that recompute, row by row: the network, its budget, and the slowdown.

The figures come from notes on the papers: MegEngine's and DTR's as read in their sources, Chen's and Capuchin's from
memory. A row with a stand-in for another network says so. The head of BERT-base reads only the masked tokens, as in
pre-training; that of BERT-large reads all.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from benchmarks import models
from benchmarks.models.masked_bert import masked_bert_base
from benchmarks.models.resnet18 import resnet18
from benchmarks.models.workload import Workload

TOKENS = 128  # for Capuchin's BERT: the length of its texts is not in what we read

LEAST = "least"  # the budget is the least that the policy reaches
CARD = "card"  # the budget is all of the card's memory


def short_bert(batch: int) -> Workload:
    return masked_bert_base(batch, TOKENS)


NETWORKS: dict[str, Callable[[int], Workload]] = {
    "ResNet-18": resnet18,
    "ResNet-50": models.resnet50,
    "ResNet-152": models.resnet152,
    "VGG-16": models.vgg16,
    "DenseNet-121": models.densenet121,
    "Inception v3": models.inception_v3,
    "U-Net": models.unet,
    "BERT-base": masked_bert_base,
    "BERT-base (128)": short_bert,
    "BERT-large": models.bert_large,
}


class Row(NamedTuple):
    """One published figure. `budget` is LEAST, CARD, or a share of the peak with everything kept. `slowdown` is the
    published one, or None."""

    system: str
    policy: str
    network: str
    batch: int
    card: str
    budget: float | str
    slowdown: float | None
    remark: str = ""
    miss: str = ""  # the reason, if the policy does not fit and the reason is known

    @property
    def key(self) -> str:
        return f"{self.policy}, {self.network}, {self.batch}, {self.card}, {self.budget}"


_ONE_PASS = 1.30
_MEGENGINE = 1.25
_FOUR = "Inception v4 there"
_TRANSFORMER = "a Transformer there"
_THRESHOLDS = (
    "Thresholds cut where bytes say, inside of layers, and keep more than a layer's end there; generations find better "
    "cuts, chen-sqrt better still. And masks of dropout stay, 7 % of what is saved: there they are drawn again."
)

ROWS = (
    Row("MegEngine", "megengine-sublinear", "ResNet-18", 128, "rtx-2080ti", 0.77, _MEGENGINE),
    Row("MegEngine", "megengine-sublinear", "ResNet-18", 128, "rtx-2080ti", 0.68, _MEGENGINE),
    Row("MegEngine", "megengine-sublinear", "ResNet-50", 100, "rtx-2080ti", 0.60, _MEGENGINE),
    Row("MegEngine", "megengine-sublinear", "BERT-base", 16, "rtx-2080ti", 0.25, _MEGENGINE, miss=_THRESHOLDS),
    Row("MegEngine", "megengine-sublinear", "BERT-large", 16, "rtx-2080ti", 0.25, _MEGENGINE),
    Row("MegEngine", "megengine-sublinear", "ResNet-50", 100, "rtx-2080ti", LEAST, None),
    Row("MegEngine", "megengine-sublinear", "ResNet-50", 200, "rtx-2080ti", CARD, _MEGENGINE),
    Row("MegEngine", "megengine-sublinear", "ResNet-50", 262, "rtx-2080ti", CARD, None),
    Row("Chen", "chen-sqrt", "ResNet-152", 64, "titan-x", LEAST, _ONE_PASS),
    Row("Chen", "chen-recursive", "ResNet-152", 64, "titan-x", LEAST, None),
    Row("Capuchin", "capuchin-full", "VGG-16", 350, "p100", CARD, None),
    Row("Capuchin", "capuchin-full", "ResNet-50", 1014, "p100", CARD, None),
    Row("Capuchin", "capuchin-full", "ResNet-152", 798, "p100", CARD, None),
    Row("Capuchin", "capuchin-full", "BERT-base (128)", 450, "p100", CARD, None),
    Row("DTR", "dtr", "DenseNet-121", 84, "v100-16", 0.73, 1.22),
    Row("DTR", "dtr", "DenseNet-121", 84, "v100-16", 0.55, 1.29),
    Row("DTR", "dtr", "DenseNet-121", 84, "v100-16", 0.39, 1.51),
    Row("DTR", "dtr", "U-Net", 6, "v100-16", 0.76, 1.14),
    Row("DTR", "dtr", "Inception v3", 64, "v100-16", 0.72, 1.10, _FOUR),
    Row("DTR", "dtr", "Inception v3", 64, "v100-16", 0.55, 1.15, _FOUR),
    Row("DTR", "dtr", "Inception v3", 64, "v100-16", 0.38, 1.25, _FOUR),
    Row("DTR", "dtr", "BERT-base", 10, "v100-16", 0.63, 1.15, _TRANSFORMER),
    Row("DTR", "dtr", "BERT-base", 10, "v100-16", 0.43, 1.19, _TRANSFORMER),
    Row("DTR", "dtr", "BERT-base", 10, "v100-16", 0.24, 1.60, _TRANSFORMER),
)
