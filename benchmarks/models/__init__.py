"""Real architectures, made only from torch.nn. Each is a function of its batch that returns a Workload.

There is one file per family. They can be made and stepped under FakeTensorMode at any batch, and have the published
numbers of parameters. `VDNN_NETWORKS` lists the ten networks of the vDNN paper.
"""

from __future__ import annotations

from benchmarks.models.alexnet import alexnet, alexnet_227
from benchmarks.models.bert import bert_base, bert_large
from benchmarks.models.densenet import densenet121, densenet201
from benchmarks.models.googlenet import googlenet
from benchmarks.models.gpt import gpt2, gpt2_xl
from benchmarks.models.inception_v3 import inception_v3
from benchmarks.models.inception_v4 import inception_v4
from benchmarks.models.llama import llama_1b, llama_8b
from benchmarks.models.lstm import lstm
from benchmarks.models.mixtral import mixtral
from benchmarks.models.mobilenet import mobilenet_v2
from benchmarks.models.overfeat import overfeat
from benchmarks.models.resnet import resnet50, resnet101, resnet152
from benchmarks.models.resnet18 import resnet18
from benchmarks.models.resnet1202 import resnet1202
from benchmarks.models.unet import unet
from benchmarks.models.unet3d import unet3d
from benchmarks.models.vdnn_networks import VDNN_NETWORKS, VdnnNetwork
from benchmarks.models.vgg import vgg16, vgg116, vgg216, vgg316, vgg416
from benchmarks.models.vit import vit_base, vit_large
from benchmarks.models.workload import CrossEntropy, Workload

__all__ = [
    "VDNN_NETWORKS",
    "CrossEntropy",
    "VdnnNetwork",
    "Workload",
    "alexnet",
    "alexnet_227",
    "bert_base",
    "bert_large",
    "densenet121",
    "densenet201",
    "googlenet",
    "gpt2",
    "gpt2_xl",
    "inception_v3",
    "inception_v4",
    "llama_1b",
    "llama_8b",
    "lstm",
    "mixtral",
    "mobilenet_v2",
    "overfeat",
    "resnet18",
    "resnet50",
    "resnet101",
    "resnet152",
    "resnet1202",
    "unet",
    "unet3d",
    "vgg16",
    "vgg116",
    "vgg216",
    "vgg316",
    "vgg416",
    "vit_base",
    "vit_large",
]
