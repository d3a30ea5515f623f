"""Published speeds of training on one GPU: the network, its batch, how it computes, and items per second.

Each figure was read in its source, which a row names: convnet-benchmarks (Titan X, forward and backward pass alone),
NVIDIA's DeepLearningExamples and Lambda's deeplearning-benchmark (whole steps, with the loading of data), and timm's
tables (whole steps on data that is on the card). Lambda's rows of BERT are NVIDIA's run_squad.py. Lambda has six
machines with one H100: the row is their median. No row was used to calibrate a class of operations. Rows that are not
judged: the source of the Titan X's single efficiency, and a column of NVIDIA's table of which one speed needs more
arithmetic than the card's peak.
"""

from __future__ import annotations

from typing import NamedTuple

CONVNET = "soumith/convnet-benchmarks README, cuDNN R4 (Torch)"
NVIDIA_RESNET = "NVIDIA/DeepLearningExamples, PyTorch/Classification/ConvNets/resnet50v1.5/README.md, 1 GPU"
NVIDIA_BERT = "NVIDIA/DeepLearningExamples, PyTorch/LanguageModeling/BERT/README.md, pre-training on 1 GPU"
LAMBDA = "lambdal/deeplearning-benchmark, pytorch/pytorch-train-throughput-{}.csv and pytorch-train-bs-{}.csv"
LAMBDA_16, LAMBDA_32 = LAMBDA.format("fp16", "fp16"), LAMBDA.format("fp32", "fp32")
TIMM = "huggingface/pytorch-image-models, results/benchmark-train-amp-{}-pt112-cu113-rtx3090.csv"
TIMM_LAST, TIMM_FIRST = TIMM.format("nhwc"), TIMM.format("nchw")


# FLOP of a token: 24 layers of 12 x 1024^2 weights and 2 x 512 x 1024 of scores and mixing, and the head of 80 tokens
# in 512, twice each, three times for both passes: 1.99 GFLOP. A V100's row in float32 needs 19 x 512 x 1.99 GFLOP/s.
OVER_THE_PEAK = (
    "as described, the speed cannot be: a token takes 1.99 GFLOP in products alone, so 19 sequences a second on a V100 "
    "in float32 take 19.4 TFLOP/s of a peak of 15.7; in all four rows of 512 tokens the table has 1.34 to 1.52 times "
    "the tokens per second of 128 tokens, which take less arithmetic"
)


class Row(NamedTuple):
    """One published speed. `precision` is "float32", "tf32", or "float16" for mixed precision. `optimizer` is that of
    vdnn.runtime.rehearsal.rehearsal.OPTIMIZERS, "bert_adam" or "apex_o2" (bert_programs.py), or None if its step is not
    part of the figure, or a small part."""

    source: str
    card: str
    network: str
    batch: int
    precision: str
    per_s: float
    optimizer: str | None = None
    channels_last: bool = False
    is_calibration: bool = False
    why: str = ""  # the reason of a miss, if it is known
    is_unjudgeable: bool = False  # for the reason in `why`: the published figure cannot be of the step as described

    @property
    def key(self) -> str:
        layout = ", channels last" if self.channels_last else ""
        return f"{self.card}: {self.network}, {self.batch}, {self.precision}{layout}"


ROWS = (
    Row(CONVNET, "titan-x", "AlexNet", 128, "float32", 128 / 0.081),
    Row(CONVNET, "titan-x", "OverFeat", 128, "float32", 128 / 0.268),
    Row(CONVNET, "titan-x", "VGG model A", 64, "float32", 64 / 0.529, is_calibration=True),
    Row(CONVNET, "titan-x", "GoogLeNet", 128, "float32", 128 / 0.470),
    Row(NVIDIA_RESNET, "v100-16", "ResNet-50", 112, "float32", 367, "momentum"),
    Row(NVIDIA_RESNET, "v100-16", "ResNet-50", 256, "float16", 1200, "momentum", channels_last=True),
    Row(NVIDIA_RESNET, "v100-32", "ResNet-50", 112, "float32", 356, "momentum"),
    Row(NVIDIA_RESNET, "v100-32", "ResNet-50", 256, "float16", 1156, "momentum", channels_last=True),
    Row(NVIDIA_RESNET, "a100-80", "ResNet-50", 256, "tf32", 938, "momentum"),
    Row(NVIDIA_RESNET, "a100-80", "ResNet-50", 256, "float16", 2470, "momentum", channels_last=True),
    Row(NVIDIA_BERT, "a100-80", "BERT-large, 128 tokens", 128, "tf32", 317),
    Row(NVIDIA_BERT, "a100-80", "BERT-large, 128 tokens", 256, "float16", 580),
    Row(NVIDIA_BERT, "a100-80", "BERT-large, 512 tokens", 16, "tf32", 110, why=OVER_THE_PEAK, is_unjudgeable=True),
    Row(NVIDIA_BERT, "a100-80", "BERT-large, 512 tokens", 32, "float16", 210, why=OVER_THE_PEAK, is_unjudgeable=True),
    Row(NVIDIA_BERT, "v100-32", "BERT-large, 128 tokens", 32, "float32", 50),
    Row(NVIDIA_BERT, "v100-32", "BERT-large, 128 tokens", 64, "float16", 224),
    Row(NVIDIA_BERT, "v100-32", "BERT-large, 512 tokens", 4, "float32", 19, why=OVER_THE_PEAK, is_unjudgeable=True),
    Row(NVIDIA_BERT, "v100-32", "BERT-large, 512 tokens", 8, "float16", 75, why=OVER_THE_PEAK, is_unjudgeable=True),
    Row(LAMBDA_16, "v100-16", "ResNet-50", 256, "float16", 833, "momentum"),
    Row(LAMBDA_16, "v100-16", "BERT-base, SQuAD", 48, "float16", 189, "apex_o2"),
    Row(LAMBDA_16, "v100-16", "BERT-large, SQuAD", 16, "float16", 57, "apex_o2"),
    Row(LAMBDA_32, "v100-16", "ResNet-50", 128, "float32", 369, "momentum"),
    Row(LAMBDA_32, "v100-16", "BERT-base, SQuAD", 24, "float32", 42, "bert_adam"),
    Row(LAMBDA_32, "v100-16", "BERT-large, SQuAD", 8, "float32", 12, "bert_adam"),
    Row(LAMBDA_16, "rtx-3090", "ResNet-50", 448, "float16", 905, "momentum"),
    Row(LAMBDA_16, "rtx-3090", "BERT-base, SQuAD", 96, "float16", 172, "apex_o2"),
    Row(LAMBDA_16, "rtx-3090", "BERT-large, SQuAD", 28, "float16", 52, "apex_o2"),
    Row(LAMBDA_32, "rtx-3090", "ResNet-50", 224, "tf32", 513, "momentum"),
    Row(LAMBDA_32, "rtx-3090", "BERT-base, SQuAD", 48, "tf32", 85, "bert_adam"),
    Row(LAMBDA_32, "rtx-3090", "BERT-large, SQuAD", 16, "tf32", 24, "bert_adam"),
    Row(LAMBDA_16, "a100-80", "ResNet-50", 1280, "float16", 1582, "momentum"),
    Row(LAMBDA_16, "a100-80", "BERT-base, SQuAD", 320, "float16", 443, "apex_o2"),
    Row(LAMBDA_16, "a100-80", "BERT-large, SQuAD", 112, "float16", 152, "apex_o2"),
    Row(LAMBDA_32, "a100-80", "ResNet-50", 640, "tf32", 1066, "momentum"),
    Row(LAMBDA_32, "a100-80", "BERT-base, SQuAD", 172, "tf32", 239, "bert_adam"),
    Row(LAMBDA_32, "a100-80", "BERT-large, SQuAD", 64, "tf32", 75, "bert_adam"),
    Row(LAMBDA_16, "rtx-4090", "ResNet-50", 448, "float16", 1301, "momentum"),
    Row(LAMBDA_16, "rtx-4090", "BERT-base, SQuAD", 96, "float16", 297, "apex_o2"),
    Row(LAMBDA_16, "rtx-4090", "BERT-large, SQuAD", 28, "float16", 93, "apex_o2"),
    Row(LAMBDA_32, "rtx-4090", "ResNet-50", 224, "tf32", 721, "momentum"),
    Row(LAMBDA_32, "rtx-4090", "BERT-base, SQuAD", 48, "tf32", 137, "bert_adam"),
    Row(LAMBDA_32, "rtx-4090", "BERT-large, SQuAD", 16, "tf32", 44, "bert_adam"),
    Row(LAMBDA_16, "h100", "ResNet-50", 1280, "float16", 2786, "momentum"),
    Row(LAMBDA_16, "h100", "BERT-base, SQuAD", 320, "float16", 868.5, "apex_o2"),
    Row(LAMBDA_16, "h100", "BERT-large, SQuAD", 112, "float16", 308, "apex_o2"),
    Row(LAMBDA_32, "h100", "ResNet-50", 640, "tf32", 1893, "momentum"),
    Row(LAMBDA_32, "h100", "BERT-base, SQuAD", 172, "tf32", 433.5, "bert_adam"),
    Row(LAMBDA_32, "h100", "BERT-large, SQuAD", 64, "tf32", 147, "bert_adam"),
    Row(TIMM_LAST, "rtx-3090", "ResNet-18", 512, "float16", 3481.78, "momentum", channels_last=True),
    Row(TIMM_LAST, "rtx-3090", "ResNet-50", 512, "float16", 1218.01, "momentum", channels_last=True),
    Row(TIMM_LAST, "rtx-3090", "ResNet-101", 256, "float16", 747.89, "momentum", channels_last=True),
    Row(TIMM_LAST, "rtx-3090", "ResNet-152", 192, "float16", 501.44, "momentum", channels_last=True),
    Row(TIMM_LAST, "rtx-3090", "DenseNet-121", 256, "float16", 913.65, "momentum", channels_last=True),
    Row(TIMM_LAST, "rtx-3090", "DenseNet-201", 192, "float16", 562.52, "momentum", channels_last=True),
    Row(TIMM_LAST, "rtx-3090", "Inception v3", 384, "float16", 782.35, "momentum", channels_last=True),
    Row(TIMM_LAST, "rtx-3090", "Inception v4", 192, "float16", 405.43, "momentum", channels_last=True),
    Row(TIMM_LAST, "rtx-3090", "VGG-16", 384, "float16", 546.06, "momentum", channels_last=True),
    Row(TIMM_LAST, "rtx-3090", "MobileNetV2", 512, "float16", 2313.1, "momentum", channels_last=True),
    Row(TIMM_LAST, "rtx-3090", "ViT-B", 192, "float16", 392.99, "momentum"),
    Row(TIMM_LAST, "rtx-3090", "ViT-L", 64, "float16", 117.2, "momentum"),
    Row(TIMM_FIRST, "rtx-3090", "ResNet-18", 512, "float16", 2764.22, "momentum"),
    Row(TIMM_FIRST, "rtx-3090", "ResNet-50", 512, "float16", 826.06, "momentum"),
    Row(TIMM_FIRST, "rtx-3090", "ResNet-101", 256, "float16", 568.98, "momentum"),
    Row(TIMM_FIRST, "rtx-3090", "ResNet-152", 192, "float16", 370.08, "momentum"),
    Row(TIMM_FIRST, "rtx-3090", "DenseNet-121", 256, "float16", 730.11, "momentum"),
    Row(TIMM_FIRST, "rtx-3090", "DenseNet-201", 192, "float16", 447.44, "momentum"),
    Row(TIMM_FIRST, "rtx-3090", "Inception v3", 384, "float16", 602.27, "momentum"),
    Row(TIMM_FIRST, "rtx-3090", "Inception v4", 192, "float16", 316.87, "momentum"),
    Row(TIMM_FIRST, "rtx-3090", "VGG-16", 384, "float16", 465.36, "momentum"),
    Row(TIMM_FIRST, "rtx-3090", "MobileNetV2", 512, "float16", 1832.14, "momentum"),
    Row(TIMM_LAST, "rtx-3090", "ResNet-34", 512, "float16", 2036.51, "momentum", channels_last=True),
    Row(TIMM_LAST, "rtx-3090", "VGG model A", 512, "float16", 954.03, "momentum", channels_last=True),
    Row(TIMM_LAST, "rtx-3090", "ViT-Ti", 512, "float16", 2299.56, "momentum"),
    Row(TIMM_LAST, "rtx-3090", "ViT-S", 384, "float16", 1057.92, "momentum"),
    Row(TIMM_FIRST, "rtx-3090", "ResNet-34", 512, "float16", 1622.41, "momentum"),
    Row(TIMM_FIRST, "rtx-3090", "VGG model A", 512, "float16", 825.98, "momentum"),
)
